"""Saves a run's state, and finds and loads the newest good checkpoint.

    manager = CheckpointManager(run / "checkpoints", recipe.checkpoint, identity, events.record, layout=layout)
    loaded = manager.load_newest(engine.state())
    ...
    manager.save(SavedProgress(step, tokens), engine.state(), stream.state(step))   # returns after a copy
    manager.poll()                                                             # every step
    manager.wait()                                                             # before leaving

A save: rank 0 makes a fresh place; every rank writes its shard there; rank 0 gathers what was written, writes the
manifest and commits. All of it runs in a thread, on a process group of its own. A failure on any rank fails the save on
all, and the checkpoints before it stay.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.engine import CheckpointTensor
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.group import Group
from train.checkpoint.load import load_newest
from train.checkpoint.retention import steps_to_delete
from train.checkpoint.saved_state import Loaded, SavedProgress, Wanted, plain_names
from train.checkpoint.stores.open import open_root
from train.config import CheckpointConfig
from train.errors import CheckpointError
from train.exit_codes import FAILED

if TYPE_CHECKING:
    from train.checkpoint.local_tier import LocalTier
    from train.checkpoint.save import Job, Saver

__all__ = ["CheckpointManager", "Loaded", "SavedProgress", "SavingFailedError"]

log = logging.getLogger(__name__)


class SavingFailedError(CheckpointError):
    """Several saves in a row failed: going on would risk too much work. Another try may find the disk mended."""

    exit_code = FAILED


@dataclass(frozen=True)
class Saved:
    """What a finished save reports."""

    tier: str
    bytes: int
    seconds: float
    removed: list[int] = field(default_factory=list)


class CheckpointManager:
    """Collective to construct. `identity` must match at load; `layout` says whether random states fit; `alive` is
    called by this rank as it reads and writes."""

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        identity: Mapping[str, Any],
        record: Callable[..., None],
        *,
        layout: Mapping[str, Any] | None = None,
        allow: frozenset[str] = frozenset(),
        timeout_seconds: float = 600.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = open_root(folder)
        self._config = config
        self._identity = json.loads(json.dumps(identity))
        self._layout = json.loads(json.dumps(layout or {}))
        self._allow = allow
        self._group = Group(timeout_seconds, alive)
        self._record = record if self._group.rank == 0 else _ignore
        self._tier = self._open_tier(Path(config.local_dir), str(folder)) if config.local_dir is not None else None
        self._saver: Saver | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, float, Future[Saved]] | None = None
        self._failures = 0
        self.saved_step: int | None = None
        """Step of the newest checkpoint known to be complete on the shared tier."""
        self._losses: dict[int, float | None] = {}

    @property
    def staging_bytes(self) -> int:
        """Host memory held for background saves."""
        return self._saver.staging_bytes if self._saver is not None else 0

    def save(
        self,
        progress: SavedProgress,
        state: Mapping[str, CheckpointTensor],
        rank_state: Mapping[str, Any],
        *,
        local: bool = False,
    ) -> None:
        """Save in the background; returns when the state may change again. Collective.

        `rank_state` is JSON of this rank. `local`: to `checkpoint.local_dir` of this node and of a peer. A failure
        shows at `poll` or `wait`."""
        self.wait()
        began = time.perf_counter()
        state = plain_names(state)
        if not state:
            raise CheckpointError("the engine has no state to save")
        if self._saver is None:
            from train.checkpoint.save import Saver

            self._saver = Saver(self._group, self._identity, self._layout, self._config.background)
        job = self._saver.stage(progress, state, rank_state)
        saved = self._thread.submit(self._write, self._saver, job, local)
        self._saving = (progress.step, time.perf_counter() - began, saved)
        if not self._config.background:
            self.wait()

    def poll(self) -> None:
        """See whether the save in the background has ended. Cheap, not collective.

        SavingFailedError after `checkpoint.max_failures` failures in a row."""
        if self._saving is not None and self._saving[2].done():
            self._collect()

    def wait(self) -> None:
        """Until the last save is committed or has failed. Collective."""
        if self._saving is not None:
            self._collect()

    def close(self) -> None:
        """Wait for the last save and end the thread. Collective."""
        self.wait()
        self._thread.shutdown()

    def load_newest(self, state: Mapping[str, CheckpointTensor]) -> Loaded | None:
        """Fill the tensors in place from the newest good checkpoint; None if there never was one. Collective.

        Damaged ones are moved aside. CheckpointError if only damaged ones are left, or if the checkpoint is of another
        run: another identity, other tensors."""
        self.wait()
        wanted = Wanted(plain_names(state), self._identity, self._layout, self._allow, self._record)
        load_local = partial(self._tier.load, wanted) if self._tier is not None else lambda _: None
        loaded = load_newest(self._root, self._group, wanted, load_local)
        self.saved_step = loaded.progress.step if loaded is not None and self._tier is None else None
        return loaded

    def _open_tier(self, place: Path, run: str) -> "LocalTier":
        from train.checkpoint.local_tier import LocalTier

        return LocalTier(place, run, self._group)

    def _write(self, saver: "Saver", job: "Job", local: bool) -> Saved:
        """Everything after the copy. Collective; runs in the thread."""
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
        """Remove what retention does not keep. Never fails a save that is already committed."""
        try:
            steps = self._root.steps()
            if self._config.keep_best:
                for step in set(steps) - set(self._losses):
                    self._losses[step] = read_manifest(self._root.folder(step))[0].validation_loss
            removed = steps_to_delete({step: self._losses.get(step) for step in steps}, self._config)
            for step in removed:
                self._root.remove(step)
            self._root.sweep()
        except Exception as error:  # an object store may raise anything
            log.warning("old checkpoints could not be removed: %s", error)
            return []
        return removed

    def _collect(self) -> None:
        """Take the outcome of the save in the background, waiting for it if need be."""
        assert self._saving is not None
        (step, stall, future), self._saving = self._saving, None
        try:
            saved = future.result()
        except Exception as error:
            self._failures += 1
            self._record("save_failed", step=step, error=str(error), in_a_row=self._failures)
            log.error("checkpoint of step %d failed: %s", step, error)
            if self._failures >= self._config.max_failures:
                failures = f"checkpoint.max_failures ({self._failures}) saves in a row failed"
                raise SavingFailedError(f"{failures}, the last at step {step}: {error}") from error
            return
        self._failures = 0
        if saved.tier == "shared":
            self.saved_step = step
        self._record("saved", step=step, stall_seconds=stall, **asdict(saved))


def _ignore(*_: Any, **__: Any) -> None:
    """Only rank 0 records events."""
