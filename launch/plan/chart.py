"""The scale curve as a picture, by matplotlib (the extra `plots`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.plan.estimate import Plan
from train.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def draw_scale(curve: Sequence[tuple[int, Plan]], path: Path, title: str) -> None:
    """Draw tokens per second of each GPU and the days of the run over the number of GPUs.

    ConfigError if matplotlib is missing, or if the file has another format or cannot be written."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--png {path} must end in one of {', '.join(FORMATS)}")
    if not curve:
        raise ConfigError("no number of GPUs from 8 to 16,384 divides this recipe, so there is no curve to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('--png needs matplotlib: pip install "keepstep[plots]"') from None
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    speed, days = figure.subplots(1, 2)
    gpus = [count for count, _ in curve]
    fits = [plan.fits for _, plan in curve]
    each = [plan.tokens_per_second / count for count, plan in curve]
    _draw(speed, gpus, each, fits, "tokens/s per GPU")
    speed.set_ylim(bottom=0)
    _draw(days, gpus, [plan.days for _, plan in curve], fits, "days")
    days.set_yscale("log")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror}") from None


def _draw(axes: Any, gpus: Sequence[int], values: Sequence[float], fits: Sequence[bool], label: str) -> None:
    """Draw one curve. Hollow points are numbers of GPUs on which the run does not fit."""
    axes.plot(gpus, values, color="C0")
    for is_full, name in ((True, "fits"), (False, "does not fit")):
        chosen = [(x, y) for x, y, fit in zip(gpus, values, fits, strict=True) if fit == is_full]
        if chosen:
            axes.scatter(
                *zip(*chosen, strict=True), facecolors="C0" if is_full else "white", edgecolors="C0", label=name
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], rotation=45)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(label)
    axes.legend()
