"""The plot of a ladder: measured losses, the law with its band, and the recipe's own prediction.

`page` is one HTML file that needs no network. `picture` is a PNG, if matplotlib (the extra `plots`) is installed.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.sweeps.ladder import Ladder, Prediction
from launch.sweeps.scaling_law import Estimate, ScalingLaw

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""Okabe and Ito's colours, which colour-blind people tell apart; one for each number of tokens per parameter."""
DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."))
"""Lines of the same curves, as plotly and as matplotlib call them."""
OWN = "#D55E00"
POINTS = 60
"""Points of a curve."""
LOSS = {"validation_loss": "validation loss (nats per token)", "train_loss": "training loss (nats per token)"}
SIZE = "parameters"


@dataclass(frozen=True)
class Curve:
    """The law at one number of tokens per parameter."""

    label: str
    color: str
    dash: tuple[str, str]
    sizes: list[float]
    band: list[Estimate]
    measured: list[tuple[int, float]]
    """Size and loss of each run."""


def curves(ladder: Ladder, law: ScalingLaw, prediction: Prediction) -> Iterator[Curve]:
    """The curves of the plot, from the smallest run to the recipe's own size."""
    smallest = min(rung.parameters for rung in ladder.rungs)
    largest = max(prediction.parameters, *(rung.parameters for rung in ladder.rungs))
    sizes = np.geomspace(smallest / 1.2, largest * 1.2, POINTS).tolist()
    for index, ratio in enumerate(ladder.ratios):
        measured = [
            (rung.parameters, rung.loss)
            for rung in ladder.rungs
            if min(ladder.ratios, key=lambda one: abs(np.log(rung.tokens / rung.parameters / one))) == ratio
        ]
        band = [law.predict(size, ratio * size) for size in sizes]
        color, dash = COLORS[index % len(COLORS)], DASHES[index % len(DASHES)]
        yield Curve(f"{ratio:.3g} tokens per parameter", color, dash, sizes, band, measured)


def figure(ladder: Ladder, law: ScalingLaw, prediction: Prediction) -> "go.Figure":
    """The plot as a plotly figure."""
    import plotly.graph_objects as go

    shown = go.Figure()
    for curve in curves(ladder, law, prediction):
        outline = [*(one.high for one in curve.band), *(one.low for one in reversed(curve.band))]
        shared: dict[str, Any] = {"legendgroup": curve.label, "line": {"color": curve.color, "dash": curve.dash[0]}}
        around = {**shared, "line": {"width": 0}, "fillcolor": curve.color, "opacity": 0.2, "hoverinfo": "skip"}
        name = f"band of {ladder.level:.0%} of runs"
        shown.add_scatter(x=[*curve.sizes, *reversed(curve.sizes)], y=outline, fill="toself", name=name, **around)
        law_y = [one.value for one in curve.band]
        shown.add_scatter(x=curve.sizes, y=law_y, name=f"law, {curve.label}", mode="lines", **shared)
        x, y = zip(*curve.measured, strict=True)
        marker = {"color": curve.color, "size": 9}
        shown.add_scatter(x=x, y=y, name=f"runs, {curve.label}", mode="markers", marker=marker)
    above, below = prediction.high - prediction.loss, prediction.loss - prediction.low
    shown.add_scatter(
        x=[prediction.parameters],
        y=[prediction.loss],
        error_y={"type": "data", "array": [above], "arrayminus": [below], "symmetric": False},
        name=f"prediction of {ladder.recipe}",
        mode="markers",
        marker={"color": OWN, "size": 12, "symbol": "diamond"},
    )
    shown.update_layout(title=f"Scaling law of {ladder.recipe}", template="plotly_white", hovermode="closest")
    shown.update_xaxes(type="log", title=SIZE, exponentformat="B")
    shown.update_yaxes(title=LOSS[ladder.metric])
    return shown


def page(ladder: Ladder, law: ScalingLaw, prediction: Prediction) -> bytes:
    """The plot as one HTML file, with plotly's JavaScript in it."""
    return figure(ladder, law, prediction).to_html(include_plotlyjs=True, full_html=True).encode()


def picture(ladder: Ladder, law: ScalingLaw, prediction: Prediction) -> bytes | None:
    """The plot as PNG; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    canvas = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = canvas.subplots()
    for curve in curves(ladder, law, prediction):
        low, high = [one.low for one in curve.band], [one.high for one in curve.band]
        axes.fill_between(curve.sizes, low, high, color=curve.color, alpha=0.2, linewidth=0)
        law_y = [one.value for one in curve.band]
        axes.plot(curve.sizes, law_y, curve.dash[1], color=curve.color, label=curve.label)
        axes.plot(*zip(*curve.measured, strict=True), "o", color=curve.color)
    bar = [[prediction.loss - prediction.low], [prediction.high - prediction.loss]]
    label = f"prediction of {ladder.recipe}"
    axes.errorbar([prediction.parameters], [prediction.loss], yerr=bar, fmt="D", color=OWN, capsize=4, label=label)
    axes.set(xscale="log", xlabel=SIZE, ylabel=LOSS[ladder.metric], title=f"Scaling law of {ladder.recipe}")
    axes.legend()
    content = io.BytesIO()
    canvas.savefig(content, format="png")
    return content.getvalue()
