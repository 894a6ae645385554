"""The ranks that save and load together, on a gloo group of their own, so that a save can go on behind the steps.

What one rank fails at, every rank learns and raises: nobody is left waiting, and nobody thinks a save complete.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from train.checkpoint.format.manifest import DamagedError
from train.errors import CheckpointError

T = TypeVar("T")


class Group:
    """Collective to construct. Without torch.distributed it is a group of one. `alive` is called as bytes come and go,
    however long that takes in all."""

    def __init__(self, timeout_seconds: float, alive: Callable[[], None] = lambda: None) -> None:
        self.alive = alive
        self._group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Collective. Rank 0 acts; every rank gets its result, or raises its error."""
        outcome = [attempt(action) if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        assert outcome[0] is not None
        return unwrap([outcome[0]])[0]

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Collective. Every rank acts; rank 0 gets all results, the others none; an error anywhere is raised by all."""
        mine = attempt(action)
        outcomes: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.gather_object(mine, outcomes if self.rank == 0 else None, dst=0, group=self._group)
        results: list[T] = []
        self.on_rank0(lambda: results.extend(unwrap(outcomes)))
        return results

    def gather_all(self, value: T) -> list[T]:
        """Collective. Every rank gets every rank's value."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, outbox: dict[int, Tensor], inbox: dict[int, Tensor]) -> None:
        """Send each tensor to its rank and fill each from its rank, all at the same time."""
        work = [dist.isend(tensor, rank, group=self._group) for rank, tensor in outbox.items()]
        work += [dist.irecv(tensor, rank, group=self._group) for rank, tensor in inbox.items()]
        for transfer in work:
            assert transfer is not None
            transfer.wait()

    def scatter(self, action: Callable[[], list[T]]) -> T:
        """Collective. Rank 0 makes one value for each rank."""
        values: list[T] = []
        self.on_rank0(lambda: values.extend(action()))
        if self.size == 1:
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values if self.rank == 0 else None, src=0, group=self._group)
        return mine[0]


Outcome = tuple[Any, str | None, bool]
"""Result, or the error in words and whether it means that a checkpoint is damaged."""


def attempt(action: Callable[[], Any]) -> Outcome:
    try:
        return action(), None, False
    except CheckpointError as error:
        return None, str(error), isinstance(error, DamagedError)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", False


def unwrap(outcomes: list[Outcome]) -> list[Any]:
    """The results, or one error that names each rank that failed."""
    failed = [(rank, text, damaged) for rank, (_, text, damaged) in enumerate(outcomes) if text is not None]
    if not failed:
        return [value for value, _, _ in outcomes]
    texts = {}
    for rank, text, _ in failed:
        texts.setdefault(text, []).append(str(rank))
    if len(outcomes) == 1:
        message = failed[0][1]
    else:
        message = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in texts.items())
    raise (DamagedError if all(damaged for _, _, damaged in failed) else CheckpointError)(message)
