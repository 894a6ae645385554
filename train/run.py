"""A run: all that the loop uses, and what it does besides computing steps. `train/start.py` puts it together."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import xxhash
from torch import Tensor

from data_pipeline.stream.batch import Batch
from data_pipeline.stream.stream import Stream
from parallel.bootstrap import Runtime
from parallel.collectives import gather_objects, sum_over_ranks
from parallel.engine import Engine
from train.checkpoint.manager import CheckpointManager, SavedProgress, SavingFailedError
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.health.guard import Guard
from train.health.injected_faults import Faults
from train.health.replicas import check_replicas, hashes
from train.health.stop import StopRequest
from train.health.watchdog import Probe, Watchdog
from train.records.clock import Clock
from train.records.compilation import Compiling
from train.records.events import EventLog, read_jsonl
from train.records.goodput import unsettled
from train.records.metrics import Metrics
from train.records.progress import Progress
from train.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    recipe: Recipe
    runtime: Runtime
    stream: Stream
    engine: Engine
    checkpoints: CheckpointManager
    metrics: Metrics
    record: EventLog
    stop: StopRequest
    clock: Clock
    """What metrics.jsonl tells."""
    ledger: Clock
    """The same seconds as events.jsonl tells them, which come more rarely."""
    watchdog: Watchdog
    faults: Faults
    probe: Probe
    guard: Guard
    compiling: Compiling
    progress: Progress
    """Where the run stands as it starts."""
    peak_flops: float
    """FLOP per second of a large matrix product on all ranks together."""
    attempt: int
    """Counted from 1 over all starts of the run; told on rank 0 alone."""

    def enter(self, phase: str, step: int) -> None:
        """The loop enters a phase with `step` optimizer steps done."""
        self.clock.enter(phase)
        self.ledger.enter(phase)
        self.watchdog.beat(phase, step)
        self.faults.strike(phase, step)
        if phase in ("compile", "forward"):
            self.compiling.begin()

    def open_batches(self, data_step: int) -> Iterator[list[Batch]]:
        """This rank's micro batches, a list a step, from a progress in the data on."""
        train = self.recipe.train
        return self.stream.steps(
            first_step=data_step,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            rank=self.runtime.data_parallel_rank,
            world_size=self.runtime.data_parallel_size,
        )

    def share_quarantine(self, progress: Progress) -> Iterator[list[Batch]]:
        """All ranks replace the blocks that any of them cannot read, from this batch on. Collective."""
        self.stream.restore(gather_objects(self.stream.state(progress.data_step)))
        self.record("blocks_quarantined", data_step=progress.data_step)
        return self.open_batches(progress.data_step)

    def save(self, progress: Progress, local: bool = False) -> None:
        """Behind the steps, to the shared tier or the local one. Collective. CorruptionError if copies differ of what
        would be saved: what is loaded later is alike everywhere, and nobody could tell any more."""
        self.enter("save", progress.step)
        if self.recipe.guard.compare_replicas_every:
            self.compare_replicas()
        nameless = self.recipe.model_copy(update={"name": "", "runs_dir": ""})
        recipe = xxhash.xxh3_64_hexdigest(recipe_as_yaml(nameless).encode())
        saved = progress.as_saved(guard=self.guard.state(), recipe_xxh3=recipe)
        self.checkpoints.save(saved, self.engine.state(), self.stream.state(progress.data_step), local=local)
        self.book(progress)

    def book(self, progress: Progress) -> None:
        """The seconds by kind since the entry before, into events.jsonl."""
        self.record("booked", step=progress.step, seconds=self.ledger.take())

    def ensure_saved(self, progress: Progress) -> None:
        """Return only when there is a complete checkpoint of this progress. Collective. SavingFailedError."""
        self.enter("save", progress.step)
        self.checkpoints.wait()
        if self.checkpoints.saved_step != progress.step:
            self.save(progress)
            self.checkpoints.wait()
        if self.checkpoints.saved_step != progress.step:
            raise SavingFailedError(
                f"the last checkpoint (step {progress.step}) could not be saved; mend what events.jsonl names, and the "
                "same command goes on from the one before"
            )

    def skip_batch(self, progress: Progress, why: str) -> Progress:
        """The next batch moves nothing; the progress after it."""
        log.warning("the batch after step %d (data step %d) is skipped: %s", progress.step, progress.data_step, why)
        self.record("skipped", step=progress.step, why=why, **self._samples(progress))
        return progress.after_skip()

    def report_spike(self, progress: Progress, why: str) -> None:
        log.warning("spike after step %d (data step %d): %s", progress.step, progress.data_step, why)
        self.record("spike", step=progress.step, why=why, **self._samples(progress))

    def roll_back(self, progress: Progress, why: str) -> Progress:
        """The progress of the newest good checkpoint, from which the present batch will be stepped over. Collective."""
        log.warning("rolling back from step %d (data step %d): %s", progress.step, progress.data_step, why)
        self.record("rolled_back", step=progress.step, why=why, **self._samples(progress))
        loaded = resume(self.checkpoints, self.engine, self.stream, self.record)
        if loaded is None:
            return self.skip_batch(progress, "there is no checkpoint to go back to")
        self.guard.roll_back(loaded.extra["guard"])
        self.book(progress)
        settle(self.recipe, self.runtime, self.record, loaded.step)
        return Progress.of(loaded)

    def _samples(self, progress: Progress) -> dict[str, int]:
        """Which documents are meant: `keepstep data trace` shows them."""
        size = self.recipe.train.global_batch_size
        return {"data_step": progress.data_step, "first_sample": progress.data_step * size, "samples": size}

    def report_compiling(self, progress: Progress, seconds: float) -> None:
        """Of a step that took so long."""
        why = self.compiling.report(progress.step, seconds)
        if why:
            self.record("compiled_again", step=progress.step, why=why, took_seconds=round(seconds, 3))

    def compare_replicas(self) -> None:
        """CorruptionError if ranks that hold copies of the same tensors disagree. Collective."""
        check_replicas(gather_objects(hashes(self.engine.replicated_tensors())))

    def report_pace(self, spent: Mapping[str, float]) -> None:
        """How fast this rank is at the moment, for the search for slow ones."""
        self.watchdog.note(spent.get("step", 0.0), spent.get("data_wait", 0.0), self.probe.seconds())

    def loss_of_each_source(self, losses: "Losses") -> dict[str, float]:
        """Mean loss by source, where there are several."""
        if len(losses.targets_S) == 1:
            return {}
        named = zip(self.stream.source_names, losses.by_source, losses.targets_S, strict=True)
        return {f"loss/{name}": loss / targets for name, loss, targets in named if targets}


class Losses:
    """A step's summed losses and targets by source. The losses are still being computed: who asks first waits for the
    device, and for the other ranks. Collective."""

    def __init__(self, loss_S: Tensor, targets_S: list[float], runtime: Runtime) -> None:
        self.targets_S = targets_S
        self._loss_S, self._runtime = loss_S, runtime

    @cached_property
    def by_source(self) -> list[float]:
        return total(self._loss_S, self._runtime)

    @property
    def mean(self) -> float:
        return sum(self.by_source) / sum(self.targets_S)


def total(values: Tensor, runtime: Runtime) -> list[float]:
    """Sum over data-parallel ranks, on the host. Collective."""
    summed = sum_over_ranks(values.double().cpu())
    return (summed / runtime.layout.tensor).tolist()  # tensor-parallel peers bring the same values


def settle(recipe: Recipe, runtime: Runtime, record: EventLog, step: int) -> None:
    """Book what is only known as the run goes on from `step`: work that was lost, and time that nobody was there."""
    if runtime.world.rank == 0:
        folder = RunFolder.of(recipe)
        left = unsettled(list(read_jsonl(folder.events)), read_jsonl(folder.metrics), step)
        record("settled", step=step, seconds=left)


def resume(checkpoints: CheckpointManager, engine: Engine, stream: Stream, record: EventLog) -> SavedProgress | None:
    """Set engine and stream to the newest good checkpoint, and say how far it is; None if there is none. Collective."""
    started = time.perf_counter()
    loaded = checkpoints.load_newest(engine.state())
    if loaded is None:
        return None
    engine.refresh_working_weights()
    stream.restore(loaded.rank_states)
    progress = loaded.progress
    seconds = time.perf_counter() - started
    log.info("resumed from step %d (%d tokens) in %.1f s", progress.step, progress.tokens, seconds)
    record("resumed", step=progress.step, tokens=progress.tokens, took_seconds=round(seconds, 3))
    return progress
