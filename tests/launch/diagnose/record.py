"""Records what real small runs leave in their folders, as the corpus of `test_corpus.py`.

    python -m tests.launch.diagnose.record [NAME ...]     # all cases, or those named

Each case trains a tiny model on gloo ranks, with a fault of `train.health.injected_faults` or a wrong setting. What is
recorded are the texts that a diagnosis reads, with their times. Paths of this machine are replaced.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.harness import Run, build_data, fault

FOLDER = Path(__file__).parent / "recorded"
ROOT_NAME = "/work"
"""Stands for the temporary folder of the recording."""
TAIL = 6000
"""Characters of each log that are kept."""


@dataclass(frozen=True)
class Case:
    """One run to record."""

    overrides: tuple[str, ...] = ()
    faults: tuple[dict[str, Any], ...] = ()
    ranks: int = 2
    then: Callable[[Run], Any] | None = None
    """What happens after the first start: a change of the folder, and a second start."""
    during: Callable[[Run], None] | None = None
    """What happens while the run trains, instead of waiting for its end."""


def _again(*overrides: str) -> Callable[[Run], Any]:
    """Start the run a second time with further overrides."""
    return lambda run: Run(run.root, run.name, (*run.overrides, *overrides), run.ranks).train(max_restarts=0)


def _spoil_checkpoints(run: Run) -> None:
    for file in run.folder.glob("checkpoints/step-*/manifest.json"):
        file.write_bytes(file.read_bytes()[:-100])
    _again("train.steps=14", "--allow=schedule")(run)


def _spoil_data(run: Run) -> None:
    """Flip bytes in the middle of each shard of a copy of the data."""
    copy = run.root / "spoiled"
    shutil.copytree(run.root / "data", copy, dirs_exist_ok=True)
    for shard in [path for path in copy.rglob("*") if path.is_file() and path.stat().st_size > 20_000]:
        content = bytearray(shard.read_bytes())
        for at in range(4000, len(content) - 4000, 97):
            content[at] ^= 0x55
        shard.write_bytes(content)
    _again(f"data.sources.0.path={copy}", "train.steps=14", "--allow=schedule")(run)


def _refuse_writes(run: Run) -> None:
    """Make the checkpoint folder a file, so that nobody can write into it."""
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    (run.folder / "checkpoints").write_text("")
    _again("train.steps=14", "--allow=schedule")(run)


def _stop_by_file(run: Run) -> None:
    from launch import cli

    process = run.start()
    _wait_for_step(run, 3)
    cli.main(["stop", str(run.folder)])
    run.output, _ = process.communicate(timeout=600)


def _kill_everything(run: Run) -> None:
    process = run.start()
    _wait_for_step(run, 3)
    for one in run.processes():
        one.send_signal(signal.SIGKILL)
    process.kill()
    run.output, _ = process.communicate(timeout=600)


def _second_start(run: Run) -> None:
    process = run.start()
    _wait_for_step(run, 3)
    Run(run.root, run.name, run.overrides, run.ranks).start(max_restarts=0).communicate(timeout=600)
    (run.folder / "STOP").touch()
    run.output, _ = process.communicate(timeout=600)


def _wait_for_step(run: Run, step: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if any(record["step"] >= step for record in run.records()):
            return
        time.sleep(0.2)
    raise AssertionError(f"{run.folder} has no step {step}")


LONG = ("train.steps=100000", "checkpoint.every=100000", "train.eval_every=0")
STEADY = ("train.steps=80", "train.eval_every=0", "checkpoint.every=80", "data.sources.0.path=DATA")
NO_SAVES = ("checkpoint.max_failures=1", "checkpoint.background=false")

CASES: Mapping[str, Case] = {
    "finished": Case(),
    "finished-alone": Case(("parallel.engine=single",), ranks=1),
    "resumed-after-stop": Case(faults=(fault("term", 1, 4, "forward"),), then=_again()),
    "killed": Case(faults=(fault("kill", 1, 7, "forward"),)),
    "killed-in-a-write": Case(faults=(fault("kill_in_write", 0, 6, "save"),)),
    "killed-before-a-save": Case(faults=(fault("kill", 1, 1, "forward"),)),
    "unknown-error": Case(faults=(fault("raise", 1, 8, "forward"),)),
    "hang": Case(("train.hang_seconds=30",), (fault("hang", 1, 5, "forward"),)),
    "frozen-rank-0": Case(("train.hang_seconds=30",), (fault("freeze", 0, 7, "update"),)),
    "one-bad-gradient": Case(faults=(fault("nan_gradient", 1, 2, "forward"),)),
    "diverged": Case(
        ("guard.max_bad_steps=1",),
        tuple(fault("nan_gradient", 1, step, "forward") for step in (5, 6)),
    ),
    "replicas-differ": Case(("parallel.engine=ddp",), (fault("flipped_weight", 1, 7, "data"),)),
    "disk-full": Case(NO_SAVES, (fault("no_space", 0, 6, "save"),)),
    "disk-full-once": Case(faults=(fault("no_space", 0, 3, "save"),)),
    "disk-broken": Case(NO_SAVES, (fault("io_error", 1, 6, "save"),)),
    "data-thread-died": Case(("data.prefetch_batches=1",), (fault("dead_data_thread", 1, 4, "data"),)),
    "checkpoint-damaged-once": Case(faults=(fault("truncated_shard", 0, 10, "data"),), then=_again()),
    "checkpoints-all-damaged": Case(then=_spoil_checkpoints),
    "checkpoint-of-another-run": Case(then=_again("optim.lr=5e-4")),
    "data-damaged": Case(then=_spoil_data),
    "data-missing": Case(("data.sources.0.path=/nowhere",)),
    "vocabulary-too-small": Case(("model.vocab_size=256",)),
    "batch-does-not-divide": Case(("train.global_batch_size=3",)),
    "disk-too-small": Case(("model.vocab_size=134217728", "model.d_model=4096", "parallel.engine=single"), ranks=1),
    "no-folder-for-checkpoints": Case(then=_refuse_writes),
    "stopped-by-term": Case(faults=(fault("term", 1, 4, "forward"),)),
    "stopped-by-interrupt": Case(faults=(fault("int", 0, 4, "forward"),)),
    "stopped-by-usr2": Case(faults=(fault("usr2", 0, 4, "forward"), fault("usr2", 1, 4, "forward"))),
    "stopped-by-command": Case(LONG, during=_stop_by_file),
    "killed-whole": Case(LONG, during=_kill_everything),
    "refused-second-start": Case(LONG, during=_second_start),
    "time-is-up": Case((*LONG, "train.max_seconds=25")),
    "loss-does-not-fall": Case((*STEADY, "optim.lr=1e-9")),
    "loss-too-high-rate": Case((*STEADY, "optim.lr=3.0", "optim.max_grad_norm=1000")),
    "loss-falls": Case((*STEADY, "optim.lr=3e-3")),
}


def record(name: str, root: Path) -> None:
    """Train one case and write its fixture."""
    case = CASES[name]
    overrides = tuple(word.replace("DATA", str(root / "data")) for word in case.overrides)
    run = Run(root, name, overrides, case.ranks)
    code = None
    if case.during is not None:
        case.during(run)
    else:
        code = run.train(list(case.faults), max_restarts=0)
    if case.then is not None:
        case.then(run)
    fixture = {"exit_code": code, "checkpoints": _steps(run.folder), "files": _texts(run.folder, root)}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(fixture, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: exit code {code}, {len(fixture['files'])} files", flush=True)


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-????????"))


def _texts(folder: Path, root: Path) -> dict[str, dict[str, Any]]:
    names = ("events.jsonl", "metrics.jsonl", "recipe.yaml", "status.json", "lease.json")
    files = [folder / name for name in names if (folder / name).exists()]
    files += sorted(path for path in folder.glob("logs/**/*") if path.suffix in (".log", ".json") and path.is_file())
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        if file.name.startswith("collectives-"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace").replace(str(root), ROOT_NAME)
        if file.suffix == ".log" and len(text) > TAIL:
            header = [line for line in text.splitlines() if line.startswith("=== ")][-1]
            text = f"{header}\n{text[-TAIL:].partition(chr(10))[2]}"
        name = str(file.relative_to(folder)).replace(os.uname().nodename, "node-0")
        found[name] = {"text": text.replace(os.uname().nodename, "node-0"), "time": round(file.stat().st_mtime, 3)}
    return found


def main(names: list[str]) -> None:
    """Record the named cases, or all."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build_data(root)
        for name in names or CASES:
            record(name, root)
            shutil.rmtree(root / "runs" / name)


if __name__ == "__main__":
    main(sys.argv[1:])
