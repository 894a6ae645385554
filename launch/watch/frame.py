"""One frame of the dashboard, drawn by rich. What a run says is shown as text, never as markup."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.inspect.events import describe
from launch.terminal import duration, local_time, visible
from launch.watch.braille import curve, limits
from launch.watch.ranks import heat_map
from launch.watch.snapshot import Snapshot

COLOURS = {"running": "green", "finished": "green", "failed": "red", "interrupted": "red", "silent": "yellow"}
HEIGHT, SMALL = 10, 4
"""Lines of the curve of one run, and of each of several."""
AXIS = 12
"""Characters to the left of a curve."""


def frame(runs: Sequence[Snapshot], metric: str, width: int) -> RenderableType:
    """Return the frame: one run in full, or several below each other."""
    full = len(runs) == 1
    return Group(*(_panel(run, metric, width, full) for run in runs), Text("q or Ctrl-C ends", style="dim"))


def _panel(run: Snapshot, metric: str, width: int, full: bool) -> RenderableType:
    parts: list[RenderableType] = [_head(run), _bar(run, width - 4), _figures(run)]
    parts.append(_curve(run, metric, width - 4, HEIGHT if full else SMALL))
    if run.overview.cause:
        parts.append(Text(f"failed first: {visible(run.overview.cause)}", style="red"))
    if run.status.ranks and full:
        ranks = run.status.ranks
        parts.append(Text(f"ranks; last progress {duration(ranks['idle_seconds'])} before", style="bold"))
        parts.append(heat_map(ranks["ranks"], ranks["slow"], width - 4))
    if full:
        parts.append(_events(run))
    return Panel(Group(*parts), title=Text(visible(str(run.path))), title_align="left", width=width)


def _head(run: Snapshot) -> Text:
    status, line = run.status, run.overview
    head = Text(status.state, style=f"bold {COLOURS.get(status.state, 'yellow')}")
    ago = "" if status.silent_seconds is None else f"written {duration(round(status.silent_seconds))} ago"
    goodput = "" if line.goodput is None else f"goodput {line.goodput:.0%}"
    restarts = f"{line.restarts} restarts" if line.restarts else ""
    saved = "" if status.saved_step is None else f"checkpoint {status.saved_step:,}"
    parts = (ago, goodput, restarts, saved, line.holder, "stop requested" if status.stop_requested else "")
    return head.append("".join(f"  {visible(part)}" for part in parts if part), style="default")


def _bar(run: Snapshot, width: int) -> RenderableType:
    step, steps = run.status.step or 0, run.status.steps
    left = run.seconds_left
    words = f" {step:,}" + (f" of {steps:,} steps" if steps else " steps")
    words += f", {run.steps_per_second:.3g} steps/s" if run.steps_per_second else ""
    words += f", {duration(left)} left" if left is not None and run.status.state == "running" else ""
    grid = Table.grid()
    grid.add_row(ProgressBar(total=steps or 1, completed=step, width=max(10, width - len(words))), Text(words))
    return grid


def _figures(run: Snapshot) -> Text:
    last, parts = run.last, list[str]()
    for name, words, form in (
        ("loss", "loss", ".4f"),
        ("lr", "lr", ".2e"),
        ("grad_norm", "grad norm", ".3f"),
        ("tokens_per_second", "tokens/s", ",.0f"),
        ("mfu", "MFU", ".1%"),
        ("memory_gib", "GiB", ".2f"),
    ):
        if name in last:
            parts.append(f"{words} {last[name]:{form}}")
    if run.status.validation_loss is not None:
        parts.append(f"validation loss {run.status.validation_loss:.4f} at step {run.status.validation_step:,}")
    return Text("  ".join(parts))


def _curve(run: Snapshot, metric: str, width: int, height: int) -> Text:
    xs, ys = run.values(metric)
    if not xs:
        return Text("no step is finished yet", style="dim")
    low, high = limits(ys)
    lines = curve(xs, ys, max(10, width - AXIS), height)
    labels = [""] * height
    labels[0], labels[-1] = f"{high:.4g}", f"{low:.4g}"
    drawn = Text(f"{visible(metric)}, step {xs[0]:,.0f} to {xs[-1]:,.0f}\n", style="bold")
    for label, line in zip(labels, lines, strict=True):
        drawn.append(f"{label:>{AXIS - 2}}  ", style="dim").append(f"{line}\n", style="blue")
    drawn.rstrip()
    return drawn


def _events(run: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for event in run.status.events:
        words = visible(describe(event).replace("\n", " "))
        table.add_row(
            Text(local_time(event["time"]), style="dim"),
            Text(visible(event["kind"])),
            Text(words, overflow="ellipsis", no_wrap=True),
        )
    return Group(Text("events", style="bold"), table)
