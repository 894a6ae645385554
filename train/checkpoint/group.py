"""The ranks that save and load together.

They have a gloo group of their own, so that a save can run in the background while the steps continue. If one rank
fails, every rank raises its error: no rank waits forever, and no rank takes the save for complete.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from train.checkpoint.format.manifest import DamagedError
from train.errors import CheckpointError

T = TypeVar("T")


class Group:
    """All ranks, or one rank where torch.distributed is not initialized. Collective to construct.

    `alive` is called after each block that this rank reads or writes, to show that a long transfer makes progress."""

    def __init__(self, timeout_seconds: float, alive: Callable[[], None] = lambda: None) -> None:
        self.alive = alive
        self._group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; every rank returns its result or raises its error. Collective."""
        outcomes = [attempt(action) if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(outcomes, src=0, group=self._group)
        assert outcomes[0] is not None
        return results_of([outcomes[0]])[0]

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; rank 0 returns all results in rank order, the others an empty list. Collective.

        If any rank fails, every rank raises."""
        own = attempt(action)
        outcomes: list[Any] = [own] * self.size
        if self.size > 1:
            dist.gather_object(own, outcomes if self.rank == 0 else None, dst=0, group=self._group)
        gathered: list[T] = []
        self.on_rank0(lambda: gathered.extend(results_of(outcomes)))
        return gathered

    def gather_all(self, value: T) -> list[T]:
        """The value of each rank, in rank order, on every rank. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, outbox: dict[int, Tensor], inbox: dict[int, Tensor]) -> None:
        """Send each tensor of `outbox` to its rank and fill each of `inbox` from its rank, all at the same time."""
        work = [dist.isend(tensor, rank, group=self._group) for rank, tensor in outbox.items()]
        work += [dist.irecv(tensor, rank, group=self._group) for rank, tensor in inbox.items()]
        for transfer in work:
            assert transfer is not None
            transfer.wait()

    def scatter(self, action: Callable[[], list[T]]) -> T:
        """Run `action` on rank 0, which makes one value per rank; returns this rank's value. Collective."""
        values: list[T] = []
        self.on_rank0(lambda: values.extend(action()))
        if self.size == 1:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values if self.rank == 0 else None, src=0, group=self._group)
        return received[0]


class Outcome(NamedTuple):
    """What an action returned, or its error as text, which can be sent to other ranks."""

    result: Any
    error: str | None = None
    is_damage: bool = False
    """True if the error means that a checkpoint is damaged."""


def attempt(action: Callable[[], Any]) -> Outcome:
    """Run an action and catch its error."""
    try:
        return Outcome(action())
    except CheckpointError as error:
        return Outcome(None, str(error), isinstance(error, DamagedError))
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}")


def results_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """The result of each rank. If any rank failed, one error that names each failed rank.

    DamagedError if all failures are damage, else CheckpointError."""
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if not failed:
        return [outcome.result for outcome in outcomes]
    ranks_by_error: dict[str | None, list[str]] = {}
    for rank, outcome in failed:
        ranks_by_error.setdefault(outcome.error, []).append(str(rank))
    if len(outcomes) == 1:
        message = str(failed[0][1].error)
    else:
        message = "; ".join(f"rank {', '.join(ranks)}: {error}" for error, ranks in ranks_by_error.items())
    raise (DamagedError if all(outcome.is_damage for _, outcome in failed) else CheckpointError)(message)
