"""Initial values: each rank draws the elements that it holds, and no others.

The value of an element is a function of the parameter's name and the element's number in the whole row-major tensor
(`Trainable.initial_value`), so every layout gets the same bits. Values are drawn in small blocks, by the device or by
threads of this process. Each CPU thread computes its blocks alone: torch's own threads would wait for each other in
each operation, which on a busy machine takes a hundred times as long.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.engine import InitialValue
from parallel.sharded import as_sharded, box_of, local_part

log = logging.getLogger(__name__)

CPU_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 22
"""Elements of a block. On a CPU its values stay in the cache of a core."""
LOG_SECONDS = 10.0
"""Time between two lines of progress."""


@dataclass(frozen=True)
class HeldPart:
    """The elements of a parameter that this rank holds: a box of the whole tensor, or a run of its flat elements."""

    name: str
    """Plain name of the parameter."""
    shape: Sequence[int]
    """Shape of the whole tensor; for a run, its number of elements."""
    offsets: Sequence[int]
    """Where the part begins in each dimension."""
    local: Tensor
    """The part itself, which is filled in place."""


@dataclass(frozen=True)
class Block:
    """Some rows of a part, each a run of adjacent elements of the whole tensor."""

    name: str
    view: Tensor
    """The rows, which are filled in place. Shape (rows, elements of a run)."""
    start: int
    """Number of the first element of the first row in the whole row-major tensor."""
    stride: int
    """Distance to the number of the next row's first element; even, if there are several rows."""

    def fill(self, initial_value: InitialValue) -> None:
        """Draw the pairs that cover the rows, and copy the rows' elements."""
        rows, width = self.view.shape
        pairs = torch.arange(self.start // 2, (self.start + width + 1) // 2, device=self.view.device)[None]
        if rows > 1:
            pairs = pairs + torch.arange(rows, device=self.view.device)[:, None] * (self.stride // 2)
        self.view.copy_(initial_value(self.name, pairs)[:, self.start % 2 :][:, :width])


def fill_model(model: nn.Module, initial_value: InitialValue, alive: Callable[[], None] = lambda: None) -> None:
    """Fill this rank's part of each parameter with its initial values. See `fill_parts`."""
    parts = [held_part(name, parameter.detach()) for name, parameter in model.named_parameters()]
    fill_parts(parts, initial_value, alive)


def fill_parts(
    parts: Sequence[HeldPart], initial_value: InitialValue, alive: Callable[[], None] = lambda: None
) -> None:
    """Fill the parts in place. Any thread calls `alive` after each block. A long draw logs its progress."""
    total, drawn, logged = sum(part.local.numel() for part in parts), 0, time.monotonic()
    blocks, lock = (block for part in parts for block in _blocks(part)), threading.Lock()

    def fill_some() -> None:
        nonlocal drawn, logged
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            block.fill(initial_value)
            alive()
            with lock:
                drawn += block.view.numel()
                if time.monotonic() - logged > LOG_SECONDS:
                    logged = time.monotonic()
                    log.info("%.0f of %.0f million initial values are drawn", drawn / 1e6, total / 1e6)

    threads = torch.get_num_threads()
    if threads == 1 or any(part.local.device.type != "cpu" for part in parts):
        fill_some()
        return
    torch.set_num_threads(1)  # within each operation; threads started later inherit the setting
    try:
        with ThreadPoolExecutor(threads, "keepstep-initial") as pool:
            for thread in [pool.submit(fill_some) for _ in range(threads)]:
                thread.result()
    finally:
        torch.set_num_threads(threads)


def held_part(name: str, parameter: Tensor) -> HeldPart:
    """This rank's part of a plain parameter, which is all of it, or of a DTensor."""
    sharded = as_sharded(parameter)
    offsets = [0] * parameter.dim() if sharded is None else [along.start for along in box_of(sharded)]
    return HeldPart(name, parameter.shape, offsets, local_part(parameter))


def _blocks(part: HeldPart) -> Iterator[Block]:
    """Rows of the part that together are all of it."""
    for view, start in _matrices(part.local, part.shape, part.offsets):
        size = CPU_BLOCK if view.device.type == "cpu" else DEVICE_BLOCK
        rows, width, stride = *view.shape, part.shape[-1]
        together = max(1, size // max(1, width)) if stride % 2 == 0 else 1
        for row in range(0, rows, together):
            for column in range(0, width, size):
                block = view[row : row + together, column : column + size]
                yield Block(part.name, block, start + row * stride + column, stride)


def _matrices(local: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """The part as matrices whose rows are runs `shape[-1]` apart, with the number of each one's first element."""
    whole_rows = all(held == size for held, size in zip(local.shape[1:], shape[1:], strict=True))
    if local.dim() > 1 and whole_rows and local.is_contiguous():
        yield local.view(1, -1), math.prod(shape[1:]) * offsets[0]
    elif local.dim() > 2:
        for index, inner in enumerate(local):
            for view, start in _matrices(inner, shape[1:], offsets[1:]):
                yield view, (offsets[0] + index) * math.prod(shape[1:]) + start
    elif local.dim() == 2:
        yield local, shape[1] * offsets[0] + offsets[1]
    else:
        yield local[None], offsets[0]
