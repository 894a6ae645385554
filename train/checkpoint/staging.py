"""Host memory to which a save copies the state, so that the steps continue while the copy is written.

The buffers are allocated once and every save reuses them: a save waits for the one before it, so only one copy of this
rank's bytes exists at a time. They are pinned where tensors are on an accelerator. Torch pins whole powers of two, so
one buffer could take nearly twice the memory. Several buffers that are full powers of two waste at most the rest of the
last one, and what pieces leave free in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 2**28
"""Bytes of a buffer that is not the last, at least."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor is staged."""

    buffer: int
    offset: int


def plan_buffers(sizes: Sequence[int]) -> tuple[list[Slot], list[int]]:
    """The slot of each tensor, given their bytes, and the bytes used of each buffer.

    Each tensor, largest first, is put into the first buffer with room for it."""
    padded = [-(-size // 64) * 64 for size in sizes]  # a cache line, so that every type is aligned
    capacity = power_of_two(max(SMALLEST, *padded, 0))
    used: list[int] = []
    slots: dict[int, Slot] = {}
    for index in sorted(range(len(padded)), key=lambda index: -padded[index]):
        buffer = next((n for n, bytes_used in enumerate(used) if bytes_used + padded[index] <= capacity), len(used))
        if buffer == len(used):
            used.append(0)
        slots[index] = Slot(buffer, used[buffer])
        used[buffer] += padded[index]
    return [slots[index] for index in range(len(padded))], used


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: what torch pins for it."""
    return 1 << max(0, size - 1).bit_length()


class Staging:
    """Reusable buffers in host memory."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._slots: list[Slot] = []
        self._sizes: list[int] = []
        self._pinned = False

    @property
    def bytes(self) -> int:
        """Size of the buffers in bytes."""
        return sum(power_of_two(buffer.numel()) if self._pinned else buffer.numel() for buffer in self._buffers)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Allocate the buffers for copies of these tensors, unless they exist. Pinning takes seconds a rank."""
        sizes = [tensor.nbytes for tensor in tensors]
        if sizes == self._sizes:
            return
        self._buffers = []  # frees the old buffers before the new ones are allocated
        self._slots, used = plan_buffers(sizes)
        self._pinned = any(tensor.device.type != "cpu" for tensor in tensors)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for size in used]
        self._sizes = sizes

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies on the host, valid until the next call. Returns when they are complete."""
        self.prepare(tensors)
        copies: list[Tensor] = []
        for tensor, slot in zip(tensors, self._slots, strict=True):
            part = self._buffers[slot.buffer][slot.offset : slot.offset + tensor.nbytes]
            copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True))
        if self._pinned:
            torch.accelerator.synchronize()
        return copies
