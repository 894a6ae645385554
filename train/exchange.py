"""What the ranks tell each other in each step, in one small sum over all of them.

The engine adds it up together with the squares of the gradient norm (`Engine.step`), on the device. It carries the
losses of this step, and what ranks must agree on before the next one: the number of targets of its global batch, and
whether a rank quarantined a block of data, was asked to stop or to profile, or knows that time is up. So this rank
reads the next batch while the device computes this one, and a step needs no exchange between hosts.

Shapes: S data sources, M metrics of the model, R = S + M.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from data_pipeline.stream.batch import Batch
from parallel.bootstrap import Runtime
from parallel.collectives import sum_over_ranks
from train.device_batch import count_targets_by_source


@dataclass(frozen=True)
class StepLosses:
    """Sums over the global batch of one step."""

    sums_S: list[float]
    """Loss in nats, by data source."""
    metric_sums_M: list[float]
    """Metrics of the model, each summed over targets."""
    targets_S: list[float]
    """Targets, by data source."""

    @property
    def mean(self) -> float:
        """Mean loss in nats per target."""
        return sum(self.sums_S) / sum(self.targets_S)

    def by_source(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean loss of each source that has targets as `loss/NAME`; empty if there is one source."""
        if len(self.targets_S) == 1:
            return {}
        sources = zip(names, self.sums_S, self.targets_S, strict=True)
        return {f"loss/{name}": loss / targets for name, loss, targets in sources if targets}

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean of each metric per target, by name."""
        targets = sum(self.targets_S)
        return {name: total / targets for name, total in zip(names, self.metric_sums_M, strict=True)}


N_FLAGS = 3


class Agreement(NamedTuple):
    """What all ranks know before a step."""

    targets_S: list[float]
    """Targets of the global batch, by data source."""
    quarantined: bool
    """Whether a rank has quarantined a block of data, so that all must replace the same rows."""
    stop_requested: bool
    time_is_up: bool
    profile_steps: int = 0
    """Steps of which a profile is asked for (`train.profiling`)."""


def word_of_rank_0(time_is_up: bool, profile_steps: int) -> int:
    """Return what only rank 0 knows as one number.

    The vector that is summed must not become longer: gloo would add its values up in another order, and so in other
    bits."""
    return 2 * profile_steps + time_is_up


class Exchange:
    """This rank's micro batches, step by step, with what the ranks agree on before each step.

    `flags` returns this rank's part of the agreement: whether it has quarantined a block, whether it was asked to stop,
    and on rank 0 its `word_of_rank_0`, else 0."""

    def __init__(
        self, batches: Iterator[list[Batch]], flags: Callable[[], Sequence[float]], runtime: Runtime, n_sources: int
    ) -> None:
        self._batches, self._flags, self._runtime, self._n_sources = batches, flags, runtime, n_sources
        self._next: list[Batch] | None = None
        self._agreement: Agreement | None = None
        self._targets_S: list[float] = []
        self.losses = StepLosses([], [], [])
        """Those of the last step that was received."""

    def next_step(self) -> tuple[list[Batch], Agreement]:
        """The next step's micro batches, and the agreement about it. Collective, unless the last step carried it."""
        micro_batches = self._next if self._next is not None else next(self._batches)
        agreement = self._agreement
        if agreement is None:
            agreement = self._agreement_of(sum_over_data_parallel(self._facts(micro_batches), self._runtime))
        self._next = self._agreement = None
        self._targets_S = agreement.targets_S
        return micro_batches, agreement

    def read_next(self) -> None:
        """Read the next step's batch, so that `values` carries the facts about it."""
        self._next = next(self._batches)

    def values(self, sums_R: Tensor) -> Tensor:
        """This rank's values for the sum of `Engine.step`: what the forward pass returned, then the facts."""
        facts = self._facts(self._next or [])
        if sums_R.is_cuda:  # without pinned memory the host would wait for the device here
            facts = facts.pin_memory().to(sums_R.device, non_blocking=True)
        return torch.cat((sums_R.double(), facts))

    def receive(self, totals: list[float]) -> StepLosses:
        """Take in the sums over all ranks, from `Engine.step`; returns the losses of the step."""
        totals = [total / self._runtime.layout.same_data_ranks for total in totals]
        first_fact = len(totals) - self._n_sources - N_FLAGS
        if self._next is not None:
            self._agreement = self._agreement_of(totals[first_fact:])
        sums_S, metric_sums_M = totals[: self._n_sources], totals[self._n_sources : first_fact]
        self.losses = StepLosses(sums_S, metric_sums_M, self._targets_S)
        return self.losses

    def ask_again(self) -> None:
        """Forget the agreement about the next step, because much time has passed since the ranks were asked."""
        self._agreement = None

    def _facts(self, micro_batches: list[Batch]) -> Tensor:
        """Number of targets by source, then the flags. Shape (S + 3,), fp64, on CPU."""
        flags = torch.tensor(self._flags(), dtype=torch.float64)
        return torch.cat((count_targets_by_source(micro_batches, self._n_sources), flags))

    def _agreement_of(self, facts: list[float]) -> Agreement:
        *targets_S, quarantined, stop_requested, share_of_word = facts
        word = round(share_of_word * self._runtime.layout.same_data_ranks)  # only one of those ranks gave it
        return Agreement(targets_S, quarantined > 0, stop_requested > 0, bool(word % 2), word // 2)


def sum_over_data_parallel(values: Tensor, runtime: Runtime) -> list[float]:
    """Return the sums of a vector over data-parallel ranks, on the host. Collective."""
    summed = sum_over_ranks(values.double().cpu())
    return (summed / runtime.layout.same_data_ranks).tolist()  # ranks that see the same data hold the same values
