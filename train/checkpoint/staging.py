"""Host memory to which a save copies the state, so that the steps continue while the copy is written.

The first save allocates one buffer and every later save reuses it: a save waits for the one before it, so only one copy
of this rank's bytes exists at a time. The buffer is pinned where tensors are on an accelerator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    """A reusable buffer in host memory."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._buffer.numel()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies on the host, valid until the next call. Returns when they are complete."""
        total = sum(_padded(tensor.nbytes) for tensor in tensors)
        accelerated = any(tensor.device.type != "cpu" for tensor in tensors)
        if self.bytes < total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
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
    return -(-size // 64) * 64  # a cache line, so that every type is aligned
