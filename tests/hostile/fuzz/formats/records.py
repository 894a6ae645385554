"""What a run leaves in its folder: events, metrics, the lease, heartbeats, failures and the resolved recipe."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.hostile.fuzz.format import Codec, Consumer, Files, Format, RefusedError, command
from tests.hostile.fuzz.json_text import dumps

EARLIER = Path("tests/earlier_version/run").resolve()
LEASE = {
    "holder": {"id": "a" * 32, "host": "another-host", "pid": 1234, "started": 1.5, "job": "77", "requeues": 0},
    "count": 5,
}
FAILURE: dict[str, Any] = {
    "rank": 1, "host": "another-host", "ending": "exit code 1", "time": 1.0e12, "suspicion": [0, 1],
    "log": "logs/rank-1.log", "lines": ["Traceback", "ValueError: bad"],
}  # fmt: skip
HEARTBEATS: dict[str, Any] = {
    "ranks": [
        {"rank": rank, "host": "n1", "phase": "forward", "step": 4, "probe_seconds": 0.002, "location": "train.loop:1"}
        for rank in range(2)
    ],
    "idle_seconds": 2.5,
    "slow": [1],
}


def build_run(folder: Path) -> None:
    """The run of an earlier version, with a lease, heartbeats and a failure."""
    from launch.supervise.rank_logs import Failure

    run = folder / "run"
    shutil.copytree(EARLIER, run)
    (run / "logs" / "n1").mkdir(parents=True)
    Failure(**_fields_of(Failure, FAILURE)).save(run / "logs" / "n1")
    (run / "status.json").write_text(json.dumps(HEARTBEATS))
    (run / "lease.json").write_text(json.dumps(LEASE))
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("/tmp/baseline/old", "runs").replace("device: auto", "device: cpu"))


def _fields_of(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of those fields that the class has."""
    return {name: value for name, value in values.items() if name in kind.__dataclass_fields__}


def _lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def _with_lines(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    """One line for each item; everything else as one line."""
    lines = tree if isinstance(tree, list) else [tree]
    return {name: b"".join(dumps(line) + b"\n" for line in lines)}


def status(folder: Path, out: Path) -> str:
    """Whether `keepstep status` shows the run."""
    command("status", str(folder / "run"), "--events", "50")
    command("status", str(folder / "run"), "--json")
    return "shown"


def report(folder: Path, out: Path) -> str:
    """Whether `keepstep report` shows the run."""
    command("report", str(folder / "run"), "--text")
    command("report", str(folder / "run"), "--json")
    return "shown"


def stop(folder: Path, out: Path) -> str:
    """Whether `keepstep stop` leaves a request, or says that the run has ended."""
    with contextlib.suppress(RefusedError):
        command("stop", str(folder / "run"))
    return "answered"


def requeue(folder: Path, out: Path) -> str:
    """Whether the requeue decision is made."""
    from launch.supervise.requeue import main

    run = str(folder / "run")
    main(["mark", run, "--submitted", "2026-12-01T00:00:00"])
    main(["decide", run, "--mark", "0:2", "--launcher-code", "1"])
    return "decided"


def start(folder: Path, out: Path) -> str:
    """Whether a new attempt can open the records and continue their count of attempts."""
    from train.records.events import EventLog
    from train.records.jsonl import last_record, read_backwards
    from train.records.metrics import Metrics
    from train.sinks.background import Sinks

    run = folder / "run"
    last_record(run / "metrics.jsonl", key="attempt")
    EventLog(run / "events.jsonl")("started", attempt=2, world_size=1)
    Metrics(run / "metrics.jsonl", Sinks(), total_steps=9, log_every=100, enabled=True).close()
    if (run / "events.jsonl").is_symlink() or not (run / "events.jsonl").is_file():
        return "started"  # with a warning: no event can be written there
    newest = next(read_backwards(run / "events.jsonl"), {})
    return "started" if newest.get("kind") == "started" else f"the new event is not read, but {newest}"


def lease(folder: Path, out: Path) -> str:
    """Whether a new attempt gets the lease, or the error of a run folder in use."""
    from train.health import lease as module

    module.EXPIRY_SECONDS = 0.2
    lost: list[str] = []
    held = module.Lease(folder / "run" / "lease.json", module.Holder.this_process(os.environ), lost.append)
    held.release()
    return f"taken, {lost}"


def resolved(folder: Path, out: Path) -> str:
    """The recipe of the run, and its audit."""
    from train.config_file import load_recipe, recipe_as_yaml

    return recipe_as_yaml(load_recipe(folder / "run" / "recipe.yaml"))


JSON = Codec(json.loads, lambda files, name, tree: {name: dumps(tree)})
LINES = Codec(_lines, _with_lines)
READ = [
    Consumer("status", status, accepts=True, errors=(RefusedError,)),
    Consumer("report", report, accepts=True, errors=(RefusedError,)),
    Consumer("requeue", requeue, accepts=True),
    Consumer("stop", stop, accepts=True, errors=(RefusedError,)),
    Consumer("start", start, accepts=True),
]
LOGS = "single lines: bad ones are skipped and counted, and block nothing"

FORMATS = [
    Format("events", build_run, [("run/events.jsonl", LINES)], READ, LOGS),
    Format("metrics", build_run, [("run/metrics.jsonl", LINES)], READ, LOGS),
    Format(
        "heartbeats",
        build_run,
        [("run/status.json", JSON), ("run/logs/n1/failure.json", JSON)],
        [READ[0], READ[3]],
        "everything: the files inform people",
    ),
    Format(
        "lease",
        build_run,
        [("run/lease.json", JSON)],
        [Consumer("lease", lease, exact=False), READ[0], READ[3]],
        "everything: a lease that cannot be read, or that nobody renews, is taken over",
    ),
    Format(
        "run-recipe",
        build_run,
        [("run/recipe.yaml", None)],
        [READ[0], READ[3], Consumer("recipe", resolved, exact=False)],
        "settings: the file is the user's",
    ),
]
