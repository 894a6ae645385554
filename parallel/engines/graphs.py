"""The forward and backward pass of a micro batch as one CUDA graph (`parallel.cuda_graphs`), for `single` and `ddp`.

The host launches thousands of kernels in a step. In a small model they are so short that the device waits for the host.
A graph is recorded once and replayed with one launch. It reads and writes fixed memory:

| memory                               | who fills it                                              |
| ------------------------------------ | --------------------------------------------------------- |
| the batch, and the scale of the loss | copied before each replay                                 |
| weights                              | the optimizer and loads, in place                         |
| working weights, activations, sums   | the graph itself; the memory stays allocated              |
| gradients                            | the graph adds to them; one buffer, zeroed after the step |

All micro batches have the same shapes. The passes run a few times before they are recorded, because kernels are chosen
and compiled in their first runs. These runs change nothing that lasts: gradients are zeroed after them, and the random
numbers begin again. A graph advances the device's random numbers like the kernels that it replaces, so dropout has new
masks in each replay. Evaluation does not use the graph.

Collectives are outside. So under `ddp` the gradients are averaged in one all-reduce after the last micro batch, and not
beside its backward pass as without graphs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

WARM_UP_RUNS = 3


class Fillable(Protocol):
    """A batch whose tensors can keep their memory while their values change."""

    def copy(self) -> Self:
        """The same values in memory of its own."""
        ...

    def fill(self, other: Self) -> None:
        """Take over the values of a batch of the same shapes."""
        ...


Passes = Callable[[Fillable, Tensor], Tensor]
"""`passes(batch, scale)`: adds the gradients of `objective * scale` to those that exist; returns the sums."""


class MicroBatchGraph:
    """Replays the passes of a micro batch. It is recorded in the first run."""

    def __init__(self, gradients: Tensor, record: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]) -> None:
        """`gradients`: what the passes add to (`flat_gradients`). `record`: see `record_on_cuda`."""
        self._gradients = gradients
        self._record = record
        self._replay: Callable[[], Tensor] | None = None

    def run(self, passes: Passes, batch: Fillable, scale: float) -> Tensor:
        """The sums of the micro batch. Adds to the gradients, which before the first run must be zero."""
        if self._replay is None:
            self._batch, self._scale = batch.copy(), self._gradients.new_tensor(scale)
            self._replay = self._record(lambda: passes(self._batch, self._scale))
            self._gradients.zero_()
        self._batch.fill(batch)
        self._scale.fill_(scale)
        return self._replay().clone()


def record_on_cuda(passes: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run the passes a few times, then record them; returns what replays them. Each replay fills the same result."""
    numbers, stream = torch.cuda.get_rng_state(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            passes()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_rng_state(numbers)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, may call the device meanwhile. By default their calls are errors.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = passes()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def flat_gradients(model: nn.Module) -> Tensor:
    """Give each parameter a gradient of zeros, as parts of one fp32 buffer, and return the buffer."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


@contextmanager
def averaged(gradients: Tensor, group: dist.ProcessGroup | None, is_last: bool) -> Iterator[None]:
    """The context of a micro batch under `ddp`: after the last one, average the gradients over the group. Collective.

    They are divided first, as torch's DDP does."""
    yield
    if is_last:
        gradients.div_(dist.get_world_size(group))
        dist.all_reduce(gradients, group=group)
