"""The record of collectives names the rank that did not join, with NCCL's states and with gloo's."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.bootstrap import start
from parallel.config import ParallelConfig
from parallel.environ import read_world
from tests.parallel.ranks import run_ranks
from train.health import hang_report, watchdog
from train.health.collectives import GroupRecord, find_late, read_records
from train.health.hang_report import refine
from train.health.heartbeats import Hang

NAMES = {"0": "0/0/4", "3": "3/0/2"}


def entry(number: int, state: str, group: str = "0", **changes: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4096]],
        "is_p2p": False,
        "process_group": [group, "default_pg" if group == "0" else "mesh_shard"],
        "profiling_name": "nccl:all_reduce",
        "retired": state == "completed",
        "state": state,
        "time_discovered_started_ns": 0 if state == "scheduled" else 1,
        **changes,
    }


def records(*entries: dict[str, Any]) -> list[GroupRecord]:
    return read_records({"entries": list(entries)}, NAMES)


def test_a_rank_that_has_not_called_the_collective_is_late() -> None:
    waiting = records(entry(6, "completed"), entry(7, "started"))
    late = find_late({0: waiting, 1: waiting, 2: records(entry(6, "completed")), 3: waiting})
    assert late is not None
    assert late.ranks == (2,)
    assert late.reason == (
        "rank 2 did not join nccl:all_reduce of [[4096]] (collective 7 of the group default_pg), "
        "in which 3 of its 4 ranks wait"
    )


def test_a_device_that_has_not_started_a_queued_collective_is_late() -> None:
    waiting = records(entry(6, "completed"), entry(7, "started"), entry(8, "scheduled"))
    stuck = records(entry(6, "completed"), entry(7, "scheduled"), entry(8, "scheduled"))
    late = find_late({0: waiting, 1: stuck})
    assert late is not None
    assert late.ranks == (1,)


def test_without_recorded_starts_what_was_called_counts() -> None:
    unknown: dict[str, Any] = {"time_discovered_started_ns": 0}
    waiting = records(entry(6, "completed", **unknown), entry(7, "scheduled", **unknown))
    late = find_late({0: waiting, 1: records(entry(6, "completed", **unknown))})
    assert late is not None
    assert late.ranks == (1,)


def test_a_rank_that_waits_for_a_late_rank_is_not_blamed() -> None:
    """Ranks 2 and 3 wait in group 0 for ranks 0 and 1; rank 0 waits in group 3 for rank 1."""
    outer = records(entry(4, "started"))
    late = find_late(
        {
            0: records(entry(3, "completed"), entry(9, "started", "3")),
            1: records(entry(3, "completed"), entry(8, "completed", "3")),
            2: [record for record in outer if record.name.startswith("0/")],
            3: [record for record in outer if record.name.startswith("0/")],
        }
    )
    assert late is not None
    assert late.ranks == (1,)


def test_a_rank_that_never_used_the_group_is_late() -> None:
    late = find_late({0: records(entry(1, "started")), 1: records()})
    assert late is not None
    assert late.ranks == (1,)


def test_the_numbers_of_gloo_and_of_nccl_in_one_group_are_not_compared() -> None:
    gloo = entry(50, "scheduled", profiling_name="gloo:all_reduce", retired=True)
    waiting = records(gloo, entry(7, "started"))
    assert find_late({0: waiting, 1: waiting}) is None
    late = find_late({0: waiting, 1: records(gloo)})
    assert late is not None
    assert late.ranks == (1,)


def test_ranks_that_have_entered_the_same_collectives_are_not_late() -> None:
    same = records(entry(7, "started"))
    assert find_late({0: same, 1: same}) is None
    done = records(entry(7, "completed"))
    assert find_late({0: done, 1: records(entry(6, "completed"))}) is None, "nobody waits"
    assert find_late({}) is None


def test_the_verdict_keeps_a_rank_that_is_already_known() -> None:
    waiting, absent = ({"name": "0/0/2/nccl", "about": "w", "joined": n, "waits_in": w} for n, w in ((7, "x"), (6, "")))
    assert refine(Hang(0, "known"), {0: [waiting], 1: [absent]}).rank == 0
    refined = refine(Hang(None, "all wait"), {0: [waiting], 1: [absent]})
    assert refined.rank == 1
    assert refined.reason.startswith("all wait; rank 1 did not join x (collective 7 of the group w)")


def test_a_rank_that_cannot_answer_does_not_delay_the_verdict_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_report, "LINGER_SECONDS", 0.0)
    store, events = dist.HashStore(), list[Any]()
    report = hang_report.HangReport(store, tmp_path, 0, limit_seconds=0.5)
    report.conclude(Hang(1, "known"), [0, 1], lambda kind, **details: events.append((kind, details)))
    assert events == [("hang", {"rank": 1, "why": "known"})]
    assert b"known" in store.get("verdict")


def hang(folder: str) -> dict[str, Any]:
    runtime = start(ParallelConfig(engine="ddp", device="cpu"), read_world(os.environ))
    rank, codes, events = runtime.world.rank, list[int](), list[Any]()
    values, decided = torch.ones(4), threading.Event()
    dist.all_reduce(torch.ones(2))

    def leave(code: int) -> None:
        codes.append(code)
        decided.set()
        threading.Event().wait()

    watchdog.leave_at_once = leave  # pyright: ignore[reportAttributeAccessIssue]
    dog = watchdog.Watchdog(
        Path(folder, "status.json"),
        Path(folder, "logs"),
        rank=rank,
        world_size=3,
        hang_seconds=4.0,
        record=lambda kind, **details: events.append((kind, details)),
    )
    reduced = threading.Thread(target=lambda: dist.all_reduce(values), daemon=True)
    if rank != 1:
        reduced.start()
    decided.wait()
    dog.close()
    if rank == 1:
        reduced.start()
    reduced.join()
    return {"codes": codes, "events": events, "sum": values}


def test_on_real_ranks_the_one_that_does_not_join_is_named(tmp_path: Path) -> None:
    """All main threads wait at the same line, as they do for a device; rank 1 has not called the collective."""
    found = run_ranks(__file__, "hang", 3, str(tmp_path))
    event = found[0]["events"]
    assert [result["codes"] for result in found] == [[1], [1], [1]]
    [(kind, details)] = event
    assert (kind, details["rank"]) == ("hang", 1)
    assert "all ranks wait at the same point" in details["why"]
    assert "rank 1 did not join gloo:all_reduce of [[4]] (collective " in details["why"]
    assert "in which 2 of its 3 ranks wait" in details["why"]
    for rank in range(3):
        assert "all_reduce" in (tmp_path / "logs" / f"collectives-rank-{rank}.json").read_text()
    assert torch.equal(found[1]["sum"], torch.full((4,), 3.0)), "the late rank joined afterwards"
