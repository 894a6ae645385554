"""A run: the objects that the loop uses, and its actions besides computing steps. `train/start.py` builds it."""

import logging
from dataclasses import dataclass, replace

import xxhash

from data_pipeline.atomic_file import write_atomic
from data_pipeline.batch_sizes import value_at
from data_pipeline.stream.stream import Stream
from parallel.bootstrap import Runtime
from parallel.collectives import gather_objects
from parallel.engine import Engine
from train.checkpoint.manager import CheckpointManager, SavingFailedError
from train.config import Recipe
from train.config_file import recipe_as_yaml, resolved_recipe
from train.exchange import Exchange, StepLosses, word_of_rank_0
from train.health.guard import Guard
from train.health.injected_faults import FaultInjector
from train.health.replicas import compare_replicas
from train.health.stop import StopRequest
from train.health.watchdog import Probe, Watchdog
from train.model.attention import AttentionChoice
from train.model.flops import flops_per_token
from train.model.gpt import metric_names
from train.profiling.profiler import Profiler
from train.records import device_readings
from train.records.clock import Clock, Lap, uptime
from train.records.compilation import CompilationMonitor
from train.records.device_readings import MEMORY
from train.records.events import EventLog
from train.records.metrics import Metrics, Speed, step_record
from train.records.progress import Progress
from train.resume import resume
from train.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt of a training run on this rank."""

    recipe: Recipe
    runtime: Runtime
    stream: Stream
    engine: Engine
    checkpoints: CheckpointManager
    metrics: Metrics
    record: EventLog
    stop: StopRequest
    clock: Clock
    step_lap: Lap
    """Seconds since the last record of metrics.jsonl."""
    entry_lap: Lap
    """Seconds since the last entry of events.jsonl (`train.records.goodput`)."""
    watchdog: Watchdog
    faults: FaultInjector
    probe: Probe
    guard: Guard
    compilation: CompilationMonitor
    profiler: Profiler
    speed: Speed
    attention: AttentionChoice
    resumed_at: Progress
    """Progress at the start of this attempt."""
    attempt: int
    """Number of this start among all starts of the run, counted from 1; valid on rank 0."""
    ends_at_uptime: float
    """Seconds of this process at which `train.max_seconds` is used up; infinite without it, and on other ranks."""

    @property
    def is_time_up(self) -> bool:
        """Whether this rank knows that `train.max_seconds` is used up. Only rank 0 knows."""
        return uptime() > self.ends_at_uptime

    def enter(self, phase: str, step: int) -> None:
        """Report that the loop enters a phase with `step` optimizer steps finished."""
        if phase == "forward":
            self.compilation.begin()
        self.clock.enter("compile" if phase == "forward" and self.compilation.expected else phase)
        self.watchdog.enter_phase(phase, step)
        self.profiler.enter(phase)
        self.faults.inject(phase, step)

    def open_batches(self, data_step: int) -> Exchange:
        """Return this rank's micro batches, step by step, from a global batch on."""
        train = self.recipe.train
        batches = self.stream.steps(
            first_step=data_step,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            rank=self.runtime.data_parallel_rank,
            world_size=self.runtime.data_parallel_size,
            batch_changes=self.recipe.batch_changes,
            seq_lens=self.recipe.seq_lens,
        )
        return Exchange(batches, self._flags, self.runtime, len(self.recipe.data.sources))

    def _flags(self) -> tuple[bool, bool, int]:
        """Return what this rank must tell the others before a step (`train.exchange.Agreement`)."""
        word = word_of_rank_0(self.is_time_up, self.profiler.asked_steps())
        return self.stream.has_new_quarantine, bool(self.stop), word

    def profile(self, progress: Progress, asked_steps: int) -> None:
        """End or begin a profile where that is due, and mark the next step in it. Call between two steps."""
        step = progress.step + 1
        if self.profiler.changes_before(step, asked_steps):
            self.enter("profile", progress.step)
            self.profiler.change_before(step, asked_steps)
        self.profiler.begin_step(step)

    def keep_recipe(self) -> None:
        """Write the recipe to the run folder on rank 0. Call when all checks of this start have passed."""
        if self.runtime.world.rank == 0:
            write_atomic(RunFolder.of(self.recipe).recipe, resolved_recipe(self.recipe))

    def share_quarantine(self, progress: Progress) -> Exchange:
        """Make all ranks replace the blocks that any rank cannot read; return the batches from here on. Collective."""
        self.stream.restore(gather_objects(self.stream.state(progress.data_step)))
        self.record("blocks_quarantined", data_step=progress.data_step)
        return self.open_batches(progress.data_step)

    def log_step(self, progress: Progress, losses: StepLosses, lr: float, grad_norm: float) -> None:
        """Write the metrics of the finished step. Every `log_every` steps, report this rank's speed to the watchdog."""
        seconds = self.step_lap.take()
        step_seconds = sum(seconds.get(kind, 0.0) for kind in ("data_wait", "compile", "step"))
        if why := self.compilation.report(progress.step, step_seconds):
            self.record("compiled_again", step=progress.step, why=why, took_seconds=round(step_seconds, 3))
        speeds = self._speed_of(progress).of_step(step_seconds)
        record = step_record(progress, losses.mean, lr, grad_norm, seconds, speeds)
        record |= self.watchdog.readings({MEMORY: record[MEMORY]})
        record |= losses.by_source(self.stream.source_names) | losses.metrics(metric_names(self.recipe.model))
        self.metrics.write_step(progress.step, record | {"attempt": self.attempt}, step_seconds)
        if progress.step == self.resumed_at.step + 1:
            self.book(progress)
        if progress.step % self.recipe.train.log_every == 0:
            pace = seconds.get("step", 0.0), seconds.get("data_wait", 0.0), self.probe.seconds()
            self.watchdog.report_pace(*pace, readings=device_readings.read())

    def save(self, progress: Progress, local: bool = False) -> None:
        """Start a save in the background, to the shared tier or the local one. Collective.

        Replicas are compared first (CorruptionError): a load gives all ranks the same values, which would hide the
        difference for ever."""
        self.enter("save", progress.step)
        if self.recipe.guard.compare_replicas_every:
            self.compare_replicas()
        nameless = self.recipe.model_copy(update={"name": "", "runs_dir": ""})
        recipe = xxhash.xxh3_64_hexdigest(recipe_as_yaml(nameless).encode())
        saved = progress.as_saved(guard=self.guard.state(), recipe_xxh3=recipe, attention=self.attention.form)
        self.checkpoints.save(saved, self.engine.state(), self.stream.state(progress.data_step), local=local)
        self.book(progress)

    def ensure_saved(self, progress: Progress) -> None:
        """Return once a complete checkpoint of this progress exists. Collective. Raises SavingFailedError."""
        self.enter("save", progress.step)
        self.checkpoints.wait()
        if self.checkpoints.saved_step != progress.step:
            self.save(progress)
            self.checkpoints.wait()
        if self.checkpoints.saved_step != progress.step:
            raise SavingFailedError(
                f"the last checkpoint (step {progress.step}) could not be saved; fix the cause given in events.jsonl, "
                "and run the same command: it resumes from the checkpoint before"
            )

    def book(self, progress: Progress) -> None:
        """Write the seconds by kind since the last entry to events.jsonl."""
        self.record("booked", step=progress.step, seconds=self.entry_lap.take())

    def skip_batch(self, progress: Progress, why: str) -> Progress:
        """Skip the next batch, so that it changes no weights; return the progress after it."""
        log.warning("the batch after step %d (data step %d) is skipped: %s", progress.step, progress.data_step, why)
        self.record("skipped", step=progress.step, why=why, **self._samples(progress))
        return progress.after_skip()

    def report_spike(self, progress: Progress, why: str) -> None:
        """Record a loss spike that the recipe only reports, or a gradient of zeros."""
        log.warning("bad step after step %d (data step %d): %s", progress.step, progress.data_step, why)
        self.record("spike", step=progress.step, why=why, **self._samples(progress))

    def roll_back(self, progress: Progress, why: str) -> Progress:
        """Load the newest good checkpoint; the guard will skip the present batch. Return its progress. Collective."""
        log.warning("rolling back from step %d (data step %d): %s", progress.step, progress.data_step, why)
        self.book(progress)
        self.record("rolled_back", step=progress.step, why=why, **self._samples(progress))
        saved = resume(self.checkpoints, self.engine, self.stream, self.record)
        if saved is None:
            return self.skip_batch(progress, "there is no checkpoint to roll back to")
        self.guard.roll_back(saved.extra["guard"])
        return Progress.of(saved)

    def compare_replicas(self) -> None:
        """Raise CorruptionError if ranks that hold replicas of the same tensors disagree. Collective."""
        compare_replicas(self.engine.replicated_tensors(), self.runtime.device)

    def tokens_of(self, data_step: int) -> int:
        """Return the tokens of a global batch."""
        return self._batch_size(data_step) * self.recipe.model.seq_len

    def _batch_size(self, data_step: int) -> int:
        return self.stream.first_sample(data_step + 1) - self.stream.first_sample(data_step)

    def _speed_of(self, progress: Progress) -> Speed:
        """Return what turns the seconds of the step that was just finished into speeds."""
        recipe, data_step = self.recipe, progress.data_step - 1
        seq_len = value_at(((0, recipe.model.seq_len), *recipe.seq_lens), data_step)
        if seq_len == recipe.model.seq_len:
            return replace(self.speed, tokens_per_step=self.tokens_of(data_step))
        flops = flops_per_token(recipe.model.model_copy(update={"seq_len": seq_len}))
        return replace(self.speed, tokens_per_step=self.tokens_of(data_step), flops_per_token=flops)

    def _samples(self, progress: Progress) -> dict[str, int]:
        """Return which samples the next batch holds; `keepstep data trace` shows their documents."""
        first = self.stream.first_sample(progress.data_step)
        return {
            "data_step": progress.data_step,
            "first_sample": first,
            "samples": self._batch_size(progress.data_step),
        }
