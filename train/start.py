"""How a run begins and ends: everything that the loop uses is made here, in the order in which it must be."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from data_pipeline.stream.stream import Stream, open_stream
from parallel.bootstrap import Runtime, leave_at_once, seed_rank
from parallel.build_engine import build_engine
from parallel.collectives import any_rank, sum_over_ranks
from parallel.engine import Trainable
from parallel.engines.precision import DTYPES
from train.checkpoint.manager import CheckpointManager
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.errors import ConfigError, StoppedError
from train.exit_codes import FAILED
from train.health import garbage
from train.health.disk_space import check_space
from train.health.guard import Guard
from train.health.injected_faults import Faults
from train.health.lease import Holder, Lease
from train.health.stop import StopRequest
from train.health.watchdog import Probe, Watchdog, lost_peer
from train.model.flops import count_parameters, measure_matmul_peak
from train.model.gpt import GPT, initial_value
from train.optim.groups import build_optimizer
from train.records.clock import Clock, uptime
from train.records.compilation import Compiling
from train.records.events import EventLog, read_jsonl
from train.records.metrics import Metrics
from train.records.progress import Progress
from train.run import Run, resume, settle
from train.run_folder import RunFolder

log = logging.getLogger(__name__)


@contextmanager
def open_run(recipe: Recipe, runtime: Runtime, stop: StopRequest, allow: frozenset[str] = frozenset()) -> Iterator[Run]:
    """A run that is ready for its next step; closed only if all went well, for closing is collective. Collective.

    `allow`: what may differ from the checkpoint that it goes on from."""
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
        run = _build_run(recipe, runtime, stop, allow, record, watchdog)
        garbage.freeze()
        yield run
        run.checkpoints.close()
    except StoppedError:  # on all ranks
        watchdog.close()
        _give_back(folder, lease)
        raise
    except BaseException as error:
        watchdog.failed()
        if not lost_peer(error):
            code = getattr(error, "exit_code", FAILED)
            why = str(error) or type(error).__name__
            EventLog(folder.events)("failed", rank=runtime.world.rank, exit_code=code, error=why)
        raise
    finally:
        garbage.thaw()
    watchdog.close()
    run.stream.close()
    run.metrics.close()
    run.engine.close()
    _give_back(folder, lease)


def _give_back(folder: RunFolder, lease: Lease | None) -> None:
    """The folder, by the rank that holds it; a request to stop has been met."""
    if lease is not None:
        folder.stop_request.unlink(missing_ok=True)
        lease.release()


def _leave(why: str) -> None:
    """Another run has taken the folder: nothing more may be written to it."""
    log.error("%s; leaving", why)
    leave_at_once(FAILED)


def _build_run(
    recipe: Recipe,
    runtime: Runtime,
    stop: StopRequest,
    allow: frozenset[str],
    record: EventLog,
    watchdog: Watchdog,
) -> Run:
    """Everything from the data to the loaded checkpoint. Collective."""
    clock, ledger = Clock(already=uptime()), Clock(already=uptime())
    folder = RunFolder.of(recipe)
    is_rank_0 = runtime.world.rank == 0
    attempt = 1 + sum(event["kind"] == "started" for event in read_jsonl(folder.events))
    record("started", attempt=attempt, world_size=runtime.world.world_size, engine=recipe.parallel.engine)

    def stage_done() -> None:
        """That is, the start gets on; and between its stages it may be stopped."""
        watchdog.beat("start", 0)
        _leave_if_asked(stop, record, ledger)

    stage_done()
    faults = Faults(os.environ, runtime.world.rank, folder.checkpoints)
    stream = open_stream(recipe.data, seq_len=recipe.model.seq_len)
    check_fit(recipe, runtime, stream)
    if is_rank_0:
        check_space(recipe, folder.checkpoints)
        folder.recipe.write_text(recipe_as_yaml(recipe), encoding="utf-8")
    announce(recipe, runtime, stream)
    faults.strike("start", 0)
    stage_done()

    seed_rank(recipe.train.seed, runtime, 0)
    trainable = Trainable(
        build=partial(GPT, recipe.model),
        initial_value=partial(initial_value, config=recipe.model, seed=recipe.train.seed),
        optimizer=partial(build_optimizer, config=recipe.optim),
    )
    engine = build_engine(recipe.parallel, runtime, trainable)
    faults.arm(engine)
    stage_done()
    checkpoints = CheckpointManager(
        folder.checkpoints,
        recipe.checkpoint,
        identity_of(recipe),
        record,
        layout={"engine": recipe.parallel.engine, **asdict(runtime.layout)},
        allow=allow,
        timeout_seconds=recipe.parallel.timeout_seconds,
        alive=watchdog.alive,
    )
    loaded = resume(checkpoints, engine, stream, record)
    progress = Progress() if loaded is None else Progress.of(loaded)
    if attempt > 1:
        settle(recipe, runtime, record, progress.step)
    stage_done()
    metrics = Metrics(
        folder.metrics,
        folder.tensorboard,
        first_step=progress.step + 1,
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
        ledger,
        watchdog,
        faults,
        Probe(runtime.device),
        Guard(recipe.guard, None if loaded is None else loaded.extra["guard"]),
        Compiling(recipe.parallel.compile),
        progress,
        peak_flops=sum_over_ranks(peak).item(),
        attempt=attempt,
    )


def _leave_if_asked(stop: StopRequest, record: EventLog, ledger: Clock) -> None:
    """StoppedError on all ranks if any was asked to stop: before the first step nothing is to be saved. Collective."""
    if any_rank(bool(stop)):
        reason = stop.reason or "another rank was asked"
        record("stopped", phase="start", reason=reason, seconds=ledger.take())
        raise StoppedError(f"stopped before the first step of this start ({reason}); the same command goes on")


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """What must be the same when a run goes on. The data say themselves what changed (`Stream.restore`)."""
    schedule = {"lr", "min_lr_ratio", "schedule", "warmup_steps", "decay_steps"}
    return {
        "model": recipe.model.model_dump(mode="json", exclude={"dropout", "init_std"}),
        "schedule": {"steps": recipe.train.steps, **recipe.optim.model_dump(mode="json", include=schedule)},
        "data_weights": [source.weight for source in recipe.data.sources],
    }


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
