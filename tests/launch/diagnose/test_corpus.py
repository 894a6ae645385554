"""The verdict on the whole corpus: recorded runs of real ranks, and synthetic ones of 1,024 ranks.

A case counts as right if first cause, verdict, rank and node are those of its label. A wrong "restart" is never
tolerated.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch.diagnose.reading import read_evidence
from launch.diagnose.verdict import Diagnosis, diagnose
from tests.launch.diagnose import record, synthetic
from tests.launch.diagnose.cluster import NOW, Cluster
from tests.launch.diagnose.synthetic import Label

RECORDED = {
    "finished": Label("finished", "continue"),
    "finished-alone": Label("finished", "continue"),
    "resumed-after-stop": Label("finished", "continue"),
    "killed": Label("killed", "restart", 1, "node-0"),
    "killed-in-a-write": Label("killed", "restart", 0, "node-0"),
    "killed-before-a-save": Label("killed", "stop", 1, "node-0"),
    "unknown-error": Label("unknown-error", "restart", 1, "node-0"),
    "hang": Label("hang-in-collective", "restart", 1, "node-0"),
    "frozen-rank-0": Label("stopped-process", "restart", 0, "node-0"),
    "one-bad-gradient": Label("finished", "continue"),
    "diverged": Label("not-finite", "stop"),
    "replicas-differ": Label("replicas-differ-without-majority", "restart"),
    "disk-full": Label("disk-was-full", "restart", 0, "node-0"),
    "disk-full-once": Label("finished", "continue"),
    "disk-broken": Label("saves-failed", "restart", 1, "node-0"),
    "data-thread-died": Label("memory", "restart", 1, "node-0"),
    "checkpoint-damaged-once": Label("finished", "continue"),
    "checkpoints-all-damaged": Label("no-good-checkpoint", "stop", 0, "node-0"),
    "checkpoint-of-another-run": Label("checkpoint-of-another-run", "stop", 0, "node-0"),
    "data-damaged": Label("data-damaged", "stop", 0, "node-0"),
    "data-missing": Label("no-data-set", "stop", 0, "node-0"),
    "vocabulary-too-small": Label("vocabulary-too-small", "stop", 0, "node-0"),
    "batch-does-not-divide": Label("batch-does-not-divide", "stop", 0, "node-0"),
    "disk-too-small": Label("disk-too-small", "stop", 0, "node-0"),
    "no-folder-for-checkpoints": Label("saves-failed", "stop", 0, "node-0"),
    "stopped-by-term": Label("terminated", "restart"),
    "stopped-by-interrupt": Label("interrupted-by-user", "stop"),
    "stopped-by-usr2": Label("time-limit", "restart"),
    "stopped-by-command": Label("stop-requested", "stop"),
    "killed-whole": Label("interrupted", "restart"),
    "refused-second-start": Label("stop-requested", "stop"),
    "time-is-up": Label("finished", "continue"),
    "loss-does-not-fall": Label("loss-does-not-fall", "stop"),
    "loss-too-high-rate": Label("loss-diverges", "stop"),
    "loss-falls": Label("finished", "continue"),
}
"""Right verdict of each recorded run."""


def unpack(name: str, folder: Path) -> float:
    """Write the files of a recorded run with their times; return the time of the newest one."""
    fixture = json.loads((record.FOLDER / f"{name}.json").read_text())
    for step in fixture["checkpoints"]:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for path, content in fixture["files"].items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content["text"])
        os.utime(file, (content["time"], content["time"]))
    return max(content["time"] for content in fixture["files"].values())


def recorded(folder: Path) -> Iterator[tuple[str, Label, Diagnosis]]:
    """Yield name, label and verdict of each recorded run."""
    for name, label in RECORDED.items():
        newest = unpack(name, folder / name)
        yield name, label, diagnose(read_evidence(folder / name, newest + 600))


def made(folder: Path) -> Iterator[tuple[str, Label, Diagnosis]]:
    """Yield name, label and verdict of each synthetic run."""
    for number, (name, case) in enumerate(synthetic.CASES.items()):
        cluster = Cluster(folder / f"run-{number}")
        case.build(cluster)
        evidence = read_evidence(cluster.write(case.alive), NOW)
        yield name, case.label, diagnose(replace(evidence, free_bytes=case.free_bytes))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Label, Diagnosis]]:
    folder = tmp_path_factory.mktemp("corpus")
    return [*recorded(folder), *made(folder)]


def as_label(found: Diagnosis) -> Label:
    return Label(found.rule, found.action, found.rank, found.node)


def test_the_corpus_has_real_and_synthetic_runs_of_many_kinds() -> None:
    assert set(RECORDED) == set(record.CASES) == {file.stem for file in record.FOLDER.glob("*.json")}
    kinds = {label.rule for label in RECORDED.values()} | {case.label.rule for case in synthetic.CASES.values()}
    assert len(kinds - {"finished", "running", "waiting"}) >= 25


def test_nearly_all_verdicts_are_right_and_no_restart_is_wrong(
    verdicts: list[tuple[str, Label, Diagnosis]], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [(name, label, as_label(found)) for name, label, found in verdicts if as_label(found) != label]
    restarts = [name for name, label, found in verdicts if found.action == "restart" != label.action]
    with capsys.disabled():
        right = len(verdicts) - len(wrong)
        print(f"\ndiagnose: {right} of {len(verdicts)} verdicts are right, {len(restarts)} restarts are wrong")
    assert not restarts
    assert len(wrong) <= 0.05 * len(verdicts), wrong
    assert not wrong


def test_every_verdict_says_what_to_do(verdicts: list[tuple[str, Label, Diagnosis]]) -> None:
    for name, label, found in verdicts:
        assert found.remedy, name
        assert found.evidence or label.rule in ("finished", "running", "waiting", "interrupted"), name
