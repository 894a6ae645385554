"""Handling of loss spikes and non-finite losses and gradients.

A step whose loss or gradient norm is not finite never changes the weights. A gradient of zeros is reported, and several
in a row end the run: the model no longer learns. A spike, far above the values of the last steps, is reported, skipped
or rolled back, as the recipe says. Every rank decides the same, because it sees only sums over all ranks. A resumed run
decides the same as an uninterrupted one, because the guard's state is saved with the checkpoints.

    norm = engine.step(..., lambda totals: guard.norm_limit(loss))     # above the limit the weights stay unchanged
    match guard.judge(data_step, loss, norm): ...
"""

import math
from collections.abc import Mapping
from statistics import quantiles
from typing import Any, Literal

from train.config import GuardConfig
from train.errors import DivergedError

Verdict = Literal["good", "report", "skip", "rollback"]
DEAD_NORM = 1e-10
"""A gradient norm that is not above this counts as zero: the mean loss of a model that learns has a far larger one."""
MAX_DEAD_STEPS = 3
"""Number of consecutive steps with a gradient of zeros that end the run."""
MIN_RELATIVE_RANGE = 0.02
"""Least interquartile range, as a share of the median. Without it, tiny changes of a flat curve would be spikes."""


class Guard:
    """Judges each step by its loss and gradient norm.

    `state` is the result of `state()` when the checkpoint was saved; None for a new run."""

    def __init__(self, config: GuardConfig, state: Mapping[str, Any] | None = None) -> None:
        self._config = config
        state = state or {}
        self._losses: list[float] = list(state.get("losses", []))
        self._norms: list[float] = list(state.get("norms", []))
        self._bad_in_a_row: int = state.get("bad_in_a_row", 0)
        self._bad_in_all: int = state.get("bad_in_all", 0)
        self._dead_in_a_row: int = state.get("dead_in_a_row", 0)
        self.data_steps_to_skip: set[int] = set(state.get("step_over", []))
        """Data steps whose batch caused a rollback; they are not trained on again."""

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as JSON values."""
        return {
            "losses": self._losses,
            "norms": self._norms,
            "bad_in_a_row": self._bad_in_a_row,
            "bad_in_all": self._bad_in_all,
            "dead_in_a_row": self._dead_in_a_row,
            "step_over": sorted(self.data_steps_to_skip),
        }

    def reason_to_skip(self, data_step: int, targets: float) -> str:
        """Return why a batch must be skipped before it is computed; empty if it must not.

        Raises DivergedError if too many batches had no targets."""
        if data_step in self.data_steps_to_skip:
            return "the guard rolled back from this batch"
        if not targets:
            self.count_bad(data_step, "no targets in the batch")
            return "no targets in the batch"
        return ""

    def norm_limit(self, loss: float) -> float:
        """The gradient norm above which this step must not change the weights. Negative: it must not in any case."""
        if not math.isfinite(loss):
            return -1.0
        if self._config.on_spike == "report":
            return math.inf
        return -1.0 if loss > self._spike_limit(self._losses) else self._spike_limit(self._norms)

    def judge(self, data_step: int, loss: float, norm: float) -> tuple[Verdict, str]:
        """What to do with the step, and the reason ("" for a good step).

        DivergedError after too many bad steps, or several steps with a gradient of zeros."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and norm <= DEAD_NORM:
            return "report", self._count_dead(data_step, loss, norm)
        if finite:
            self._dead_in_a_row = 0
        reason = self._reason(loss, norm)
        verdict = ("good" if not reason else self._config.on_spike) if finite else "skip"
        if verdict in ("good", "report"):
            self._losses = [*self._losses, loss][-self._config.window :]
            self._norms = [*self._norms, norm][-self._config.window :]
            self._bad_in_a_row = 0
            return verdict, reason
        if verdict == "rollback":
            self.data_steps_to_skip.add(data_step)
        self.count_bad(data_step, reason)
        return verdict, reason

    def count_bad(self, data_step: int, reason: str) -> None:
        """Count a step that changes no weights. DivergedError if there are too many of them."""
        self._bad_in_a_row += 1
        self._bad_in_all += 1
        counts = {"max_consecutive_bad_steps": self._bad_in_a_row, "max_bad_steps": self._bad_in_all}
        for setting, count in counts.items():
            bound = getattr(self._config, setting)
            if count > bound:
                raise DivergedError(
                    f"the run has diverged: bad step number {count} at data step {data_step} ({reason}), more than "
                    f"guard.{setting} ({bound}); lower optim.lr, inspect the documents of that step "
                    "(`keepstep data trace`), or raise the bound"
                )

    def _count_dead(self, data_step: int, loss: float, norm: float) -> str:
        """Count a step with a gradient of zeros; return the reason. DivergedError if there are several in a row."""
        self._dead_in_a_row += 1
        reason = f"the gradient norm is {norm:g}, so the model does not learn (loss {loss:.4g})"
        if self._dead_in_a_row >= MAX_DEAD_STEPS:
            raise DivergedError(
                f"the model is dead: {reason} in {self._dead_in_a_row} steps in a row, up to data step {data_step}; "
                "its weights were destroyed before, and training on does not repair them"
            )
        return reason

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Restore the windows from a checkpoint's state. Counts of bad steps and batches to skip are kept."""
        self._losses, self._norms = list(state["losses"]), list(state["norms"])
        self.data_steps_to_skip |= set(state["step_over"])

    def _spike_limit(self, window: list[float]) -> float:
        """The value above which the next one is a spike; infinite while the window is too short."""
        if len(window) < max(4, self._config.window // 4):
            return math.inf
        lower, median, upper = quantiles(window, n=4)
        return upper + self._config.tolerance * max(upper - lower, MIN_RELATIVE_RANGE * abs(median))

    def _reason(self, loss: float, norm: float) -> str:
        """Why the step is bad; "" for a good step."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss:g} and gradient norm {norm:g} must be finite"
        for name, value, window in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            if value > self._spike_limit(window):
                return f"{name} {value:.4g} is above {self._spike_limit(window):.4g}"
        return ""
