"""Random faults from a seed: `make chaos`. Each round is one run, restarted many times, with 19 faults.

KEEPSTEP_CHAOS_SEED sets the seed. Each round stores its counts in the folder KEEPSTEP_CHAOS_OUT (default: a temporary
folder), so that rounds can be run one at a time. The last test prints the counts as tables.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import Run, fault
from train.exit_codes import FINISHED
from train.records.jsonl import read_jsonl

SEED = int(os.environ.get("KEEPSTEP_CHAOS_SEED", "0"))
STEPS = 40
EVERY = 3
EVAL_EVERY = 4
SETTINGS = (
    f"train.steps={STEPS}",
    f"train.eval_every={EVAL_EVERY}",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=99",
    "checkpoint.max_failures=9",
    "train.hang_seconds=60",  # on a busy machine the import of DeepSpeed alone takes 6 s
)
KINDS = {
    "kill": 3,
    "raise": 2,
    "hang": 1,
    "freeze": 1,
    "kill_in_write": 2,
    "no_space": 1,
    "io_error": 1,
    "slow_write": 1,
    "dead_data_thread": 1,
    "clock_jump": 1,
    "signal": 2,
    "damage": 3,
}
"""Number of faults of each kind in a round."""
SIGNALS = ("term", "int", "hup", "usr1", "usr2")
DAMAGES = ("truncated_shard", "flipped_shard", "missing_shard", "truncated_manifest", "flipped_manifest", "left_over")

PHASES = ["start", "data", "forward", "update", "save", "evaluate"]


@dataclass(frozen=True)
class Layout:
    """The layout of some rounds."""

    rounds: int
    ranks: int
    settings: tuple[str, ...]
    has_replicas: bool = False
    """Whether several ranks hold replicas of the weights, so that a flipped bit is detected."""


LAYOUTS = {
    "ddp": Layout(2, 2, ("parallel.engine=ddp",), has_replicas=True),
    "fsdp2": Layout(2, 2, ("parallel.engine=fsdp2",)),
    "hsdp": Layout(2, 4, ("parallel.engine=fsdp2", "parallel.replicate=2", "parallel.shard=2"), has_replicas=True),
    "tensor": Layout(1, 2, ("parallel.engine=fsdp2", "parallel.tensor=2")),
    "zero1": Layout(1, 2, ("parallel.engine=zero1",)),
    "zero2": Layout(1, 2, ("parallel.engine=zero2",)),
    "zero3": Layout(1, 2, ("parallel.engine=zero3",)),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def draw(name: str, number: int) -> list[dict[str, Any]]:
    """The faults of a round. If replicas of weights can be compared, one of them is a flipped bit."""
    dice = random.Random(f"{SEED}/{name}/{number}")
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    if LAYOUTS[name].has_replicas:
        kinds[kinds.index("raise")] = "flipped_weight"
    return [_one(kind, LAYOUTS[name].ranks, dice) for kind in kinds]


def _one(kind: str, ranks: int, dice: random.Random) -> dict[str, Any]:
    """A fault of this kind at a random rank, step and phase."""
    rank, step, phase = dice.randrange(ranks), dice.randrange(1, STEPS), dice.choice(PHASES)
    if phase == "save" or kind in ("kill_in_write", "no_space", "io_error", "slow_write"):
        phase, step = "save", EVERY * dice.randrange(1, STEPS // EVERY)
    elif phase == "evaluate":
        step = EVAL_EVERY * dice.randrange(1, STEPS // EVAL_EVERY)
    elif phase == "start" and kind != "dead_data_thread":  # that thread does not exist yet
        step = 0
    elif phase == "start":
        phase = "data"
    if kind == "signal":
        kind = dice.choice(SIGNALS)
    if kind == "damage":  # after the third save has begun, when two are complete
        kind, rank, phase, step = dice.choice(DAMAGES), 0, "data", dice.randrange(3 * EVERY + 1, STEPS)
    if kind == "flipped_weight":
        phase, step = "data", dice.randrange(1, STEPS)
    return fault(kind, rank, step, phase)


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the counts."""
    folder = Path(os.environ.get("KEEPSTEP_CHAOS_OUT", tmp_path_factory.mktemp("counts")))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def undisturbed_with(root: Path) -> Callable[[str], Run]:
    """A function that returns the run without faults of a layout."""
    runs: dict[str, Run] = {}

    def train(name: str) -> Run:
        if name not in runs:
            layout = LAYOUTS[name]
            run = runs[name] = Run(root, f"undisturbed-{name}", (*SETTINGS, *layout.settings), layout.ranks)
            assert run.train() == FINISHED, run.output
        return runs[name]

    return train


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, layout in LAYOUTS.items() for number in range(layout.rounds)]
)
def test_a_run_with_many_faults_has_the_same_result_as_one_without(
    root: Path, undisturbed_with: Callable[[str], Run], counts: Path, name: str, number: int
) -> None:
    reference, faults = undisturbed_with(name), draw(name, number)
    run = Run(root, f"chaos-{name}-{number}", reference.overrides, reference.ranks)
    assert run.train_to_the_end(faults, max_restarts=99, seconds=900) == FINISHED, (faults, run.output)
    assert run.injected() == set(range(len(faults)))
    run.assert_same_as(reference)
    wrong = list(resumes_from_older_checkpoints(run))
    assert not wrong, wrong
    save_counts(counts / f"{name}-{number}.json", faults, run)


def test_steps_whose_gradients_are_not_finite_are_skipped(root: Path, counts: Path) -> None:
    dice = random.Random(f"{SEED}/nan")
    faults = [fault("nan_gradient", dice.randrange(2), step, "forward") for step in dice.sample(range(1, STEPS), 10)]
    run = Run(root, "chaos-nan", (*SETTINGS, *LAYOUTS["ddp"].settings, "guard.max_bad_steps=99"))
    assert run.train(faults) == FINISHED, run.output
    assert sorted(event["step"] for event in run.events("skipped")) == sorted(fault["step"] for fault in faults)
    assert max(record["data_step"] for record in run.records()) == STEPS + 10
    save_counts(counts / "ddp-nan.json", faults, run)


def test_print_the_tables(counts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_kind: Counter[str] = Counter()
    by_layout: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for path in sorted(counts.glob("*.json")):
        round_ = json.loads(path.read_text())
        layout = path.stem.partition("-")[0]
        by_kind.update(round_["faults"])
        by_layout[layout] += sum(round_["faults"].values())
        starts[layout] += round_["starts"]
    with capsys.disabled():
        print(f"\n\n| fault | survived |\n| --- | --- |\n{rows(by_kind)}")
        print(f"\n| layout | survived | starts of the ranks |\n| --- | --- | --- |\n{rows(by_layout, starts)}")
        print(f"\nseed {SEED}")
    assert by_kind


def save_counts(path: Path, faults: list[dict[str, Any]], run: Run) -> None:
    counted = {"faults": Counter(each["fault"] for each in faults), "starts": len(run.events("started"))}
    path.write_text(json.dumps(counted))


def rows(*columns: Counter[str]) -> str:
    """Lines of a Markdown table: one for each name, and one for the sums."""
    lines = [[name, *(column[name] for column in columns)] for name in sorted(columns[0])]
    lines.append(["all", *(column.total() for column in columns)])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def resumes_from_older_checkpoints(run: Run) -> Iterator[str]:
    """One line for each start that did not resume from the newest good checkpoint."""
    saved: set[int] = set()
    for event in read_jsonl(run.folder / "events.jsonl"):
        if event["kind"] == "saved":
            saved.add(event["step"])
        elif event["kind"] == "quarantined":
            saved.discard(event["step"])
        elif event["kind"] == "resumed" and event["step"] < max(saved, default=0):
            yield f"resumed from step {event['step']} though {max(saved)} was saved"
