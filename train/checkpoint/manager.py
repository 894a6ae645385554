"""Saves a run's state, and finds and loads the newest good checkpoint.

    manager = CheckpointManager(run / "checkpoints", recipe.checkpoint, identity, events.record, layout=layout)
    loaded = manager.load_newest(engine.state())
    ...
    manager.save(SavedProgress(step, tokens), engine.state(), stream.state(step))   # returns after a copy
    manager.poll()                                                                  # every step
    manager.wait()                                                                  # before the process ends

To save, rank 0 begins an attempt, every rank writes its shard to it, and rank 0 gathers what was written, writes the
manifest and commits. All of this runs in a thread, on a process group of its own. If any rank fails, the save fails on
all ranks and the older checkpoints stay.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.config import expand_path
from parallel.engine import CheckpointTensor
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.group import Group
from train.checkpoint.load import load_newest
from train.checkpoint.retention import steps_to_delete
from train.checkpoint.saved_state import About, Loaded, LoadRequest, SavedProgress, plain_names
from train.checkpoint.stores.open import open_root
from train.config import CheckpointConfig
from train.errors import CheckpointError, ConfigError
from train.exit_codes import FAILED

if TYPE_CHECKING:
    from train.checkpoint.local_tier import LocalTier
    from train.checkpoint.save import Job, Saver

__all__ = ["CheckpointManager", "Loaded", "SavedProgress", "SavingFailedError"]

log = logging.getLogger(__name__)


class SavingFailedError(CheckpointError):
    """Too many saves in a row failed, so to continue would risk too much work. A restart may find the disk repaired."""

    exit_code = FAILED


@dataclass(frozen=True)
class Saved:
    """What a finished save reports in its event."""

    tier: str
    """`shared` or `local`."""
    bytes: int
    """Bytes of the tensors."""
    seconds: float
    """Time from the end of staging to the commit."""
    removed: list[int] = field(default_factory=list)
    """Steps whose checkpoints retention removed."""


@dataclass(frozen=True)
class PendingSave:
    """A save that is being written."""

    step: int
    stall_seconds: float
    """Time for which the save stopped the steps."""
    saved: Future[Saved]
    tier: str
    """`shared` or `local`."""


class CheckpointManager:
    """The checkpoints of one run. Collective to construct.

    A checkpoint loads only if its `identity` equals this one, except for the facts named in `allow`. The manifest
    records `layout` and `recipe`. `attachments` are the files of the data set's tokenizer, by plain name, which each
    checkpoint of the shared tier carries. `alive` is called on this rank after each block that it reads or writes."""

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        identity: Mapping[str, Any],
        record: Callable[..., None],
        *,
        layout: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        allow: frozenset[str] = frozenset(),
        timeout_seconds: float = 600.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = open_root(folder)
        self._config = config
        self._about = About(*json.loads(json.dumps([identity, layout or {}, recipe])), attachments=attachments or {})
        self._allow = allow
        self._group = Group(timeout_seconds, alive)
        self._record = record if self._group.rank == 0 else _ignore
        self._tier = self._open_tier(config.local_dir, str(folder)) if config.local_dir is not None else None
        self._saver: Saver | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: PendingSave | None = None
        self._failures = {"shared": 0, "local": 0}
        self.saved_step: int | None = None
        """Step of the newest checkpoint known to be complete on the shared tier."""
        self._losses: dict[int, float | None] = {}

    @property
    def staging_bytes(self) -> int:
        """Host memory used by background saves, in bytes."""
        return self._saver.staging_bytes if self._saver is not None else 0

    def save(
        self,
        progress: SavedProgress,
        state: Mapping[str, CheckpointTensor],
        rank_state: Mapping[str, Any],
        *,
        local: bool = False,
    ) -> None:
        """Begin a save; returns when the state may change again. Collective.

        `rank_state` is JSON of this rank. With `local`, the save goes to `checkpoint.local_dir` of this node and of a
        peer node. `poll` and `wait` report a failure."""
        self.wait()
        began = time.perf_counter()
        state = plain_names(state)
        if not state:
            raise CheckpointError("the engine has no state to save")
        saver = self._open_saver()
        job = saver.stage(progress, state, rank_state)
        saved = self._thread.submit(self._write, saver, job, local)
        self._pending = PendingSave(progress.step, time.perf_counter() - began, saved, "local" if local else "shared")
        if not self._config.background:
            self.wait()

    def prepare(self, state: Mapping[str, CheckpointTensor]) -> None:
        """Allocate what the first save would allocate while the steps wait. Pinning takes seconds. Collective."""
        self._open_saver().prepare(plain_names(state))

    def _open_saver(self) -> "Saver":
        if self._saver is None:
            from train.checkpoint.save import Saver

            self._saver = Saver(self._group, self._about, self._config.background)
        return self._saver

    def poll(self) -> None:
        """Record the outcome of the background save if it has ended. Cheap, not collective.

        SavingFailedError after `checkpoint.max_failures` failures of the shared tier in a row."""
        if self._pending is not None and self._pending.saved.done():
            self._collect()

    def wait(self) -> None:
        """Wait until the last save is committed or has failed. Collective. Raises what `poll` raises."""
        if self._pending is not None:
            self._collect()

    def close(self) -> None:
        """Wait for the last save and end the thread. Collective."""
        self.wait()
        self._thread.shutdown()

    def load_newest(self, state: Mapping[str, CheckpointTensor]) -> Loaded | None:
        """Fill the tensors in place from the newest good checkpoint; None if there never was one. Collective.

        Damaged checkpoints are quarantined. CheckpointError if only damaged ones are left, or if the checkpoint
        belongs to another run (another identity or other tensors)."""
        self.wait()
        request = LoadRequest(plain_names(state), self._about.identity, self._allow, self._record)
        loaded = load_newest(self._root, self._group, request, self._tier)
        self.saved_step = loaded.progress.step if loaded is not None and self._tier is None else None
        return loaded

    def _open_tier(self, node_dir: str, run: str) -> "LocalTier":
        from train.checkpoint.local_tier import LocalTier

        try:
            path = Path(expand_path(node_dir))
        except ValueError as error:
            raise ConfigError(f"checkpoint.local_dir: {error}") from None
        return LocalTier(path, run, self._group)

    def _write(self, saver: "Saver", job: "Job", local: bool) -> Saved:
        """Everything after staging. Runs in the thread. Collective."""
        began = time.perf_counter()
        if local:
            assert self._tier is not None
            size = self._tier.save(job)
            return Saved("local", size, time.perf_counter() - began)
        size = saver.write_shared(job, self._root)
        self._losses[job.progress.step] = job.progress.validation_loss
        removed = self._prune() if self._group.rank == 0 else []
        return Saved("shared", size, time.perf_counter() - began, removed)

    def _prune(self) -> list[int]:
        """Remove what retention does not keep; returns the steps. Never fails a save that is already committed."""
        try:
            steps = self._root.steps()
            if self._config.keep_best:
                for step in set(steps) - set(self._losses):
                    self._losses[step] = read_manifest(self._root.folder(step))[0].validation_loss
            removed = steps_to_delete({step: self._losses.get(step) for step in steps}, self._config)
            for step in removed:
                self._root.remove(step)
            self._root.sweep()
        except Exception as error:  # object stores raise errors of many types
            log.warning("old checkpoints could not be removed: %s", error)
            return []
        return removed

    def _collect(self) -> None:
        """Wait for the background save and record its outcome."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            saved = pending.saved.result()
        except Exception as error:
            self._failures[pending.tier] += 1
            in_a_row = self._failures[pending.tier]
            self._record("save_failed", step=pending.step, tier=pending.tier, error=str(error), in_a_row=in_a_row)
            log.error("the checkpoint of step %d failed (%s tier): %s", pending.step, pending.tier, error)
            # A full fast tier never ends a run: the shared tier may be fine, and its checkpoints are enough.
            if pending.tier == "shared" and in_a_row >= self._config.max_failures:
                failures = f"checkpoint.max_failures ({in_a_row}) saves in a row failed"
                raise SavingFailedError(f"{failures}, the last at step {pending.step}: {error}") from error
            return
        self._failures[pending.tier] = 0
        if saved.tier == "shared":
            self.saved_step = pending.step
        self._record("saved", step=pending.step, stall_seconds=pending.stall_seconds, **asdict(saved))


def _ignore(*_: Any, **__: Any) -> None:
    """Discard an event: only rank 0 records events."""
