"""Profiles some steps of a run with `torch.profiler`, on all ranks the same ones.

The recipe names a step (`train.profile`), or `keepstep profile` leaves a request, which rank 0 tells the others before
a step (`train.exchange`). A profile begins and ends between two steps. Each rank writes its trace. Without a profile
nothing is recorded, and with one the numbers are the same.
"""

import gzip
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from data_pipeline.atomic_file import write_atomic
from parallel.bootstrap import Runtime
from train.profiling.config import ProfileConfig
from train.profiling.request import ProfileRequest
from train.profiling.trace import PHASE, STEP, Summary, read_events, summarize
from train.records.events import EventLog

log = logging.getLogger(__name__)

MEMORY_ENTRIES = 100_000
"""Allocations of which a memory snapshot keeps the history."""


class Profiler:
    """The profiles of this rank, at most one at a time."""

    def __init__(
        self, config: ProfileConfig, folder: Path, runtime: Runtime, record: EventLog, request: ProfileRequest | None
    ) -> None:
        """`folder`: for all profiles. `request`: on rank 0, which is asked for profiles; None on other ranks."""
        self._config, self._folder, self._runtime = config, folder, runtime
        self._record, self._request = record, request
        self._at: int | None = config.at or None
        self._active: _Recording | None = None

    def asked_steps(self) -> int:
        """Return the number of steps that this rank is asked to profile, until a profile begins; else 0."""
        return 0 if self._active or self._request is None else self._request.steps()

    def changes_before(self, step: int, asked: int) -> bool:
        """Return whether a profile ends or begins before a step. `asked`: what all ranks know of `asked_steps`."""
        return bool(self._active.left == 0 if self._active else asked or step == self._at)

    def change_before(self, step: int, asked: int) -> None:
        """End the profile that has all of its steps, and begin one that is due before a step."""
        self.finish()
        if not asked and step != self._at:
            return
        steps = asked or self._config.steps
        self._at = None if step == self._at else self._at
        if asked and self._request is not None:
            self._request.remove()
        try:
            self._active = _Recording(step, steps, self._runtime.device)
        except RuntimeError as error:  # another profiler has the device, for example
            log.warning("steps %d to %d are not profiled: %s", step, step + steps - 1, error)

    def begin_step(self, step: int) -> None:
        """Mark the beginning of a step in the trace."""
        if self._active:
            self._active.begin_step(step)

    def enter(self, phase: str) -> None:
        """Mark the beginning of a phase of the loop in the trace."""
        if self._active:
            self._active.enter(phase)

    def finish(self) -> None:
        """End the profile if there is one, and write it. A disk without space loses it, but does not end the run."""
        active, self._active = self._active, None
        if active is None:
            return
        rank = self._runtime.world.rank
        folder = self._folder / f"step-{active.first:08d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace = active.stop(folder, rank)
            _name_rank(trace, rank)
            summary = summarize(read_events(trace))
            write_atomic(folder / f"rank-{rank}.json.gz", gzip.compress(json.dumps(trace).encode(), compresslevel=3))
        except (OSError, RuntimeError) as error:
            log.warning("the profile from step %d was not written: %s", active.first, error)
            return
        self._report(active, folder, summary)

    def _report(self, active: "_Recording", folder: Path, summary: Summary) -> None:
        costs = [
            {"name": cost.name, "seconds": round(cost.seconds, 6), "share": round(cost.share, 4), "calls": cost.calls}
            for cost in summary.costs
        ]
        shares = {name: round(share, 4) for name, share in summary.shares.items()}
        steps = {"step": active.first, "steps": active.begun}
        self._record("profiled", **steps, took_seconds=round(summary.seconds, 3), shares=shares, costs=costs)
        log.info(
            "profile of %d steps from step %d (%.3f s), rank %d: %s",
            *(active.begun, active.first, summary.seconds, self._runtime.world.rank),
            ", ".join(f"{name} {share:.1%}" for name, share in summary.shares.items()),
        )
        listed = ", ".join(f"{cost.name} {cost.share:.1%} ({cost.calls} calls)" for cost in summary.costs)
        log.info("largest costs: %s", listed)
        log.info("traces of all ranks: %s/rank-*.json.gz; https://ui.perfetto.dev opens them", folder)


class _Recording:
    """A profile that is being recorded."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.first, self.left, self.begun = first, steps, 0
        self._step: record_function | None = None
        self._phase: record_function | None = None
        self._on_device = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        if self._on_device:
            _memory()._record_memory_history(max_entries=MEMORY_ENTRIES)

    def begin_step(self, step: int) -> None:
        self._end_step()
        self._step = _begun(f"{STEP}{step}")
        self.left -= 1
        self.begun += 1

    def enter(self, phase: str) -> None:
        self._end_phase()
        self._phase = _begun(f"{PHASE}{phase}")

    def stop(self, folder: Path, rank: int) -> dict[str, Any]:
        """Stop recording; return the trace, and write the memory snapshot of a device."""
        self._end_step()
        if self._on_device:
            _memory()._dump_snapshot(str(folder / f"rank-{rank}.memory.pickle"))
            _memory()._record_memory_history(enabled=None)
        self._profile.stop()
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".rank-{rank}-") as scratch:
            file = Path(scratch) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            return json.loads(file.read_bytes())

    def _end_step(self) -> None:
        self._end_phase()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


def _memory() -> Any:
    """Return torch's functions for memory snapshots, which have no public names."""
    return torch.cuda.memory


def _begun(name: str) -> record_function:
    mark = record_function(name)
    mark.__enter__()
    return mark


def _name_rank(trace: dict[str, Any], rank: int) -> None:
    """Name the process of the host's events after the rank, so that the traces of several ranks can be told apart."""
    events: list[Mapping[str, Any]] = trace["traceEvents"]
    processes = {event["pid"] for event in events if event.get("cat") == "user_annotation"}
    for pid in processes:
        name = {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}}
        trace["traceEvents"].append(name)
