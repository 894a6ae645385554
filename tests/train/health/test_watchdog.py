import json
import logging
import math
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
from train.health.watchdog import Probe, Watchdog, is_lost_peer

LIMIT_SECONDS = 120.0
"""Longest wait for anything, even on a busy machine."""


class Exits:
    """Stands for the end of a rank's process: the thread that calls it does nothing more."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.watchdogs: list[Watchdog] = []
        self.happened = threading.Semaphore(0)

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.release()
        threading.Event().wait()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exits]:
    exits = Exits()
    store = dist.HashStore()
    monkeypatch.setattr(module, "_connect_to_store", lambda: store)
    monkeypatch.setattr(module, "leave_at_once", exits)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(module, "STATUS_SECONDS", 0.0)
    yield exits
    for watchdog in exits.watchdogs:
        watchdog.close()  # otherwise its threads would end the test process


def two_watchdogs(exits: Exits, folder: Path, events: list[Any], hang_seconds: float) -> list[Watchdog]:
    def record(kind: str, **details: Any) -> None:
        events.append((kind, details))

    exits.watchdogs += [
        Watchdog(
            folder / "status.json", folder / "logs", rank=rank, world_size=2, hang_seconds=hang_seconds, record=record
        )
        for rank in range(2)
    ]
    return exits.watchdogs


def test_a_rank_that_is_behind_is_named_with_its_stack_and_all_ranks_exit(
    tmp_path: Path, exits: Exits, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    watchdogs = two_watchdogs(exits, tmp_path, events, hang_seconds=3.0)
    watchdogs[0].enter_phase("data", 7)
    watchdogs[0].enter_phase("forward", 7)
    watchdogs[1].enter_phase("data", 7)
    with caplog.at_level(logging.ERROR):
        assert exits.happened.acquire(timeout=LIMIT_SECONDS)
        assert exits.happened.acquire(timeout=LIMIT_SECONDS)
    assert exits.codes == [FAILED, FAILED]
    [(kind, details)] = events
    assert (kind, details["rank"]) == ("hang", 1)
    assert "rank 1 is behind the others: phase data, 7 steps done, in " in caplog.text
    assert "test_a_rank_that_is_behind" in caplog.text, "the stack of the rank that is behind"
    for rank in range(2):
        assert "watchdog.py" in (tmp_path / "logs" / f"stacks-rank-{rank}.txt").read_text()


def test_ranks_that_make_progress_are_not_aborted_and_the_status_shows_them(tmp_path: Path, exits: Exits) -> None:
    watchdogs = two_watchdogs(exits, tmp_path, [], hang_seconds=60.0)
    for watchdog in watchdogs:
        watchdog.report_pace(step_seconds=0.5, data_seconds=0.25, probe_seconds=0.125)
    deadline = time.monotonic() + LIMIT_SECONDS
    shown: list[tuple[Any, ...]] = []
    status: dict[str, Any] = {}
    expected = [(rank, "forward", 0.5, 0.25, 0.125) for rank in range(2)]
    while shown != expected and time.monotonic() < deadline:
        for watchdog in watchdogs:
            watchdog.enter_phase("forward", 7)
        time.sleep(0.05)
        if (tmp_path / "status.json").exists():
            status = json.loads((tmp_path / "status.json").read_text())
            keys = ("rank", "phase", "step_seconds", "data_seconds", "probe_seconds")
            shown = [tuple(rank[key] for key in keys) for rank in status["ranks"]]
    assert shown == expected
    assert not exits.codes
    assert status["slow"] == []
    assert set(status["ranks"][0]) == {
        *("rank", "host", "pid", "phase", "step", "where"),
        *("silent_seconds", "step_seconds", "data_seconds", "probe_seconds"),
    }


def test_when_a_rank_reports_its_failure_the_others_exit(
    tmp_path: Path, exits: Exits, caplog: pytest.LogCaptureFixture
) -> None:
    watchdogs = two_watchdogs(exits, tmp_path, [], hang_seconds=10.0)
    watchdogs[1].report_failure()
    assert exits.happened.acquire(timeout=LIMIT_SECONDS)
    assert exits.codes == [FAILED]
    assert "rank 1 failed; this rank exits" in caplog.text


def test_a_store_that_does_not_answer_is_a_hang_of_rank_0(
    tmp_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            frozen.wait()

    monkeypatch.setattr(module, "_connect_to_store", Store)
    watchdog = Watchdog(
        tmp_path / "status.json", tmp_path, rank=1, world_size=2, hang_seconds=0.5, record=lambda *_, **__: None
    )
    exits.watchdogs.append(watchdog)
    assert exits.happened.acquire(timeout=LIMIT_SECONDS)
    assert "rank 0 has not answered" in caplog.text


def test_a_lost_peer_is_distinguished_from_an_error_of_this_rank() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    assert is_lost_peer(RuntimeError(gloo))
    assert is_lost_peer(dist.DistNetworkError("The client socket has failed"))
    assert not is_lost_peer(RuntimeError("shape mismatch"))
    assert not is_lost_peer(ValueError("gloo"))


def test_the_probe_measures_a_time() -> None:
    assert 0.0 < Probe(torch.device("cpu")).seconds() < math.inf


def test_readings_of_all_ranks_reach_rank_0_with_the_heartbeats(tmp_path: Path, exits: Exits) -> None:
    watchdogs = two_watchdogs(exits, tmp_path, [], hang_seconds=60.0)
    for rank, watchdog in enumerate(watchdogs):
        watchdog.report_pace(0.5, 0.25, 0.125, {"memory_gib": 60.0 + rank, "device_power_watts": 300.0})
    deadline = time.monotonic() + LIMIT_SECONDS
    expected = {"memory_gib": 61.0, "device_power_watts": 600.0}
    while watchdogs[0].readings({"memory_gib": 5.0}) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert watchdogs[0].readings({"memory_gib": 5.0}) == expected
    assert watchdogs[0].readings({"memory_gib": 62.5})["memory_gib"] == 62.5
