"""Many random faults from a seed: `make chaos`. Every round is one run that meets 19 of them, start after start.

KEEPSTEP_CHAOS_SEED chooses others; what was survived is counted in KEEPSTEP_CHAOS_OUT (default: a temporary folder), so
that rounds may be run one at a time, and printed as a table at the end.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import Run, fault
from train.exit_codes import FINISHED

SEED = int(os.environ.get("KEEPSTEP_CHAOS_SEED", "0"))
ROUNDS = 10
STEPS = 40
EVERY = 3
EVAL_EVERY = 4
SETTINGS = (
    f"train.steps={STEPS}",
    f"train.eval_every={EVAL_EVERY}",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=99",
    "checkpoint.max_failures=9",
    "train.hang_seconds=5",
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def draw(number: int, engine: str) -> list[dict[str, Any]]:
    """The faults of a round. DDP's copies can be compared, so there one of them is a flipped bit."""
    dice = random.Random(f"{SEED}/{engine}/{number}")
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    if engine == "ddp":
        kinds[kinds.index("raise")] = "flipped_weight"
    return [_one(kind, dice) for kind in kinds]


def _one(kind: str, dice: random.Random) -> dict[str, Any]:
    rank, step = dice.randrange(2), dice.randrange(1, STEPS)
    phase = dice.choice(["data", "forward", "update", "save", "evaluate"])
    if phase == "save" or kind in ("kill_in_write", "no_space", "io_error", "slow_write"):
        phase, step = "save", EVERY * dice.randrange(1, STEPS // EVERY)
    elif phase == "evaluate":
        step = EVAL_EVERY * dice.randrange(1, STEPS // EVAL_EVERY)
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


@pytest.fixture(scope="session", params=["ddp", "fsdp2"])
def reference(root: Path, request: pytest.FixtureRequest) -> Run:
    run = Run(root, f"undisturbed-{request.param}", (*SETTINGS, f"parallel.engine={request.param}"))
    assert run.train() == FINISHED, run.output
    return run


@pytest.mark.parametrize("number", range(ROUNDS // 2))
def test_a_run_that_meets_many_faults_ends_like_the_undisturbed_one(
    root: Path, reference: Run, counts: Path, number: int
) -> None:
    engine = reference.overrides[-1].split("=")[1]
    faults = draw(number, engine)
    run = Run(root, f"chaos-{engine}-{number}", reference.overrides)
    assert run.train_to_the_end(faults, max_restarts=99, seconds=900) == FINISHED, (faults, run.output)
    assert run.struck() == set(range(len(faults)))
    run.assert_same_as(reference)
    lost = list(lost_beyond_the_last_checkpoint(run))
    assert not lost, lost
    save(counts / f"{engine}-{number}.json", faults, run)


def test_gradients_that_are_not_finite_move_nothing(root: Path, counts: Path) -> None:
    dice = random.Random(f"{SEED}/nan")
    faults = [fault("nan_gradient", dice.randrange(2), step, "forward") for step in dice.sample(range(1, STEPS), 10)]
    run = Run(root, "chaos-nan", (*SETTINGS, "parallel.engine=ddp", "guard.max_in_all=99"))
    assert run.train(faults) == FINISHED, run.output
    assert sorted(event["step"] for event in run.events("skipped")) == sorted(fault["step"] for fault in faults)
    assert max(record["data_step"] for record in run.records()) == STEPS + 10
    save(counts / "nan.json", faults, run)


def test_table(counts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    survived: Counter[str] = Counter()
    starts = 0
    for path in sorted(counts.glob("*.json")):
        told = json.loads(path.read_text())
        survived.update(told["faults"])
        starts += told["starts"]
    with capsys.disabled():
        print(f"\n\n| fault | survived |\n| --- | --- |\n{table(survived)}\n{starts} starts of the ranks, seed {SEED}")
    assert survived


def save(path: Path, faults: list[dict[str, Any]], run: Run) -> None:
    told = {"faults": Counter(each["fault"] for each in faults), "starts": len(run.events("started"))}
    path.write_text(json.dumps(told))


def table(survived: Counter[str]) -> str:
    rows = [f"| {kind} | {count} |" for kind, count in sorted(survived.items())]
    return "\n".join([*rows, f"| all | {survived.total()} |"])


def lost_beyond_the_last_checkpoint(run: Run) -> Iterator[str]:
    """Starts that did not resume from the newest good checkpoint."""
    from train.events import read_jsonl

    saved: set[int] = set()
    for event in read_jsonl(run.folder / "events.jsonl"):
        if event["kind"] == "saved":
            saved.add(event["step"])
        elif event["kind"] == "quarantined":
            saved.discard(event["step"])
        elif event["kind"] == "resumed" and event["step"] < max(saved, default=0):
            yield f"resumed from step {event['step']} though {max(saved)} was saved"
