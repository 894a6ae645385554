"""A run, put together: where everything that the loop uses is made, in the order in which it must be."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.stream import Stream, open_stream
from parallel.bootstrap import Runtime, leave_at_once, seed_rank
from parallel.collectives import gather_objects, sum_over_ranks
from parallel.engine import Engine, Trainable, build_engine
from parallel.precision import DTYPES
from train.checkpoint.manager import CheckpointManager, Progress
from train.clock import Clock, uptime
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.corruption import check_copies, hashes
from train.disk import check_space
from train.errors import ConfigError
from train.events import EventLog, read_jsonl
from train.exit_codes import FAILED
from train.faults import Faults
from train.flops import count_parameters, measure_matmul_peak
from train.guard import Guard
from train.lease import Holder, Lease
from train.metrics import Metrics
from train.model import GPT, initial_value
from train.optim import build_optimizer
from train.place import Place
from train.run_folder import RunFolder
from train.stop import StopRequest
from train.watchdog import Probe, Watchdog, lost_peer

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
    watchdog: Watchdog
    faults: Faults
    probe: Probe
    guard: Guard
    place: Place
    """Where the run stands as it starts."""
    resumed: bool
    peak_flops: float
    """FLOP per second of a large matrix product on all ranks together."""
    attempt: int
    """Counted from 1 over all starts of the run; told on rank 0 alone."""

    def enter(self, phase: str, step: int) -> None:
        """The loop enters a phase with `step` optimizer steps done."""
        self.clock.enter(phase)
        self.watchdog.beat(phase, step)
        self.faults.strike(phase, step)

    def open_batches(self, data_step: int) -> Iterator[list[Batch]]:
        """This rank's micro batches, a list a step, from a place in the data on."""
        train = self.recipe.train
        return self.stream.steps(
            first_step=data_step,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            rank=self.runtime.data_parallel_rank,
            world_size=self.runtime.data_parallel_size,
        )

    def save(self, place: Place) -> None:
        """Collective."""
        self.enter("save", place.step)
        progress = place.as_progress(guard=self.guard.state())
        self.checkpoints.save(progress, self.engine.state(), self.stream.state(place.data_step))

    def pass_over(self, place: Place, why: str) -> Place:
        """The next batch moves nothing; the place after it."""
        log.warning("the batch after step %d (data step %d) is skipped: %s", place.step, place.data_step, why)
        self.record("skipped", step=place.step, why=why, **self._samples(place))
        return place.after_skip()

    def report_spike(self, place: Place, why: str) -> None:
        log.warning("spike after step %d (data step %d): %s", place.step, place.data_step, why)
        self.record("spike", step=place.step, why=why, **self._samples(place))

    def roll_back(self, place: Place, why: str) -> Place:
        """The place of the newest good checkpoint, from which the present batch will be stepped over. Collective."""
        log.warning("rolling back from step %d (data step %d): %s", place.step, place.data_step, why)
        self.record("rolled_back", step=place.step, why=why, **self._samples(place))
        loaded = resume(self.checkpoints, self.engine, self.stream, self.record)
        if loaded is None:
            return self.pass_over(place, "there is no checkpoint to go back to")
        self.guard.roll_back(loaded.extra["guard"])
        return Place.of(loaded)

    def _samples(self, place: Place) -> dict[str, int]:
        """Which documents are meant: `keepstep data trace` shows them."""
        size = self.recipe.train.global_batch_size
        return {"data_step": place.data_step, "first_sample": place.data_step * size, "samples": size}

    def compare_copies(self) -> None:
        """CorruptionError if ranks that hold copies of the same tensors disagree. Collective."""
        check_copies(gather_objects(hashes(self.engine.copies())))

    def tell_pace(self, spent: Mapping[str, float]) -> None:
        """How fast this rank is at the moment, for the search for slow ones."""
        self.watchdog.note(spent.get("step", 0.0), spent.get("data_wait", 0.0), self.probe.seconds())

    def loss_of_each_source(self, losses_S: list[float], targets_S: list[float]) -> dict[str, float]:
        """Mean loss by source, where there are several."""
        if len(losses_S) == 1:
            return {}
        named = zip(self.stream.source_names, losses_S, targets_S, strict=True)
        return {f"loss/{name}": loss / targets for name, loss, targets in named if targets}


def total(values: Tensor, runtime: Runtime) -> list[float]:
    """Sum over data-parallel ranks of values on the host. Collective."""
    return (sum_over_ranks(values) / runtime.layout.tensor).tolist()  # tensor-parallel peers bring the same values


@contextmanager
def open_run(recipe: Recipe, runtime: Runtime, stop: StopRequest) -> Iterator[Run]:
    """A run that is ready for its next step; closed only if all went well, for closing is collective. Collective."""
    folder = RunFolder.of(recipe)
    is_rank_0 = runtime.world.rank == 0
    lease = Lease(folder.lease, Holder.myself(os.environ), _leave) if is_rank_0 else None
    record = EventLog(folder.events, enabled=is_rank_0)
    watchdog = Watchdog(
        folder.status,
        folder.logs,
        rank=runtime.world.rank,
        world_size=runtime.world.world_size,
        hang_seconds=recipe.train.hang_seconds,
        record=record,
    )
    try:
        run = _build_run(recipe, runtime, stop, record, watchdog)
        yield run
        run.checkpoints.close()
    except BaseException as error:
        watchdog.failed()
        if not lost_peer(error):
            code = getattr(error, "exit_code", FAILED)
            why = str(error) or type(error).__name__
            EventLog(folder.events)("failed", rank=runtime.world.rank, exit_code=code, error=why)
        raise
    watchdog.close()
    run.stream.close()
    run.metrics.close()
    run.engine.close()
    if lease is not None:
        folder.stop_request.unlink(missing_ok=True)
        lease.release()


def _leave(why: str) -> None:
    """Another run has taken the folder: nothing more may be written to it."""
    log.error("%s; leaving", why)
    leave_at_once(FAILED)


def _build_run(recipe: Recipe, runtime: Runtime, stop: StopRequest, record: EventLog, watchdog: Watchdog) -> Run:
    """Everything from the data to the loaded checkpoint. Collective."""
    clock = Clock(already=uptime())
    folder = RunFolder.of(recipe)
    is_rank_0 = runtime.world.rank == 0
    attempt = 1 + sum(event["kind"] == "started" for event in read_jsonl(folder.events))
    record("started", attempt=attempt, world_size=runtime.world.world_size, engine=recipe.parallel.engine)
    faults = Faults(os.environ, runtime.world.rank, folder.checkpoints)
    stream = open_stream(recipe.data, seq_len=recipe.model.seq_len)
    check_fit(recipe, runtime, stream)
    if is_rank_0:
        check_space(recipe, folder.checkpoints)
        folder.recipe.write_text(recipe_as_yaml(recipe), encoding="utf-8")
    announce(recipe, runtime, stream)

    seed_rank(recipe.train.seed, runtime, 0)
    trainable = Trainable(
        build=partial(GPT, recipe.model),
        initial_value=partial(initial_value, config=recipe.model, seed=recipe.train.seed),
        optimizer=partial(build_optimizer, config=recipe.optim),
    )
    engine = build_engine(recipe.parallel, runtime, trainable)
    faults.arm(engine)
    identity = {"model": recipe.model.model_dump(mode="json"), "data": stream.fingerprint}
    checkpoints = CheckpointManager(
        folder.checkpoints,
        recipe.checkpoint,
        identity,
        record,
        layout={"engine": recipe.parallel.engine, **asdict(runtime.layout)},
        timeout_seconds=recipe.parallel.timeout_seconds,
    )
    loaded = resume(checkpoints, engine, stream, record)
    place = Place() if loaded is None else Place.of(loaded)
    metrics = Metrics(
        folder.metrics,
        folder.tensorboard,
        first_step=place.step + 1,
        total_steps=recipe.train.steps,
        log_every=recipe.train.log_every,
        enabled=is_rank_0,
    )
    peak = torch.tensor(measure_matmul_peak(runtime.device, DTYPES[recipe.parallel.precision])).double()
    return Run(
        recipe,
        runtime,
        stream,
        engine,
        checkpoints,
        metrics,
        record,
        stop,
        clock,
        watchdog,
        faults,
        Probe(runtime.device),
        Guard(recipe.guard, None if loaded is None else loaded.extra["guard"]),
        place,
        resumed=loaded is not None,
        peak_flops=sum_over_ranks(peak).item(),
        attempt=attempt,
    )


def resume(checkpoints: CheckpointManager, engine: Engine, stream: Stream, record: EventLog) -> Progress | None:
    """Set engine and stream to the newest good checkpoint, and say how far it is; None if there is none. Collective."""
    started = time.perf_counter()
    loaded = checkpoints.load_newest(engine.state())
    if loaded is None:
        return None
    engine.loaded()
    stream.restore(loaded.rank_states)
    progress = loaded.progress
    seconds = time.perf_counter() - started
    log.info("resumed from step %d (%d tokens) in %.1f s", progress.step, progress.tokens, seconds)
    record("resumed", step=progress.step, tokens=progress.tokens, took_seconds=round(seconds, 3))
    return progress


def check_fit(recipe: Recipe, runtime: Runtime, stream: Stream) -> None:
    """What can only be known with the data and the world at hand. ConfigError."""
    if stream.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size ({recipe.model.vocab_size}) must be at least the tokenizer's size "
            f"({stream.vocab_size}); set model.vocab_size={-(-stream.vocab_size // 64) * 64}"
        )
    recipe.grad_accum_steps(runtime.data_parallel_size)


def announce(recipe: Recipe, runtime: Runtime, stream: Stream) -> None:
    """What is about to be trained, in three lines."""
    train, model = recipe.train, recipe.model
    accumulation = recipe.grad_accum_steps(runtime.data_parallel_size)
    log.info("run folder %s", RunFolder.of(recipe).root)
    log.info(
        "%d parameters, vocabulary %d (tokenizer %d), %s over %d ranks (%d data-parallel) on %s in %s",
        count_parameters(model),
        model.vocab_size,
        stream.vocab_size,
        recipe.parallel.engine,
        runtime.world.world_size,
        runtime.data_parallel_size,
        runtime.device.type,
        recipe.parallel.precision,
    )
    log.info(
        "%d sequences x %d = %d tokens a step: %d ranks x %d micro batches of %d",
        train.global_batch_size,
        model.seq_len,
        train.global_batch_size * model.seq_len,
        runtime.data_parallel_size,
        accumulation,
        train.micro_batch_size,
    )
