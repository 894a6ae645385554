"""Notices ranks that hang or are slow, says which and where, and ends a run that does not get on.

The main thread tells each phase that it enters (`beat`), which costs nothing. A thread tells the others every couple
of seconds, through a store that rank 0 serves (not through collectives, which may be what hangs). Rank 0 watches all
ranks, and every rank watches whether the store, that is rank 0, still answers. If no rank gets on for
`train.hang_seconds`, the late one is named, all ranks write their stacks to `logs/stacks-rank-N.txt`, and all leave;
the launcher starts them again. Only the monotonic clock is read, and a pause of the watcher itself counts for no more
than one round.

Rank 0 also keeps RUN/status.json:

    {"time": ..., "step": ..., "idle_seconds": seconds since any rank got on, "slow": [ranks],
     "ranks": [{"rank", "host", "pid", "phase", "step", "where", "silent_seconds", "step_seconds", "data_seconds",
                "probe_seconds"}, ...]}

`step_seconds` and `data_seconds` are a step's, `probe_seconds` is what the same small matrix product took. A rank is
slow if its probe took more than 1.5 times the median of all in several rounds of the log one after the other.
"""

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import FrameType

import torch
import torch.distributed as dist

from parallel.bootstrap import leave_at_once
from train.exit_codes import FAILED
from train.health.heartbeats import Beat, Late, Watch

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
GRACE_SECONDS = 5.0
"""How long ranks wait for what others still have to say before they leave."""


class Watchdog:
    """Beats from when it is made until `close`."""

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
        # Rank 0 reads all messages; at thousands of ranks they come more rarely, so that it has time for its own work.
        self._pulse_seconds = min(max(2.0, world_size / 500), hang_seconds / 10)
        self._mine = Beat(rank, socket.gethostname(), os.getpid())
        self._phase, self._step, self._count, self._moved = "start", 0, 0, 0
        self._pace: dict[str, float] = {}
        self._watch = Watch(world_size)
        self._store = _store()
        self._head: Beat | None = None
        self._rounds = 0
        self._named: list[int] = []
        self._last_status = 0.0
        self._closed = threading.Event()
        self._ending = threading.Lock()
        for work in (self._talk, self._mind_rank_0):
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True).start()

    def beat(self, phase: str, step: int) -> None:
        """The main thread enters a phase. `step`: optimizer steps done."""
        self._phase, self._step = phase, step
        self._count += 1

    def alive(self) -> None:
        """Still in the same phase, but getting on, as long reads and writes do. From any thread."""
        self._moved += 1

    def note(self, step_seconds: float, data_seconds: float, probe_seconds: float) -> None:
        """How fast this rank is, told from time to time."""
        self._pace = {"step_seconds": step_seconds, "data_seconds": data_seconds, "probe_seconds": probe_seconds}

    def failed(self) -> None:
        """This rank is about to leave because of an error; the others need not wait for it. Not collective."""
        self._closed.set()
        try:
            self._store.set("failed", str(self._mine.rank))
        except RuntimeError:
            return  # rank 0 is gone, and so the others will know

    def close(self) -> None:
        """From here on nobody is watched, and rank 0 may go. Not collective."""
        self._closed.set()

    def _talk(self) -> None:
        last = time.monotonic()
        try:
            while not self._closed.wait(self._pulse_seconds):
                now = time.monotonic()
                self._round(min(now - last, 2 * self._pulse_seconds))
                last = now
                self._rounds += 1
        except RuntimeError as error:  # the store's connection broke
            self._leave_after_grace(f"lost rank 0, which keeps the ranks together ({error})")

    def _round(self, elapsed: float) -> None:
        self._mine = replace(
            self._mine,
            phase=self._phase,
            step=self._step,
            count=self._count,
            moved=self._moved,
            pulse=self._mine.pulse + 1,
            where=_where(),
            **self._pace,
        )
        self._store.set(f"beat/{self._mine.rank}", json.dumps(asdict(self._mine)))
        if self._store.check(["late"]):
            self._end(Late(**json.loads(self._store.get("late"))))
        if self._store.check(["failed"]):
            self._leave_after_grace(f"rank {self._store.get('failed').decode()} failed")
        if self._mine.rank == 0:
            self._watch_all(elapsed)
        elif self._head is None and self._store.check(["beat/0"]):
            self._head = Beat(**json.loads(self._store.get("beat/0")))

    def _watch_all(self, elapsed: float) -> None:
        """Rank 0 alone."""
        keys = [f"beat/{rank}" for rank in range(self._watch.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        beats = [Beat(**json.loads(value)) for value in self._store.multi_get(keys)]
        self._watch.see({beat.rank: beat for beat in beats}, elapsed)
        if late := self._watch.late(self._hang_seconds):
            self._store.set("late", json.dumps(asdict(late)))
            self._end(late)
        self._name_slow_ranks()
        if time.monotonic() - self._last_status > STATUS_SECONDS:
            self._last_status = time.monotonic()
            self._write_status()

    def _name_slow_ranks(self) -> None:
        slow = self._watch.slow()
        for rank in set(slow) - set(self._named):
            beat = self._watch.beats[rank]
            usual = median(beat.probe_seconds for beat in self._watch.beats.values())
            log.warning(
                "rank %d on %s is slow: %.2f ms for what takes the others %.2f ms",
                *(rank, beat.host, 1e3 * beat.probe_seconds, 1e3 * usual),
            )
            self._record("slow_rank", rank=rank, host=beat.host, probe_seconds=beat.probe_seconds, median_seconds=usual)
        self._named = slow

    def _write_status(self) -> None:
        ranks = []
        for rank, beat in sorted(self._watch.beats.items()):
            shown = asdict(beat) | {"silent_seconds": round(self._watch.silent[rank], 1)}
            ranks.append({name: value for name, value in shown.items() if name not in ("count", "moved", "pulse")})
        status = {
            "time": round(time.time(), 3),
            "step": self._step,
            "idle_seconds": round(self._watch.idle_seconds, 1),
            "slow": self._watch.slow(),
            "ranks": ranks,
        }
        try:
            partial = self._status_file.with_name(self._status_file.name + ".partial")
            partial.write_text(json.dumps(status, indent=1), encoding="utf-8")
            partial.replace(self._status_file)
        except OSError as error:
            log.warning("%s was not written: %s", self._status_file, error)

    def _mind_rank_0(self) -> None:
        """If the talks stand still, the store does not answer: rank 0 is stopped, or cut off."""
        silent, rounds = 0.0, 0
        last = time.monotonic()
        while not self._closed.wait(self._pulse_seconds):
            now = time.monotonic()
            silent += min(now - last, 2 * self._pulse_seconds)
            last = now
            if self._rounds != rounds:
                silent, rounds = 0.0, self._rounds
            if silent > 1.2 * self._hang_seconds:
                place = f" (process {self._head.pid} on {self._head.host})" if self._head else ""
                self._end(Late(0, f"rank 0{place} has not answered for {silent:.0f} s: it is stopped or cut off"))

    def _end(self, late: Late) -> None:
        """Say who is late, write all stacks, show the late rank's, leave."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the other thread sees to it
        try:
            log.error("%s; all ranks leave", late.why)
            self._write_stacks()
            self._show_stack_of(late)
        finally:
            leave_at_once(FAILED)

    def _show_stack_of(self, late: Late) -> None:
        """In the log of the late rank and in rank 0's."""
        mine = self._mine.rank
        if mine == late.rank:
            log.error("rank %d stands here:\n%s", mine, main_stack())
        if mine == 0:
            self._record("hang", rank=late.rank, why=late.why)
            if late.rank not in (0, None) and self._wait_for("stack"):
                log.error("rank %d stands here:\n%s", late.rank, self._store.get("stack").decode())
        else:
            if mine == late.rank:
                self._store.set("stack", main_stack())
            self._closed.wait(GRACE_SECONDS if late.rank != 0 else 1.0)  # rank 0 speaks last

    def _wait_for(self, key: str) -> bool:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._store.check([key]):
                return True
            time.sleep(0.1)
        return False

    def _write_stacks(self) -> None:
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / f"stacks-rank-{self._mine.rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            log.warning("the stacks were not written: %s", error)

    def _leave_after_grace(self, why: str) -> None:
        """The main thread notices by itself where its collectives can fail; where they cannot, it is ended here."""
        if self._closed.wait(GRACE_SECONDS):
            return
        log.error("%s; leaving", why)
        leave_at_once(FAILED)


def _store() -> dist.Store:
    """A connection of its own to the store that the ranks met at, so that no wait of the main thread blocks it."""
    if not dist.is_initialized():
        return dist.HashStore()
    return dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _where() -> str:
    frame = _main_frame()
    if frame is None:
        return "no frame"
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno} {frame.f_code.co_name}"


def main_stack() -> str:
    """Of the main thread, seen from another one."""
    return "".join(traceback.format_stack(_main_frame()))


def lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Probe:
    """The same small matrix product on every rank, timed."""

    def __init__(self, device: torch.device) -> None:
        size = 128 if device.type == "cpu" else 2048
        self._device = device
        self._a = torch.ones(size, size, device=device)

    def seconds(self) -> float:
        """The best of three."""
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            torch.mm(self._a, self._a)
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - started)
        return best
