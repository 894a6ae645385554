"""Whatever is in a run folder, a diagnosis reads little of it, ends, and changes nothing."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.diagnose import logs, reading
from launch.diagnose.reading import read_evidence
from launch.diagnose.verdict import diagnose
from tests.launch.diagnose.cluster import END, NOW, START, Cluster, falling

GARBAGE = [
    b"\x00\xff\xfe" * 100,
    b"[" * 100_000,
    b'{"time": 1e9, "kind": "failed", "rank": "x", "error": ["a"]}\n' * 50,
    b'{"time": NaN, "kind": "hang", "rank": -1}\n',
    b'{"time": 1e9, "kind": "slow_rank", "host": 7, "rank": 99999999999999999999}\n',
    b"=== 2026 rank 1 of 99999999999999999999999, x, restart 0\nkeepstep: \x1b[2J\n" + "é\u2028".encode(),
    b"x" * 3_000_000,
]
FILES = ("events.jsonl", "metrics.jsonl", "recipe.yaml", "status.json", "lease.json", "logs/n0/rank-0.log")
MORE_FILES = ("logs/n0/failure.json", "logs/slurm-7.log")


def digest(folder: Path) -> str:
    """Returns a hash of all that a folder holds: names, times, modes and contents."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        total.update(f"{path} {status.st_mode} {status.st_mtime_ns} {status.st_size}".encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def small(folder: Path) -> Path:
    cluster = Cluster(folder, world_size=16).started().train(falling(60)).fails(3, "memory ran out")
    cluster.job.append("keepstep: node 1 (n001) has not answered for 20 s; ending the ranks")
    return cluster.write()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    before = digest(run)
    assert diagnose(read_evidence(run, NOW)).rule == "lost-node"
    assert digest(run) == before


@pytest.mark.parametrize("name", [*FILES, *MORE_FILES])
@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_a_file_stops_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    run = small(tmp_path / "run")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes(content)
    found = diagnose(read_evidence(run, NOW))
    assert found.action in ("restart", "stop", "continue")
    json.dumps(found.evidence)


@pytest.mark.parametrize("name", [*FILES, *MORE_FILES])
def test_a_file_that_is_none_is_left_alone(tmp_path: Path, name: str) -> None:
    run = small(tmp_path / "run")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    diagnose(read_evidence(run, NOW))
    (run / name).unlink()
    (run / name).mkdir()
    diagnose(read_evidence(run, NOW))


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_a_flipped_bit_never_stops_a_diagnosis(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run = tmp_path_factory.getbasetemp() / "flipped-diagnosis"
    if not run.exists():
        small(run)
    name = data.draw(st.sampled_from([name for name in (*FILES, *MORE_FILES) if (run / name).is_file()]))
    before = (run / name).read_bytes()
    content = bytearray(before)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (run / name).write_bytes(content)
    try:
        diagnose(read_evidence(run, NOW))
    finally:
        (run / name).write_bytes(before)


def test_only_the_ends_of_logs_are_read(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    for rank in range(16):
        file = run / "logs" / Cluster.node(rank) / f"rank-{rank}.log"
        with file.open("ab") as log:
            log.truncate(1 << 40)  # a terabyte of nothing, which no reader could get through
            log.seek(0, os.SEEK_END)
            log.write(b"\nkeepstep: no space is left for /runs/x\n")
        os.utime(file, (END, END))
    evidence = read_evidence(run, NOW)
    assert "no space is left for /runs/x" in " ".join(line.text for line in evidence.lines)
    assert sum(len(line.text) for line in evidence.lines) < 16 * logs.TAIL_BYTES


def test_logs_of_earlier_starts_and_jobs_do_not_count(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", world_size=8).started().fails(0, "list index out of range")
    run = cluster.write()
    old = run / "logs" / "n999" / "rank-900.log"
    old.parent.mkdir()
    old.write_text("=== 2027-01-14 08:00:00 rank 900 of 1024, job12.0, restart 0\nkeepstep: memory ran out\n")
    os.utime(old, (START + 100, START + 100))
    job = run / "logs" / "slurm-12.log"
    job.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n")
    os.utime(job, (START - 9000, START - 9000))
    file = run / "logs" / "n000" / "rank-0.log"
    file.write_text(
        "=== 2027-01-15 07:00:00 rank 0 of 8, job77.0, restart 0\nkeepstep: memory ran out\n" + file.read_text()
    )
    os.utime(file, (END, END))
    assert diagnose(read_evidence(run, NOW)).rule == "unknown-error"


def test_a_later_start_that_failed_before_its_first_event_counts(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", world_size=8).started().event("finished", END - 900, step=9)
    cluster.died(2, "exit code 1", ["ModuleNotFoundError: No module named 'torch'"])
    cluster.log(2, "ModuleNotFoundError: No module named 'torch'")
    found = diagnose(read_evidence(cluster.write(), NOW))
    assert (found.state, found.rule, found.rank, found.action) == ("failed", "module-missing", 2, "stop")


def test_a_waiting_run_is_not_judged_by_its_last_attempt(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", world_size=8).started().fails(0, "memory ran out", at=START + 60)
    run = cluster.event("submitted", END, jobs=["78"]).write()
    for file in run.glob("logs/*/rank-*.log"):
        os.utime(file, (START + 60, START + 60))
    assert diagnose(read_evidence(run, NOW)).rule == "waiting"


def test_the_start_of_a_long_attempt_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path / "run", world_size=8).started()
    for number in range(50):
        cluster.event("booked", END - 60 + number, step=number, seconds={"step": 1.0})
    run = cluster.fails(3, "list index out of range").write()
    wanted = diagnose(read_evidence(run, NOW))
    monkeypatch.setattr(reading, "MOST_EVENTS", 10)
    evidence = read_evidence(run, NOW)
    assert [event["kind"] for event in evidence.events][:2] == ["started", "booked"]
    assert len(evidence.events) == 11
    assert diagnose(evidence).rule == wanted.rule
