"""Many random faults from a seed: `make chaos`. Every round is one run that meets 19 of them, start after start.

KEEPSTEP_CHAOS_SEED chooses others; what was survived is counted in KEEPSTEP_CHAOS_OUT (default: a temporary folder), so
that rounds may be run one at a time, and printed as tables at the end.
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
from train.records.events import read_jsonl

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
    "train.hang_seconds=10",  # DeepSpeed's import alone takes 6 s on a busy machine
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
"""Faults of each kind in a round."""
SIGNALS = ("term", "int", "hup", "usr1", "usr2")
DAMAGES = ("truncated_shard", "flipped_shard", "missing_shard", "truncated_manifest", "flipped_manifest", "left_over")

PHASES = ["start", "data", "forward", "update", "save", "evaluate"]


@dataclass(frozen=True)
class Layout:
    """What the rounds of one kind train with."""

    rounds: int
    ranks: int
    settings: tuple[str, ...]
    has_copies: bool = False
    """Of weights, on several ranks, so that a flipped bit shows."""


LAYOUTS = {
    "ddp": Layout(2, 2, ("parallel.engine=ddp",), has_copies=True),
    "fsdp2": Layout(2, 2, ("parallel.engine=fsdp2",)),
    "hsdp": Layout(2, 4, ("parallel.engine=fsdp2", "parallel.replicate=2", "parallel.shard=2"), has_copies=True),
    "tensor": Layout(1, 2, ("parallel.engine=fsdp2", "parallel.tensor=2")),
    "zero1": Layout(1, 2, ("parallel.engine=zero1",)),
    "zero2": Layout(1, 2, ("parallel.engine=zero2",)),
    "zero3": Layout(1, 2, ("parallel.engine=zero3",)),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def draw(name: str, number: int) -> list[dict[str, Any]]:
    """The faults of a round. Where copies of weights can be compared, one of them is a flipped bit."""
    dice = random.Random(f"{SEED}/{name}/{number}")
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    if LAYOUTS[name].has_copies:
        kinds[kinds.index("raise")] = "flipped_weight"
    return [_one(kind, LAYOUTS[name].ranks, dice) for kind in kinds]


def _one(kind: str, ranks: int, dice: random.Random) -> dict[str, Any]:
    rank, step, phase = dice.randrange(ranks), dice.randrange(1, STEPS), dice.choice(PHASES)
    if phase == "save" or kind in ("kill_in_write", "no_space", "io_error", "slow_write"):
        phase, step = "save", EVERY * dice.randrange(1, STEPS // EVERY)
    elif phase == "evaluate":
        step = EVAL_EVERY * dice.randrange(1, STEPS // EVAL_EVERY)
    elif phase == "start" and kind != "dead_data_thread":  # which does not live yet
        step = 0
    elif phase == "start":
        phase = "data"
    if kind == "signal":
        kind = dice.choice(SIGNALS)
    if kind == "damage":  # when the third save has begun, so that two are complete
        kind, rank, phase, step = dice.choice(DAMAGES), 0, "data", dice.randrange(3 * EVERY, STEPS)
    if kind == "flipped_weight":
        phase, step = "data", dice.randrange(1, STEPS)
    return fault(kind, rank, step, phase)


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("KEEPSTEP_CHAOS_OUT", tmp_path_factory.mktemp("counts")))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def undisturbed_with(root: Path) -> Callable[[str], Run]:
    """The undisturbed run of a layout."""
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
def test_a_run_that_meets_many_faults_ends_like_the_undisturbed_one(
    root: Path, undisturbed_with: Callable[[str], Run], counts: Path, name: str, number: int
) -> None:
    reference, faults = undisturbed_with(name), draw(name, number)
    run = Run(root, f"chaos-{name}-{number}", reference.overrides, reference.ranks)
    assert run.train_to_the_end(faults, max_restarts=99, seconds=900) == FINISHED, (faults, run.output)
    assert run.struck() == set(range(len(faults)))
    run.assert_same_as(reference)
    lost = list(lost_beyond_the_last_checkpoint(run))
    assert not lost, lost
    save(counts / f"{name}-{number}.json", faults, run)


def test_gradients_that_are_not_finite_move_nothing(root: Path, counts: Path) -> None:
    dice = random.Random(f"{SEED}/nan")
    faults = [fault("nan_gradient", dice.randrange(2), step, "forward") for step in dice.sample(range(1, STEPS), 10)]
    run = Run(root, "chaos-nan", (*SETTINGS, *LAYOUTS["ddp"].settings, "guard.max_in_all=99"))
    assert run.train(faults) == FINISHED, run.output
    assert sorted(event["step"] for event in run.events("skipped")) == sorted(fault["step"] for fault in faults)
    assert max(record["data_step"] for record in run.records()) == STEPS + 10
    save(counts / "ddp-nan.json", faults, run)


def test_table(counts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_kind: Counter[str] = Counter()
    by_layout: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for path in sorted(counts.glob("*.json")):
        told = json.loads(path.read_text())
        layout = path.stem.partition("-")[0]
        by_kind.update(told["faults"])
        by_layout[layout] += sum(told["faults"].values())
        starts[layout] += told["starts"]
    with capsys.disabled():
        print(f"\n\n| fault | survived |\n| --- | --- |\n{rows(by_kind)}")
        print(f"\n| layout | survived | starts of the ranks |\n| --- | --- | --- |\n{rows(by_layout, starts)}")
        print(f"\nseed {SEED}")
    assert by_kind


def save(path: Path, faults: list[dict[str, Any]], run: Run) -> None:
    told = {"faults": Counter(each["fault"] for each in faults), "starts": len(run.events("started"))}
    path.write_text(json.dumps(told))


def rows(*columns: Counter[str]) -> str:
    lines = [[name, *(column[name] for column in columns)] for name in sorted(columns[0])]
    lines.append(["all", *(column.total() for column in columns)])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def lost_beyond_the_last_checkpoint(run: Run) -> Iterator[str]:
    """Starts that did not resume from the newest good checkpoint."""
    saved: set[int] = set()
    for event in read_jsonl(run.folder / "events.jsonl"):
        if event["kind"] == "saved":
            saved.add(event["step"])
        elif event["kind"] == "quarantined":
            saved.discard(event["step"])
        elif event["kind"] == "resumed" and event["step"] < max(saved, default=0):
            yield f"resumed from step {event['step']} though {max(saved)} was saved"
