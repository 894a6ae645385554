import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from train.exit_codes import FAILED
from train.health import watchdog as module
from train.health.watchdog import Probe, Watchdog, lost_peer


class Left:
    """Stands for the end of a rank's process: the thread that calls it does no more."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.dogs: list[Watchdog] = []
        self.happened = threading.Semaphore(0)

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.release()
        threading.Event().wait()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    left = Left()
    store = dist.HashStore()
    monkeypatch.setattr(module, "_store", lambda: store)
    monkeypatch.setattr(module, "leave_at_once", left)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(module, "STATUS_SECONDS", 0.0)
    yield left
    for dog in left.dogs:
        dog.close()  # or its threads would end the tests


def watchdogs(left: Left, folder: Path, events: list[Any], hang_seconds: float = 0.5) -> list[Watchdog]:
    def record(kind: str, **details: Any) -> None:
        events.append((kind, details))

    left.dogs += [
        Watchdog(
            folder / "status.json", folder / "logs", rank=rank, world_size=2, hang_seconds=hang_seconds, record=record
        )
        for rank in range(2)
    ]
    return left.dogs


def test_a_rank_that_stays_behind_is_named_with_its_stack_and_all_leave(
    tmp_path: Path, left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    dogs = watchdogs(left, tmp_path, events)
    dogs[0].beat("data", 7)
    dogs[0].beat("forward", 7)
    dogs[1].beat("data", 7)
    with caplog.at_level(logging.ERROR):
        assert left.happened.acquire(timeout=30)
        assert left.happened.acquire(timeout=30)
    assert left.codes == [FAILED, FAILED]
    [(kind, details)] = events
    assert (kind, details["rank"]) == ("hang", 1)
    assert "rank 1 is the one that is late; phase data, 7 steps done, in " in caplog.text
    assert "test_a_rank_that_stays_behind" in caplog.text, "the late rank's stack"
    for rank in range(2):
        assert "watchdog.py" in (tmp_path / "logs" / f"stacks-rank-{rank}.txt").read_text()


def test_ranks_that_get_on_are_left_alone_and_shown_in_the_status(tmp_path: Path, left: Left) -> None:
    dogs = watchdogs(left, tmp_path, [], hang_seconds=60.0)
    for dog in dogs:
        dog.note(step_seconds=0.5, data_seconds=0.25, probe_seconds=0.125)
    deadline = time.monotonic() + 30.0
    status: dict[str, Any] = {"ranks": []}
    while len(status["ranks"]) < 2 and time.monotonic() < deadline:
        for dog in dogs:
            dog.beat("forward", 7)
        time.sleep(0.05)
        if (tmp_path / "status.json").exists():
            status = json.loads((tmp_path / "status.json").read_text())
    assert not left.codes
    assert status["slow"] == []
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    for rank in status["ranks"]:
        assert rank["phase"] == "forward"
        assert (rank["step_seconds"], rank["data_seconds"], rank["probe_seconds"]) == (0.5, 0.25, 0.125)


def test_when_a_rank_says_that_it_failed_the_others_leave(
    tmp_path: Path, left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    dogs = watchdogs(left, tmp_path, [], hang_seconds=3.0)
    dogs[1].failed()
    assert left.happened.acquire(timeout=30)
    assert left.codes == [FAILED]
    assert "rank 1 failed; leaving" in caplog.text


def test_a_store_that_does_not_answer_means_rank_0(
    tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            frozen.wait()

    monkeypatch.setattr(module, "_store", Store)
    dog = Watchdog(
        tmp_path / "status.json", tmp_path, rank=1, world_size=2, hang_seconds=0.5, record=lambda *_, **__: None
    )
    left.dogs.append(dog)
    assert left.happened.acquire(timeout=30)
    assert "rank 0 has not answered" in caplog.text


def test_a_lost_peer_is_told_from_a_fault_of_ones_own() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    assert lost_peer(RuntimeError(gloo))
    assert lost_peer(dist.DistNetworkError("The client socket has failed"))
    assert not lost_peer(RuntimeError("shape mismatch"))
    assert not lost_peer(ValueError("gloo"))


def test_the_probe_takes_some_time() -> None:
    assert 0.0 < Probe(torch.device("cpu")).seconds() < 1.0
