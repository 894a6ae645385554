"""A run, put together: where everything that the loop uses is made, in the order in which it must be."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.stream import Stream, open_stream
from parallel.bootstrap import Runtime, seed_rank
from parallel.collectives import sum_over_ranks
from parallel.engine import Engine, Trainable, build_engine
from parallel.precision import DTYPES
from train.checkpoint.manager import CheckpointManager
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.errors import ConfigError
from train.events import EventLog
from train.flops import count_parameters, measure_matmul_peak
from train.metrics import Metrics
from train.model import GPT, initial_value
from train.optim import build_optimizer
from train.place import Place
from train.run_folder import RunFolder
from train.stop import StopRequest

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
    place: Place
    """Where the run stands as it starts."""
    resumed: bool
    peak_flops: float
    """FLOP per second of a large matrix product on all ranks together."""

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
        self.checkpoints.save(place.as_progress(), self.engine.state(), self.stream.state(place.data_step))

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
    run = _build_run(recipe, runtime, stop)
    yield run
    run.checkpoints.close()
    run.stream.close()
    run.metrics.close()
    run.engine.close()


def _build_run(recipe: Recipe, runtime: Runtime, stop: StopRequest) -> Run:
    """Everything from the data to the loaded checkpoint. Collective."""
    folder = RunFolder.of(recipe)
    is_rank_0 = runtime.world.rank == 0
    record = EventLog(folder.events, enabled=is_rank_0)
    stream = open_stream(recipe.data, seq_len=recipe.model.seq_len)
    check_fit(recipe, runtime, stream)
    if is_rank_0:
        folder.recipe.write_text(recipe_as_yaml(recipe), encoding="utf-8")
    record("started", world_size=runtime.world.world_size, engine=recipe.parallel.engine)
    announce(recipe, runtime, stream)

    seed_rank(recipe.train.seed, runtime, 0)
    trainable = Trainable(
        build=partial(GPT, recipe.model),
        initial_value=partial(initial_value, config=recipe.model, seed=recipe.train.seed),
        optimizer=partial(build_optimizer, config=recipe.optim),
    )
    engine = build_engine(recipe.parallel, runtime, trainable)
    identity = {"model": recipe.model.model_dump(mode="json"), "data": stream.fingerprint}
    checkpoints = CheckpointManager(
        folder.checkpoints,
        recipe.checkpoint,
        identity,
        record,
        layout={"engine": recipe.parallel.engine, **asdict(runtime.layout)},
        timeout_seconds=recipe.parallel.timeout_seconds,
    )
    place, resumed = resume(checkpoints, engine, stream, record)
    metrics = Metrics(
        folder.metrics,
        folder.tensorboard,
        first_step=place.step + 1,
        total_steps=recipe.train.steps,
        log_every=recipe.train.log_every,
        enabled=is_rank_0,
    )
    peak = torch.tensor(measure_matmul_peak(runtime.device, DTYPES[recipe.parallel.precision])).double()
    peak_flops = sum_over_ranks(peak).item()
    return Run(recipe, runtime, stream, engine, checkpoints, metrics, record, stop, place, resumed, peak_flops)


def resume(checkpoints: CheckpointManager, engine: Engine, stream: Stream, record: EventLog) -> tuple[Place, bool]:
    """The place of the newest good checkpoint, with engine and stream set to it; or the very start. Collective."""
    started = time.perf_counter()
    loaded = checkpoints.load_newest(engine.state())
    if loaded is None:
        return Place(), False
    engine.loaded()
    stream.restore(loaded.rank_states)
    place = Place.of(loaded.progress)
    seconds = time.perf_counter() - started
    log.info("resumed from step %d (%d tokens) in %.1f s", place.step, place.tokens, seconds)
    record("resumed", step=place.step, tokens=place.tokens, seconds=round(seconds, 3))
    return place, True


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
