"""What ranks write when a run hangs: stacks, records of collectives, and which rank blocks the others.

Each rank writes `logs/stacks-rank-N.txt` and `logs/collectives-rank-N.json`, and sends rank 0 its stack and what it did
in each process group. Rank 0 compares them (`train.health.collectives`), logs the stack of the rank that blocks the
run, and tells the others its verdict.
"""

# torch.distributed does not export its stores as its documentation does.
# pyright: reportPrivateImportUsage=false

import contextlib
import faulthandler
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from train.health import collectives
from train.health.collectives import GroupRecord
from train.health.heartbeats import Hang

log = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
"""Time that rank 0, and with it the store, stays for the others to read its verdict."""
KEPT_ENTRIES = 200
"""Newest collectives that a rank writes to its file."""


class HangReport:
    """One rank's part in the report. No wait takes longer than `limit_seconds`."""

    def __init__(self, store: dist.Store, logs: Path, rank: int, limit_seconds: float) -> None:
        self._store, self._logs, self._rank, self._limit_seconds = store, logs, rank, limit_seconds

    def write_stacks(self) -> None:
        """Write the stacks of all threads of this rank."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / f"stacks-rank-{self._rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            log.warning("the stacks were not written: %s", error)

    def contribute(self, hang: Hang) -> None:
        """Send rank 0 what this rank knows, and log this rank's stack if it blocks the run. For ranks other than 0."""
        self._send()
        if self._wait_for(["verdict"]):
            hang = Hang(**json.loads(self._store.get("verdict")))
        if hang.rank == self._rank:
            log.error("%s\nstack of rank %d:\n%s", hang.reason, self._rank, main_stack())

    def conclude(self, hang: Hang, live: Sequence[int], record: Callable[..., None]) -> None:
        """Collect what the `live` ranks know, name the rank that blocks the run, and record it. For rank 0."""
        self._send()
        answered = list(live)
        if not self._wait_for([_key(rank) for rank in live]):
            answered = [rank for rank in live if self._store.check([_key(rank)])]
        messages = self._store.multi_get([_key(rank) for rank in answered])
        told = {rank: json.loads(message) for rank, message in zip(answered, messages, strict=True)}
        verdict = refine(hang, {rank: one["groups"] for rank, one in told.items()})
        if verdict != hang:
            log.error("%s", verdict.reason)
        record("hang", rank=verdict.rank, why=verdict.reason)
        if verdict.rank in told:
            log.error("stack of rank %d:\n%s", verdict.rank, told[verdict.rank]["stack"])
        self._store.set("verdict", json.dumps(asdict(verdict)))
        time.sleep(LINGER_SECONDS)

    def _send(self) -> None:
        # A device driver that hangs may block the record of collectives for ever, so a thread reads it.
        threading.Thread(target=self._send_now, name="hang-report", daemon=True).start()

    def _send_now(self) -> None:
        trace = collectives.dump()
        groups = collectives.read_records(trace, collectives.group_names())
        told = {"stack": main_stack(), "groups": [asdict(group) for group in groups]}
        newest = {"groups": told["groups"], "entries": trace["entries"][-KEPT_ENTRIES:]}
        try:
            (self._logs / f"collectives-rank-{self._rank}.json").write_text(json.dumps(newest), encoding="utf-8")
        except OSError as error:
            log.warning("the collectives were not written: %s", error)
        with contextlib.suppress(RuntimeError):  # rank 0 has left, and its store with it
            self._store.set(_key(self._rank), json.dumps(told))

    def _wait_for(self, keys: list[str]) -> bool:
        """Return whether all keys have appeared within the limit."""
        deadline = time.monotonic() + self._limit_seconds
        while time.monotonic() < deadline:
            try:
                if self._store.check(keys):
                    return True
            except RuntimeError:  # rank 0 has left, and its store with it
                return False
            time.sleep(0.1)
        return False


def refine(hang: Hang, groups_by_rank: dict[int, list[dict[str, Any]]]) -> Hang:
    """Return the hang with what the records of collectives add: the late rank, or why the named one is late."""
    records = {rank: [GroupRecord(**group) for group in groups] for rank, groups in groups_by_rank.items()}
    late = collectives.find_late(records)
    if late is None:
        return hang
    return Hang(late.ranks[0] if hang.rank is None else hang.rank, f"{hang.reason}; {late.reason}")


def _key(rank: int) -> str:
    return f"hang-report/{rank}"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]


def location() -> str:
    """Return the module, line and function that the main thread executes."""
    frame = _main_frame()
    if frame is None:
        return "no frame"
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno} {frame.f_code.co_name}"


def main_stack() -> str:
    """Return the main thread's stack, formatted like a traceback. Any thread may call this."""
    return "".join(traceback.format_stack(_main_frame()))
