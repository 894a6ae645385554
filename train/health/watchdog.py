"""Detects hangs and stragglers, names the rank and its location, and aborts a run that makes no progress.

The main thread reports each phase that it enters (`enter_phase`), which costs almost nothing. A second thread sends a
heartbeat every few seconds through a store that rank 0 serves. It does not use collectives, because they may be what
hangs. Rank 0 monitors all ranks. Every rank monitors whether the store still answers, that is, whether rank 0 is alive.
If no rank makes progress for `train.hang_seconds`, the watchdog names the rank that blocks the run. All ranks write
what they know (`train.health.hang_report`) and exit, and the launcher restarts them. Only the monotonic clock is read.
A pause of the watchdog itself counts for at most two heartbeat intervals.

Rank 0 also writes RUN/status.json:

    {"time": ..., "step": ..., "idle_seconds": seconds since any rank made progress, "slow": [ranks],
     "ranks": [{"rank", "host", "pid", "phase", "step", "where", "silent_seconds", "step_seconds", "data_seconds",
                "probe_seconds"}, ...]}

`step_seconds` and `data_seconds` belong to one step. `probe_seconds` is the time of a small matrix product, the same on
every rank. A rank is a straggler (`slow`) if its probe took more than 1.5 times the median of all ranks in three
consecutive reports.
"""

# torch.distributed does not export its stores as its documentation does.
# pyright: reportPrivateImportUsage=false

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from parallel.bootstrap import leave_at_once
from train.exit_codes import FAILED
from train.health.hang_report import HangReport, location
from train.health.heartbeats import Hang, Heartbeat, RankMonitor
from train.records.device_readings import Readings, over_ranks

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
"""Seconds between two versions of status.json."""
GRACE_SECONDS = 5.0
"""Seconds that ranks wait for the messages of others before they exit."""
_NOT_IN_STATUS = ("phases_entered", "blocks_moved", "sequence", "readings")


class Watchdog:
    """This rank's heartbeats and hang detection, active from construction until `close`.

    `record` writes an event; it is called on rank 0 alone."""

    def __init__(
        self,
        status: Path,
        logs: Path,
        *,
        rank: int,
        world_size: int,
        hang_seconds: float,
        record: Callable[..., None],
    ) -> None:
        self._status_file, self._logs, self._record = status, logs, record
        self._hang_seconds = hang_seconds
        # Rank 0 reads all messages. With thousands of ranks they are sent less often, so that it can keep up.
        self._interval_seconds = min(max(2.0, world_size / 500), hang_seconds / 10)
        self._own = Heartbeat(rank, socket.gethostname(), os.getpid())
        self._phase, self._step, self._phases_entered, self._blocks_moved = "start", 0, 0, 0
        self._pace: dict[str, Any] = {}
        self._over_ranks: Readings = {}
        self._monitor = RankMonitor(world_size)
        self._store = _connect_to_store()
        self._rank_0: Heartbeat | None = None
        self._rounds = 0
        self._reported_stragglers: list[int] = []
        self._last_status = 0.0
        self._closed = threading.Event()
        self._aborting = threading.Lock()
        for work in (self._exchange_heartbeats, self._watch_rank_0):
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True).start()

    def enter_phase(self, phase: str, step: int) -> None:
        """Report that the main thread enters a phase with `step` optimizer steps finished."""
        self._phase, self._step = phase, step
        self._phases_entered += 1

    @property
    def step(self) -> int:
        """Optimizer steps finished, as last reported."""
        return self._step

    def report_activity(self) -> None:
        """Report progress within a phase, as long reads and writes do. Any thread may call this."""
        self._blocks_moved += 1

    def report_pace(
        self, step_seconds: float, data_seconds: float, probe_seconds: float, readings: Readings | None = None
    ) -> None:
        """Report how fast this rank currently is, and the readings of its device."""
        pace = {"step_seconds": step_seconds, "data_seconds": data_seconds, "probe_seconds": probe_seconds}
        self._pace = {**pace, "readings": readings or {}}

    def readings(self, own: Readings) -> Readings:
        """Return the readings of all ranks, as one value each. `own`: newer ones of this rank, for ranks' maximum."""
        return over_ranks([own, self._over_ranks])

    def report_failure(self) -> None:
        """Tell the other ranks that this rank exits because of an error, so that they do not wait. Not collective."""
        self._closed.set()
        try:
            self._store.set("failed", str(self._own.rank))
        except RuntimeError:
            return  # rank 0 is gone, so the other ranks notice by themselves

    def close(self) -> None:
        """Stop monitoring; rank 0 may exit from now on. Not collective."""
        self._closed.set()

    def _exchange_heartbeats(self) -> None:
        last = time.monotonic()
        try:
            while not self._closed.wait(self._interval_seconds):
                now = time.monotonic()
                self._round(min(now - last, 2 * self._interval_seconds))
                last = now
                self._rounds += 1
        except RuntimeError as error:  # the connection to the store broke
            self._exit_after_grace(f"lost the connection to rank 0, which serves the store ({error})")

    def _round(self, elapsed: float) -> None:
        """Send this rank's heartbeat and read the messages of the others."""
        self._own = replace(
            self._own,
            phase=self._phase,
            step=self._step,
            phases_entered=self._phases_entered,
            blocks_moved=self._blocks_moved,
            sequence=self._own.sequence + 1,
            location=location(),
            **self._pace,
        )
        self._store.set(f"heartbeat/{self._own.rank}", json.dumps(asdict(self._own)))
        if self._store.check(["hang"]):
            self._abort(Hang(**json.loads(self._store.get("hang"))))
        if self._store.check(["failed"]):
            self._exit_after_grace(f"rank {self._store.get('failed').decode()} failed")
        if self._own.rank == 0:
            self._watch_all(elapsed)
        elif self._rank_0 is None and self._store.check(["heartbeat/0"]):
            self._rank_0 = Heartbeat(**json.loads(self._store.get("heartbeat/0")))

    def _watch_all(self, elapsed: float) -> None:
        """Check all ranks. Only rank 0 calls this."""
        keys = [f"heartbeat/{rank}" for rank in range(self._monitor.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        heartbeats = [Heartbeat(**json.loads(value)) for value in self._store.multi_get(keys)]
        self._monitor.update({heartbeat.rank: heartbeat for heartbeat in heartbeats}, elapsed)
        if hang := self._monitor.find_hang(self._hang_seconds):
            self._store.set("hang", json.dumps(asdict(hang)))
            self._abort(hang)
        self._over_ranks = over_ranks([heartbeat.readings for heartbeat in self._monitor.heartbeats.values()])
        self._report_stragglers()
        if time.monotonic() - self._last_status > STATUS_SECONDS:
            self._last_status = time.monotonic()
            self._write_status()

    def _report_stragglers(self) -> None:
        stragglers = self._monitor.stragglers()
        usual = median(one.probe_seconds for one in self._monitor.heartbeats.values()) if stragglers else 0.0
        for rank in set(stragglers) - set(self._reported_stragglers):
            one = self._monitor.heartbeats[rank]
            log.warning(
                "rank %d on %s is a straggler: its probe took %.2f ms, the median rank's %.2f ms",
                *(rank, one.host, 1e3 * one.probe_seconds, 1e3 * usual),
            )
            self._record("slow_rank", rank=rank, host=one.host, probe_seconds=one.probe_seconds, median_seconds=usual)
        self._reported_stragglers = stragglers

    def _write_status(self) -> None:
        ranks: list[str] = []
        for rank, heartbeat in sorted(self._monitor.heartbeats.items()):
            shown = vars(heartbeat) | {"silent_seconds": round(self._monitor.silent_seconds[rank], 1)}
            shown["where"] = shown.pop("location")
            # One rank at a time, so that no call holds Python's lock for long, and in C, which is fast.
            ranks.append(json.dumps({name: value for name, value in shown.items() if name not in _NOT_IN_STATUS}))
        status = {
            "time": round(time.time(), 3),
            "step": self._step,
            "idle_seconds": round(self._monitor.idle_seconds, 1),
            "slow": self._monitor.stragglers(),
        }
        listed = ",\n".join(ranks)
        try:
            partial = self._status_file.with_name(self._status_file.name + ".partial")
            partial.write_text(f'{json.dumps(status)[:-1]}, "ranks": [\n{listed}\n]}}\n', encoding="utf-8")
            partial.replace(self._status_file)
        except OSError as error:
            log.warning("%s was not written: %s", self._status_file, error)

    def _watch_rank_0(self) -> None:
        """Abort if no exchange of heartbeats completes: then rank 0 is stopped or unreachable."""
        silent, rounds = 0.0, 0
        last = time.monotonic()
        while not self._closed.wait(self._interval_seconds):
            now = time.monotonic()
            silent += min(now - last, 2 * self._interval_seconds)
            last = now
            if self._rounds != rounds:
                silent, rounds = 0.0, self._rounds
            if silent > 1.2 * self._hang_seconds:
                process = f" (process {self._rank_0.pid} on {self._rank_0.host})" if self._rank_0 else ""
                why = f"rank 0{process} has not answered for {silent:.0f} s: stopped or unreachable"
                self._abort(Hang(0, why), store_answers=False)

    def _abort(self, hang: Hang, store_answers: bool = True) -> None:
        """Log the hang, write all stacks, log the blocking rank's stack, and exit."""
        if not self._aborting.acquire(blocking=False):
            threading.Event().wait()  # the other thread aborts the process
        try:
            log.error("%s; all ranks exit", hang.reason)
            report = HangReport(self._store, self._logs, self._own.rank, self._interval_seconds + GRACE_SECONDS)
            report.write_stacks()
            if not store_answers:
                self._closed.wait(1.0)  # rank 0 writes to the log last
            elif self._own.rank == 0:
                report.conclude(hang, self._monitor.live_ranks(self._hang_seconds), self._record)
            else:
                report.contribute(hang)
        finally:
            leave_at_once(FAILED)

    def _exit_after_grace(self, reason: str) -> None:
        """Exit, unless the main thread closes the watchdog first. A collective that fails ends the main thread; one
        that cannot fail would wait forever."""
        if self._closed.wait(GRACE_SECONDS):
            return
        log.error("%s; this rank exits", reason)
        leave_at_once(FAILED)


def _connect_to_store() -> dist.Store:
    """A separate connection to the rendezvous store, so that no wait of the main thread blocks it."""
    if not dist.is_initialized():
        return dist.HashStore()
    return dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store().clone())  # pyright: ignore


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Probe:
    """A small matrix product, the same on every rank, whose time shows how fast a rank computes."""

    def __init__(self, device: torch.device) -> None:
        size = 128 if device.type == "cpu" else 2048
        self._device = device
        self._a = torch.ones(size, size, device=device)

    def seconds(self) -> float:
        """Seconds of the fastest of three products. Synchronizes with the device."""
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            torch.mm(self._a, self._a)
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - started)
        return best
