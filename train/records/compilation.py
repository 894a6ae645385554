"""Tells how long compiling took, and warns when it was not over with the first step.

Only what happens between `begin` and `report`, the computation of a step, is judged: an evaluation compiles graphs of
its own.
"""

import logging

log = logging.getLogger(__name__)


class Compiling:
    """`enabled`: whether the recipe compiles at all. If not, torch's compiler isn't imported, which takes a second."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._graphs_before = 0
        self._over = False

    def begin(self) -> None:
        self._graphs_before = self._graphs()

    def report(self, step: int, seconds: float) -> str:
        """After a step that took so long: why graphs were compiled in it that should have been there; or nothing."""
        graphs = self._graphs() - self._graphs_before
        first, self._over = not self._over, True
        if not graphs:
            return ""
        if first:
            log.info("%d graphs compiled; the first step took %.1f s with that", graphs, seconds)
            return ""
        why = self._reason()
        log.warning("step %d took %.1f s, for %d graphs were compiled again: %s", step, seconds, graphs, why)
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
