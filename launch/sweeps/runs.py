"""Runs that belong together, trained in turn on this machine, each in its own folder.

A run that has finished with the same recipe is not run again; one that was interrupted resumes. One that fails does not
stop the others.
"""

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.untrusted import read_file
from launch.inspect.run_state import recent_events, run_state
from launch.terminal import duration
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError, StoppedError
from train.health.exhausted import exhaustion_in_one_line, make_folder
from train.health.stop import abort_on_signals
from train.records.curve import clean_curve
from train.records.events import events_backwards
from train.run_folder import RunFolder

TAIL_SHARE = 0.1
"""Share of a run's steps, from its end, over which its training loss is averaged."""
LARGEST_LOG = 1 << 24
"""Bytes of a command's log that are read."""
LONGEST_CAUSE = 300
"""Characters of an error that are shown."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep or of a ladder."""

    recipe_file: str
    overrides: Sequence[str]
    recipe: Recipe
    """The file's recipe with the overrides."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder.of(self.recipe)

    @property
    def log(self) -> Path:
        """The output of the command that trains the run."""
        return self.folder.logs / "launcher.log"


@dataclass(frozen=True)
class Ending:
    """How a run ended, or that it has not."""

    state: str
    """`finished`, `changed` (finished with another recipe), or what `keepstep status` shows."""
    step: int
    """Last step in metrics.jsonl; 0 if there is none."""
    train_loss: float | None
    """Training loss in nats per token, averaged over the last tenth of the run; None unless finished."""
    validation_loss: float | None
    """Validation loss in nats per token after the last step; None unless finished, or if nothing was held out."""


@dataclass(frozen=True)
class Outcome:
    """A planned run and how it ended."""

    run: PlannedRun
    ending: Ending


def plan_run(recipe_file: str, overrides: Sequence[str], name: str) -> PlannedRun:
    """The run of a recipe with these overrides and this name. ConfigError if they do not fit."""
    named = [*overrides, f"name={name}"]
    return PlannedRun(recipe_file, named, load_recipe(recipe_file, named))


def outcome_of(run: PlannedRun) -> Outcome:
    """How the run ended, from its folder alone."""
    ending = ending_of(run.folder)
    if ending.state == "finished" and not _has_recipe(run):
        ending = Ending("changed", ending.step, None, None)
    return Outcome(run, ending)


def ending_of(folder: RunFolder) -> Ending:
    """How the run in a folder ended."""
    state = run_state(folder, recent_events(folder.events, 1), time.time())
    curve = clean_curve(folder.metrics, ("loss", "validation_loss")) if folder.metrics.exists() else {}
    step = max(curve, default=0)
    if state != "finished" or not curve:
        return Ending(state, step, None, None)
    tail = [record.get("loss") for at, record in curve.items() if at > step * (1 - TAIL_SHARE)]
    losses = [loss for loss in tail if loss is not None]
    train_loss = math.fsum(losses) / len(losses) if losses else None
    return Ending(state, step, train_loss, curve[step].get("validation_loss"))


def _has_recipe(run: PlannedRun) -> bool:
    """Whether the run's newest start had this recipe."""
    try:
        return load_recipe(run.folder.recipe) == run.recipe
    except ConfigError:
        return False


def train_in_turn(runs: Sequence[PlannedRun], ranks: int | None) -> Iterator[Outcome]:
    """Train each run that has not finished; yields how it ended. StoppedError after a signal, which stops the run.

    What a run prints is appended to its log. Progress goes to standard error."""
    for number, run in enumerate(runs, 1):
        where = f"[{number}/{len(runs)}] {run.recipe.name}"
        outcome = outcome_of(run)
        if outcome.ending.state == "finished":
            _say(f"{where}: finished before")
            yield outcome
            continue
        _say(f"{where}: training; its output is in {run.log}")
        began = time.monotonic()
        code = _train(run, ranks)
        outcome = outcome_of(run)
        took = duration(time.monotonic() - began)
        _say(f"{where}: {outcome.ending.state} after {took}" + (f" with exit code {code}" if code else ""))
        yield outcome


def _train(run: PlannedRun, ranks: int | None) -> int:
    """Train with `keepstep run`; returns its exit code. A signal is passed on, and the run saves before it ends."""
    argv = [sys.executable, "-P", "-m", "launch.cli", "run", run.recipe_file, *run.overrides]
    argv += [] if ranks is None else ["--ranks", str(ranks)]
    with exhaustion_in_one_line(run.folder.root):
        make_folder(run.folder.logs)
        output = run.log.open("ab")
    with output, abort_on_signals(f"run {run.recipe.name}"):
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except StoppedError as error:
            process.terminate()
            process.wait()
            raise StoppedError(f"{str(error).partition(';')[0]}; the same command continues") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cause_of(run: PlannedRun) -> str:
    """Why the run failed, in one line: the error of its newest event `failed`, or else of its command."""
    if failed := next(events_backwards(run.folder.events, ["failed"]), None):
        return str(failed.get("error", "")).partition("\n")[0][:LONGEST_CAUSE]
    try:
        lines = read_file(run.log, limit=LARGEST_LOG).decode(errors="replace").splitlines()
    except OSError:
        return f"see {run.log}"
    errors = [line.removeprefix("keepstep: ") for line in lines if line.startswith("keepstep: ")]
    return errors[-1][:LONGEST_CAUSE] if errors else f"see {run.log}"
