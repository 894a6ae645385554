"""What the dashboard shows of a run at one moment, read from its folder alone."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.inspect.overview import Overview, overview_of
from launch.inspect.run_status import RunStatus, read_status
from launch.inspect.sampled_curve import SampledCurve, sampled_curve
from train.errors import ConfigError
from train.run_folder import RunFolder

EVENTS = 6
"""Events that are shown."""
PIXELS = 240
"""Parts into which the steps are divided for the terminal's curve."""
RECENT = 20
"""Drawn steps from which the rate is computed."""
REREAD = 10.0
"""Least seconds between two readings of the whole logs, as a multiple of the seconds that the last one took."""


@dataclass(frozen=True)
class Snapshot:
    """One run at one moment."""

    path: Path
    status: RunStatus
    overview: Overview
    curve: SampledCurve
    """Read again only now and then, because the file may be long."""

    @property
    def last(self) -> dict[str, Any]:
        """The newest record of a step that the curve has; empty before the first step."""
        return self.curve.steps[-1] if self.curve.steps else {}

    @property
    def steps_per_second(self) -> float:
        """Rate over the last steps that are drawn, pauses included; 0 if it is not known."""
        recent = [
            one
            for one in self.curve.steps[-RECENT:]
            if "time" in one and one.get("attempt") == self.last.get("attempt")
        ]
        took = recent[-1]["time"] - recent[0]["time"] if recent else 0.0
        return (recent[-1]["step"] - recent[0]["step"]) / took if took > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time to the recipe's last step at the present rate; None if it is not known."""
        step, steps, rate = self.status.step, self.status.steps, self.steps_per_second
        return max(0, steps - step) / rate if step is not None and steps and rate else None

    def values(self, metric: str) -> tuple[list[float], list[float]]:
        """Return the steps and the values of a metric. ConfigError if no record has it."""
        records = [*self.curve.steps, *self.curve.evaluations]
        found = [one for one in records if isinstance(one.get(metric), int | float)]
        if records and not found:
            numbers = {name for one in records for name, value in one.items() if isinstance(value, float)}
            names = sorted(numbers - {"time", "uptime"})
            raise ConfigError(
                f"--metric ({metric}) is in no record of {self.path}; choose one of {', '.join(names[:30])}"
            )
        return [float(one["step"]) for one in found], [float(one[metric]) for one in found]


class Watched:
    """Reads one run again and again; the whole logs less often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._curve, self._overview = SampledCurve(), None
        self._next = -math.inf

    def read(self) -> Snapshot:
        """Return the run as it is now."""
        began = time.monotonic()
        if began >= self._next or self._overview is None:
            self._curve = sampled_curve(RunFolder(self._path).metrics, PIXELS)
            self._overview = overview_of(self._path)
            now = time.monotonic()
            self._next = now + REREAD * (now - began)
        status = read_status(self._path, time.time(), EVENTS)
        return Snapshot(self._path, status, self._overview, self._curve)
