"""The losses and metrics of one step, from this rank's sums to the means over all ranks.

Shapes: S data sources, M metrics of the model, R = S + M.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel.bootstrap import Runtime
from parallel.collectives import sum_over_ranks


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


class PendingLosses:
    """This rank's sums of one step, which the device may still be computing."""

    def __init__(self, sums_R: Tensor, targets_S: list[float], runtime: Runtime) -> None:
        """`sums_R`: what the engine returned. `targets_S`: targets of the global batch by source."""
        self._sums_R, self._targets_S, self._runtime = sums_R, targets_S, runtime
        self._losses: StepLosses | None = None

    def gather(self) -> StepLosses:
        """Return the sums over all ranks. Collective at the first call, which waits for the device; then a value."""
        if self._losses is None:
            sums = sum_over_data_parallel(self._sums_R, self._runtime)
            n_sources = len(self._targets_S)
            self._losses = StepLosses(sums[:n_sources], sums[n_sources:], self._targets_S)
        return self._losses


def sum_over_data_parallel(values: Tensor, runtime: Runtime) -> list[float]:
    """Return the sums of a vector over data-parallel ranks, on the host. Collective."""
    summed = sum_over_ranks(values.double().cpu())
    return (summed / runtime.layout.same_data_ranks).tolist()  # ranks that see the same data hold the same values
