"""Draws the pictures of README and docs as SVG files in docs/pictures, with no library.

    python -m bench.pictures                              # redraw both from the repository
    python -m bench.pictures --demo runs/demo-20261201    # first read the losses of this `keepstep demo`

The loss plot reads docs/pictures/demo.json, which holds the losses of one demo. The architecture reads the folders of
the packages. Text inside boxes has its own background; all other text is a grey that is legible on white and on black.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
GREY, SKY, ORANGE, BLUE = "#7a7a7a", "#56b4e9", "#d55e00", "#0072b2"
"""Sky blue and orange are of Okabe and Ito's palette, which colour-blind readers can tell apart."""
GREEN, PURPLE, BROWN = "#00785a", "#8f4a78", "#a34700"
"""Dark enough for white text."""
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif'"

PACKAGES = {
    "launch": ("the command line: starts, watches and inspects runs", PURPLE),
    "train": ("what a step is: recipe, loop, model, checkpoints", BLUE),
    "parallel": ("where tensors live", GREEN),
    "data_pipeline": ("text to batches", BROWN),
}
"""Purpose and colour of each package."""

ROOMS = {
    "launch": {
        "cli.py": "finds the subcommand",
        "clusters": "Slurm, Kubernetes",
        "commands": "one file a subcommand",
        "data": "audits and traces",
        "diagnose": "first cause, what to do",
        "doctor": "checks of a machine",
        "inspect": "reads a run's records",
        "plan": "memory, time, cost",
        "proof": "kill, resume, compare",
        "report": "one HTML page",
        "supervise": "ranks, peers, requeue",
        "sweeps": "sweeps and ladders",
        "watch": "a live terminal",
    },
    "train": {
        "loop.py": "the training loop",
        "start.py": "puts a run together",
        "run.py": "what the loop uses",
        "checkpoint": "save, find, load, verify",
        "evaluation": "losses, average, tasks",
        "export": "Hugging Face folders",
        "generation": "cache, sampling, server",
        "health": "watchdog, guard, lease",
        "model": "GPT, attention, loss",
        "optim": "AdamW, Muon, schedule",
        "profiling": "traces, largest costs",
        "recipe": "reads and checks YAML",
        "records": "metrics, events, goodput",
        "sinks": "TensorBoard, W&B, MLflow",
    },
    "parallel": {
        "engine.py": "the engine interface",
        "build_engine.py": "chooses the engine",
        "layout.py": "ranks on three axes",
        "environ.py": "which rank am I?",
        "engines": "DDP, FSDP2, ZeRO",
        "analysis": "memory and traffic",
    },
    "data_pipeline": {
        "config.py": "the recipe's section",
        "build": "clean, pack, write",
        "shards": "verified blocks",
        "sources": "jsonl, parquet, text",
        "stream": "order and batches",
        "tokenizers": "train and encode",
    },
}
"""What the rooms (folders) of each package are for, and the files to begin with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="folder of a demo; its losses replace docs/pictures/demo.json")
    options = parser.parse_args()
    if options.demo is not None:
        (PICTURES / "demo.json").write_text(read_demo(options.demo))
    (PICTURES / "loss.svg").write_text(draw_loss(json.loads((PICTURES / "demo.json").read_text())))
    (PICTURES / "architecture.svg").write_text(draw_architecture())


def read_demo(folder: Path) -> str:
    """JSON with the losses of the demo's two runs: [step, loss, attempt] and, for validation, [step, loss]."""
    runs = {}
    for name in ("killed", "uninterrupted"):
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        runs[name] = {
            "losses": [[r["step"], round(r["loss"], 4), r["attempt"]] for r in records if "loss" in r],
            "validation": [[r["step"], round(r["validation_loss"], 4)] for r in records if "validation_loss" in r],
        }
    return json.dumps(runs) + "\n"


class Plot:
    """Axes from step 0 to `steps` and from loss `low` to `high`, in a picture of WIDTH x HEIGHT pixels."""

    WIDTH, HEIGHT = 760, 400
    LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 46

    def __init__(self, steps: int, low: float, high: float) -> None:
        self.steps, self.low, self.high = steps, low, high

    def x(self, step: float) -> float:
        return self.LEFT + step / self.steps * (self.WIDTH - self.LEFT - self.RIGHT)

    def y(self, loss: float) -> float:
        share = (self.high - loss) / (self.high - self.low)
        return self.TOP + share * (self.HEIGHT - self.TOP - self.BOTTOM)

    def line(self, points: list[Any], style: str) -> str:
        path = " ".join(f"{self.x(step):.1f},{self.y(loss):.1f}" for step, loss, *_ in points)
        return f"<polyline points='{path}' fill='none' stroke-linejoin='round' {style}/>"

    def dot(self, step: float, loss: float, style: str, radius: float = 5) -> str:
        return f"<circle cx='{self.x(step):.1f}' cy='{self.y(loss):.1f}' r='{radius}' {style}/>"

    def axes(self) -> list[str]:
        """Grid, numbers and titles."""
        parts = []
        bottom = self.HEIGHT - self.BOTTOM
        for loss in range(int(self.low) + 1, int(self.high) + 1):
            y = self.y(loss)
            right = self.WIDTH - self.RIGHT
            parts.append(f"<path d='M{self.LEFT} {y:.1f}H{right}' stroke='{GREY}' stroke-opacity='0.3'/>")
            parts.append(text(self.LEFT - 8, y + 5, f"{loss}.0", anchor="end"))
        for step in range(0, self.steps + 1, 20):
            parts.append(text(self.x(step), bottom + 18, str(step), anchor="middle"))
        parts.append(
            f"<path d='M{self.LEFT} {self.TOP}V{bottom}H{self.WIDTH - self.RIGHT}' stroke='{GREY}' fill='none'/>"
        )
        parts.append(text(self.x(self.steps / 2), self.HEIGHT - 6, "optimizer step", anchor="middle"))
        middle = self.y((self.low + self.high) / 2)
        parts.append(
            text(14, middle, "loss, nats per token", anchor="middle", extra=f"transform='rotate(-90 14 {middle:.0f})'")
        )
        return parts


def draw_loss(runs: dict[str, Any]) -> str:
    """The losses of a run whose rank was killed, over those of the same run without the kill."""
    killed, whole = runs["killed"], runs["uninterrupted"]
    first = [point for point in killed["losses"] if point[2] == 1]
    second = [point for point in killed["losses"] if point[2] == 2]
    death, resumed = first[-1], second[0]
    lowest = min(loss for _, loss in killed["validation"])
    highest = max(loss for _, loss, _ in whole["losses"])
    plot = Plot(whole["losses"][-1][0], lowest - 0.6, highest + 0.1)
    parts = plot.axes()
    parts.append(plot.line(whole["losses"], f"stroke='{SKY}' stroke-width='9' stroke-opacity='0.7'"))
    parts += [plot.line(points, f"stroke='{ORANGE}' stroke-width='2'") for points in (first, second)]
    ring = f"fill='none' stroke='{ORANGE}' stroke-width='2'"
    for (step, loss), (_, other) in zip(killed["validation"], whole["validation"], strict=True):
        parts.append(plot.dot(step, other, f"fill='{SKY}' fill-opacity='0.7'", radius=8))
        parts.append(plot.dot(step, loss, ring))
    parts += mark(plot, resumed[0] - 1, death)
    legend_x = plot.x(plot.steps * 0.4)
    keys = [
        (f"stroke='{SKY}' stroke-width='9' stroke-opacity='0.7'", "the run without interruption"),
        (f"stroke='{ORANGE}' stroke-width='2'", "the same run with a rank killed: the same losses"),
    ]
    for row, (style, label) in enumerate(keys):
        y = plot.TOP + 18 + 24 * row
        parts.append(f"<path d='M{legend_x:.0f} {y}h34' {style}/>" + text(legend_x + 44, y + 5, label))
    parts.append(f"<circle cx='{legend_x + 17:.0f}' cy='{plot.TOP + 66}' r='5' {ring}/>")
    parts.append(text(legend_x + 44, plot.TOP + 71, "validation loss"))
    title = "Training loss of a run that lost a rank, and of the same run without the loss: the curves are equal"
    return svg(plot.WIDTH, plot.HEIGHT, title, parts)


def mark(plot: Plot, resumed_step: int, death: list[float]) -> list[str]:
    """The kill, and the steps that were done again."""
    left, right, bottom = plot.x(resumed_step), plot.x(death[0]), plot.y(plot.low)
    y = plot.y(death[1])
    return [
        f"<rect x='{left:.1f}' y='{plot.TOP}' width='{right - left:.1f}' height='{bottom - plot.TOP:.1f}' "
        f"fill='{ORANGE}' fill-opacity='0.15'/>",
        f"<path d='M{right - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12' stroke='{ORANGE}' stroke-width='3'/>",
        text(right + 8, bottom - 34, f"rank killed after step {int(death[0])},"),
        text(right + 8, bottom - 16, f"resumed from step {resumed_step}"),
    ]


def draw_architecture() -> str:
    """The packages as boxes, each with its rooms, and arrows for who imports whom."""
    train_top = 10 + box_height("launch") + 38
    lower_top = train_top + box_height("train") + 38
    parts = [text(396, train_top - 14, "imports go down only"), arrow(380, train_top - 38)]
    parts += [arrow(x, lower_top - 38) for x in (190, 570)]
    for name, x, y in (("launch", 10, 10), ("train", 10, train_top)):
        parts += package_box(name, x, y)
    for name, x, y in (("parallel", 10, lower_top), ("data_pipeline", 390, lower_top)):
        parts += package_box(name, x, y)
    title = "Keepstep's four packages and their rooms: launch over train over parallel and data_pipeline"
    return svg(760, lower_top + box_height("data_pipeline") + 10, title, parts)


def box_columns(package: str) -> int:
    return 3 if package in ("launch", "train") else 2


def box_height(package: str) -> int:
    """Pixels; `parallel` and `data_pipeline` stand side by side and are equally high."""
    count = max(len(rooms(name)) for name in PACKAGES if box_columns(name) == 2)
    count = count if box_columns(package) == 2 else len(rooms(package))
    return 51 + 53 * -(-count // box_columns(package))


def package_box(name: str, x: int, y: int) -> list[str]:
    purpose, colour = PACKAGES[name]
    columns = box_columns(name)
    width = 740 if columns == 3 else 360
    room_width = (width - 24 - 8 * (columns - 1)) / columns
    parts = [f"<rect x='{x}' y='{y}' width='{width}' height='{box_height(name)}' rx='8' fill='{colour}'/>"]
    bold = "font-weight='700'"
    parts.append(text(x + 16, y + 30, name, fill="#fff", extra=f"font-size='19' {bold}"))
    parts.append(text(x + 26 + 12 * len(name), y + 29, purpose, fill="#fff"))
    for index, (room, what) in enumerate(rooms(name).items()):
        left = x + 12 + index % columns * (room_width + 8)
        top = y + 46 + index // columns * 53
        box = f"<rect x='{left:.1f}' y='{top}' width='{room_width:.1f}' height='46' rx='5' fill='#fff' "
        parts.append(box + "fill-opacity='0.93'/>")
        parts.append(text(left + 10, top + 19, room, fill="#222", extra=bold))
        parts.append(text(left + 10, top + 37, what, fill="#222", extra="font-size='13'"))
    return parts


def rooms(package: str) -> dict[str, str]:
    """Name and purpose of each room of a package. ValueError unless ROOMS lists all folders, and only what exists."""
    listed = ROOMS[package]
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    gone = {name for name in listed if not (ROOT / package / name).exists()}
    if wrong := folders - listed.keys() | gone:
        raise ValueError(f"ROOMS of {package} must list its folders: {', '.join(sorted(wrong))} missing or gone")
    return listed


def arrow(x: int, top: int) -> str:
    """38 pixels long, downwards."""
    return (
        f"<path d='M{x} {top}v29' stroke='{GREY}' stroke-width='3'/>"
        f"<path d='M{x - 8} {top + 26}h16l-8 11z' fill='{GREY}'/>"
    )


def text(x: float, y: float, words: str, *, fill: str = GREY, anchor: str = "start", extra: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{fill}' text-anchor='{anchor}' {extra}>{escape(words)}</text>"


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"role='img' font-size='15' {FONT}>\n<title>{escape(title)}</title>\n"
    )
    return head + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    main()
