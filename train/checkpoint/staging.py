"""Host memory that a save copies the state to, so that the steps can go on while it is written.

One buffer, made at the first save and used again by every later one: a save waits for the one before it, so this rank's
bytes are all that is ever needed. Pinned where the tensors are on an accelerator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        return self._buffer.numel()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the host, valid until the next call; returns when they are complete."""
        total = sum(_padded(tensor.nbytes) for tensor in tensors)
        accelerated = any(tensor.device.type != "cpu" for tensor in tensors)
        if self.bytes < total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=accelerated)
        copies, at = [], 0
        for tensor in tensors:
            slot = self._buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(slot.copy_(tensor.detach(), non_blocking=True))
            at += _padded(tensor.nbytes)
        if accelerated:
            torch.accelerator.synchronize()
        return copies


def _padded(size: int) -> int:
    return -(-size // 64) * 64  # a cache line: every type is aligned
