"""The catalogue lists every event and every metric that the code writes, and nothing else."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from train.records.catalogue import EVENTS, METRICS
from train.records.device_readings import OVER_RANKS
from train.records.jsonl import read_jsonl
from train.records.metrics import Speed

ROOT = Path(__file__).parents[3]


def recorded_kinds() -> dict[str, str]:
    """Returns the kinds of all events that are recorded, with a file that records them."""
    found: dict[str, str] = {}
    for package in ("train", "launch"):
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text())
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and records_event(node)):
                found |= {kind: str(file) for kind in texts(call.args[0], tree)}
    return found


def records_event(call: ast.Call) -> bool:
    """Returns whether a call is `record(kind)`, `x.record(kind)`, `x._record(kind)` or `EventLog(...)(kind)`."""
    match call.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name in ("record", "_record") and bool(call.args)
        case ast.Call(ast.Name("EventLog")):
            return True
    return False


def texts(node: ast.expr, tree: ast.AST) -> Iterator[str]:
    """Yields the strings that an expression may be; for a variable, those that the file assigns to it."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.IfExp(body=first, orelse=second):
            yield from texts(first, tree)
            yield from texts(second, tree)
        case ast.Name(name):
            for assignment in ast.walk(tree):
                match assignment:
                    case ast.Assign([ast.Name(target)], value) if target == name:
                        yield from texts(value, tree)


def test_every_event_that_the_code_records_is_explained_and_nothing_else() -> None:
    recorded = recorded_kinds()
    assert {kind: file for kind, file in recorded.items() if kind not in EVENTS} == {}
    assert EVENTS.keys() - recorded.keys() == set()


def test_every_metric_that_a_run_writes_is_explained_and_nothing_else(tmp_path: Path) -> None:
    """A run of two data sources writes everything but MFU and the readings of devices, which it has none of."""
    data = ROOT / "tests" / "earlier_version" / "data"
    sources = f"data.sources=[{{path: {data}}}, {{path: {data}}}]"
    recipe = ROOT / "tests" / "earlier_version" / "run" / "recipe.yaml"
    command = [sys.executable, "-m", "train", str(recipe), f"runs_dir={tmp_path}", sources, "parallel.device=cpu"]
    command.append("optim.ema_decay=0.9")
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    written = {name for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") for name in record}
    written |= set(Speed(1, 1, measured_peak=1.0, datasheet_peak=1.0).of_step(1.0))
    written |= OVER_RANKS.keys() | {"task/TASK/METRIC"}  # tests/train/evaluation/test_scheduled.py
    written = {name if name.startswith("task/") else re.sub("/.*", "/SOURCE", name) for name in written}
    assert written == METRICS.keys()
