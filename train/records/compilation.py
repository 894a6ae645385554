"""Reports how long compilation took, and warns when a step after the first one compiles again.

Only what happens between `begin` and `report`, the computation of a step, is judged: an evaluation compiles graphs of
its own.
"""

import logging

log = logging.getLogger(__name__)


class CompilationMonitor:
    """Counts the graphs that torch compiles in each step.

    `enabled`: whether the recipe compiles at all. If not, torch's compiler is not imported, which takes a second."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._graphs_before = 0
        self._first_step_done = False

    @property
    def expected(self) -> bool:
        """Whether the next step compiles: only the first one does."""
        return self._enabled and not self._first_step_done

    def begin(self) -> None:
        """Start to watch a step."""
        self._graphs_before = self._graphs()

    def report(self, step: int, seconds: float) -> str:
        """Return why a step after the first one, which took so many seconds, compiled again; empty if it did not."""
        graphs = self._graphs() - self._graphs_before
        first, self._first_step_done = not self._first_step_done, True
        if not graphs:
            return ""
        if first:
            log.info("%d graphs compiled; the first step took %.1f s with compilation", graphs, seconds)
            return ""
        why = self._reason()
        log.warning("step %d took %.1f s because %d graphs were compiled again: %s", step, seconds, graphs, why)
        return why

    def _graphs(self) -> int:
        if not self._enabled:
            return 0
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def _reason(self) -> str:
        from torch._dynamo.utils import get_compilation_metrics

        reasons = [str(one.recompile_reason) for one in get_compilation_metrics() if one.recompile_reason]
        return reasons[-1] if reasons else "torch gives no reason"
