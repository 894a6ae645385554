"""Keeps bad numbers away from the weights.

A loss or gradient norm that is not finite never moves anything. A spike, far above the last steps' values, is reported,
skipped or rolled back, as the recipe says. Every rank decides alike, because it sees only sums over all ranks, and a
resumed run decides as the uninterrupted one would, because all of this is saved with the checkpoints.

    norm = engine.step(..., lambda: guard.norm_limit(loss))     # above the limit the weights stay as they are
    match guard.judge(data_step, loss, norm): ...
"""

import math
from collections.abc import Mapping
from statistics import quantiles
from typing import Any, Literal

from train.config import GuardConfig
from train.errors import DivergedError

Verdict = Literal["good", "report", "skip", "rollback"]
FLOOR = 0.02
"""The interquartile range counts as at least this share of the median: a flat curve has no spikes of a hair."""


class Guard:
    """`state` is what `state()` gave when the checkpoint was saved; None for a new run."""

    def __init__(self, config: GuardConfig, state: Mapping[str, Any] | None = None) -> None:
        self._config = config
        state = state or {}
        self._losses: list[float] = list(state.get("losses", []))
        self._norms: list[float] = list(state.get("norms", []))
        self._bad_in_a_row: int = state.get("bad_in_a_row", 0)
        self._bad_in_all: int = state.get("bad_in_all", 0)
        self.data_steps_to_skip: set[int] = set(state.get("step_over", []))
        """Data steps that a roll-back found bad; they are not trained on."""

    def state(self) -> dict[str, Any]:
        """JSON."""
        return {
            "losses": self._losses,
            "norms": self._norms,
            "bad_in_a_row": self._bad_in_a_row,
            "bad_in_all": self._bad_in_all,
            "step_over": sorted(self.data_steps_to_skip),
        }

    def norm_limit(self, loss: float) -> float:
        """The gradient norm above which this step must not move the weights; below 0: whatever the norm is."""
        if not math.isfinite(loss):
            return -1.0
        if self._config.on_spike == "report":
            return math.inf
        return -1.0 if loss > self.limit(self._losses) else self.limit(self._norms)

    def judge(self, data_step: int, loss: float, norm: float) -> tuple[Verdict, str]:
        """What becomes of the step, and why. DivergedError when there were too many bad ones."""
        why = self._why(loss, norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        verdict = ("good" if not why else self._config.on_spike) if finite else "skip"
        if verdict in ("good", "report"):
            self._losses = [*self._losses, loss][-self._config.window :]
            self._norms = [*self._norms, norm][-self._config.window :]
            self._bad_in_a_row = 0
            return verdict, why
        if verdict == "rollback":
            self.data_steps_to_skip.add(data_step)
        self.count_bad(data_step, why)
        return verdict, why

    def count_bad(self, data_step: int, why: str) -> None:
        """A step moves nothing. DivergedError when there were too many of them."""
        self._bad_in_a_row += 1
        self._bad_in_all += 1
        for setting, count in (("max_in_a_row", self._bad_in_a_row), ("max_in_all", self._bad_in_all)):
            bound = getattr(self._config, setting)
            if count > bound:
                raise DivergedError(
                    f"the run has diverged: bad step number {count} at data step {data_step} ({why}), more than "
                    f"guard.{setting} ({bound}); lower optim.lr, look at the documents of that step "
                    "(`keepstep data trace`), or raise the bound"
                )

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """A checkpoint was loaded: its windows count again, but what was counted and found bad since then stays."""
        self._losses, self._norms = list(state["losses"]), list(state["norms"])
        self.data_steps_to_skip |= set(state["step_over"])

    def limit(self, window: list[float]) -> float:
        """Above this a value is a spike."""
        if len(window) < max(4, self._config.window // 4):
            return math.inf
        lower, median, upper = quantiles(window, n=4)
        return upper + self._config.tolerance * max(upper - lower, FLOOR * abs(median))

    def _why(self, loss: float, norm: float) -> str:
        """Empty for a good step."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss:g} and gradient norm {norm:g} must be finite"
        for name, value, window in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            if value > self.limit(window):
                return f"{name} {value:.4g} is above {self.limit(window):.4g}"
        return ""
