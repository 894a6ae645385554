"""Builds a run, in the order that its parts require, and closes it."""

import logging
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from data_pipeline.stream.stream import Stream, open_stream
from parallel.bootstrap import Runtime, leave_at_once, seed_rank
from parallel.build_engine import build_empty_engine
from parallel.collectives import any_rank, sum_over_ranks
from parallel.engine import Trainable
from parallel.engines.precision import DTYPES
from train.checkpoint.format.attachments import plain_files
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import Recipe
from train.errors import ConfigError, DivergedError, ExhaustedError, StoppedError
from train.evaluation.scheduled import prepare_tasks
from train.exit_codes import FAILED
from train.health import garbage
from train.health.device_memory import memory_breakdown
from train.health.disk_space import check_space
from train.health.exhausted import exhaustion_in_one_line
from train.health.guard import Guard
from train.health.injected_faults import FaultInjector
from train.health.lease import Holder, Lease
from train.health.stop import StopRequest
from train.health.watchdog import Probe, Watchdog, is_lost_peer
from train.health.way_back import way_back
from train.model.attention import FORMS, AttentionChoice, choose_form
from train.model.flops import count_parameters, flops_per_token, measure_matmul_peak
from train.model.gpt import GPT, initial_value
from train.optim.groups import build_optimizer
from train.profiling.profiler import Profiler
from train.profiling.request import ProfileRequest
from train.records.clock import Clock, Lap, uptime
from train.records.compilation import CompilationMonitor
from train.records.events import EventLog, events_backwards, read_events
from train.records.goodput import seconds_of_attempts
from train.records.jsonl import last_record
from train.records.metrics import Metrics, Speed
from train.records.peaks import device_name, device_peak
from train.records.progress import Progress
from train.resume import resume
from train.run import Run
from train.run_folder import RunFolder
from train.sinks.open_sinks import check_sinks, open_sinks

log = logging.getLogger(__name__)


@contextmanager
def open_run(recipe: Recipe, runtime: Runtime, stop: StopRequest, allow: frozenset[str] = frozenset()) -> Iterator[Run]:
    """Yield a run that is ready for its next step. Collective.

    It is closed only if all went well, because closing is collective. `allow`: what may differ from the checkpoint that
    the run resumes from (`train.run_folder.MAY_DIFFER`)."""
    folder = RunFolder.of(recipe)
    is_rank_0 = runtime.world.rank == 0
    record = EventLog(folder.events, enabled=is_rank_0)
    lease = _take_lease(folder, record) if is_rank_0 else None
    watchdog = Watchdog(
        folder.status,
        folder.logs,
        rank=runtime.world.rank,
        world_size=runtime.world.world_size,
        hang_seconds=recipe.train.hang_seconds,
        record=record,
    )
    try:
        with exhaustion_in_one_line(folder.root), _with_way_back(recipe):
            run = _build_run(recipe, runtime, stop, allow, record, watchdog)
            garbage.freeze()
            with memory_breakdown(run.engine.state, lambda: watchdog.step > run.resumed_at.step):
                yield run
            run.checkpoints.close()
    except StoppedError:  # raised on all ranks
        watchdog.close()
        _release_folder(folder, lease)
        raise
    except BaseException as error:
        watchdog.report_failure()
        if not is_lost_peer(error):
            code = getattr(error, "exit_code", FAILED)
            why = str(error) or type(error).__name__
            EventLog(folder.events)("failed", rank=runtime.world.rank, exit_code=code, error=why)
        raise
    finally:
        garbage.unfreeze()
    watchdog.close()
    run.stream.close()
    run.metrics.close()
    run.engine.close()
    _release_folder(folder, lease)


def _take_lease(folder: RunFolder, record: EventLog) -> Lease:
    """Take the lease of the run folder. LaunchError if another run holds it; ExhaustedError on a full disk."""
    try:
        with exhaustion_in_one_line(folder.root):
            return Lease(folder.lease, Holder.this_process(os.environ), _exit_without_lease)
    except ExhaustedError as error:
        record("failed", rank=0, exit_code=error.exit_code, error=str(error))
        raise


@contextmanager
def _with_way_back(recipe: Recipe) -> Iterator[None]:
    """Add to a DivergedError how to continue from a good checkpoint."""
    try:
        yield
    except DivergedError as error:
        raise DivergedError(f"{error}. {way_back(recipe)}") from None


def _release_folder(folder: RunFolder, lease: Lease | None) -> None:
    """Remove the requests to stop and to profile, and release the lease. Does nothing on ranks without the lease."""
    if lease is not None:
        folder.stop_request.unlink(missing_ok=True)
        ProfileRequest(folder.profile_request).remove()
        lease.release()


def _exit_without_lease(why: str) -> None:
    """Exit immediately: another run has taken the folder, so nothing more may be written to it."""
    log.error("%s; exiting", why)
    leave_at_once(FAILED)


def _build_run(
    recipe: Recipe,
    runtime: Runtime,
    stop: StopRequest,
    allow: frozenset[str],
    record: EventLog,
    watchdog: Watchdog,
) -> Run:
    """Build everything from the data stream to the loaded checkpoint. Collective."""
    clock = Clock(already=uptime())
    entry_lap = Lap(clock)
    folder = RunFolder.of(recipe)
    is_rank_0 = runtime.world.rank == 0
    limit = recipe.train.max_seconds if is_rank_0 else None
    ends_at = math.inf if limit is None else limit - seconds_of_attempts(read_events(folder.events))
    attempt = _record_start(recipe, runtime, folder, record)

    def stage_done() -> None:
        """Report activity to the watchdog, and stop here if a rank was asked to."""
        watchdog.enter_phase("start", 0)
        _stop_if_asked(stop, record, entry_lap)

    stage_done()
    faults = FaultInjector(os.environ, runtime.world.rank, folder.checkpoints)
    stream = open_stream(recipe.data, seq_len=recipe.model.seq_len)
    check_fit(recipe, runtime, stream)
    attention = AttentionChoice(choose_form(recipe.parallel.attention, runtime.device.type, recipe.parallel.precision))
    if is_rank_0:
        check_space(recipe, folder.checkpoints)
        check_sinks(recipe)
        prepare_tasks(recipe.train.evaluations.tasks)
        stream.check_tokenizers()
    announce(recipe, runtime, stream)
    faults.inject("start", 0)
    stage_done()

    seed_rank(recipe.train.seed, runtime, 0)
    trainable = trainable_of(recipe, attention)
    engine = build_empty_engine(recipe.parallel, runtime, trainable)
    faults.attach(engine)
    stage_done()
    checkpoints = CheckpointManager(
        folder.checkpoints,
        recipe.checkpoint,
        identity_of(recipe),
        record,
        layout={"engine": recipe.parallel.engine, **asdict(runtime.layout)},
        recipe=recipe.model_dump(mode="json"),
        attachments=plain_files(stream.tokenizer_dir) if is_rank_0 else {},
        allow=allow,
        timeout_seconds=recipe.parallel.timeout_seconds,
        alive=watchdog.report_activity,
    )
    saved = resume(checkpoints, engine, stream, record)
    _keep_attention(attention, recipe, runtime, saved, record)
    if saved is None:
        engine.draw_initial_values(trainable.initial_value, watchdog.report_activity)
    if runtime.device.type != "cpu":
        checkpoints.prepare(engine.state())
    progress = Progress() if saved is None else Progress.of(saved)
    stage_done()
    return Run(
        recipe=recipe,
        runtime=runtime,
        stream=stream,
        engine=engine,
        checkpoints=checkpoints,
        metrics=Metrics(
            folder.metrics,
            open_sinks(recipe, first_step=progress.step + 1),
            total_steps=recipe.train.steps,
            log_every=recipe.train.log_every,
            enabled=is_rank_0,
        ),
        record=record,
        stop=stop,
        clock=clock,
        step_lap=Lap(clock),
        entry_lap=entry_lap,
        watchdog=watchdog,
        faults=faults,
        probe=Probe(runtime.device),
        guard=Guard(recipe.guard, None if saved is None else saved.extra["guard"]),
        compilation=CompilationMonitor(recipe.parallel.compile),
        profiler=Profiler(
            recipe.train.profile,
            folder.profiles,
            runtime,
            record,
            ProfileRequest(folder.profile_request) if is_rank_0 else None,
        ),
        speed=_measure_speed(recipe, runtime),
        attention=attention,
        resumed_at=progress,
        attempt=attempt,
        ends_at_uptime=ends_at,
    )


def _record_start(recipe: Recipe, runtime: Runtime, folder: RunFolder, record: EventLog) -> int:
    """Write the event `started` on rank 0; return the number of this attempt there, and 0 on other ranks."""
    if runtime.world.rank != 0:  # only rank 0 writes records, so the others need not read the files
        return 0
    previous = last_record(folder.metrics, key="attempt")
    newest = next(events_backwards(folder.events, ["started"]), None)
    attempt = 1 + max(known["attempt"] for known in (previous, newest, {"attempt": 0}) if known)
    record(
        "started",
        attempt=attempt,
        world_size=runtime.world.world_size,
        engine=recipe.parallel.engine,
        device=device_name(runtime.device),
        versions={name: version(name) for name in ("keepstep", "torch")} | {"python": platform.python_version()},
        previous=previous and {key: previous[key] for key in ("attempt", "step", "uptime") if key in previous},
    )
    return attempt


def _keep_attention(
    attention: AttentionChoice, recipe: Recipe, runtime: Runtime, saved: SavedProgress | None, record: EventLog
) -> None:
    """Continue with the checkpoint's form of attention, if the recipe leaves it open and this device computes it."""
    earlier = None if saved is None else saved.extra.get("attention")
    waits = earlier == "flash" and recipe.parallel.cuda_graphs  # for the device, which a graph cannot
    if recipe.parallel.attention == "auto" and earlier in FORMS.get(runtime.device.type, ()) and not waits:
        attention.form = earlier
    record("attention", form=attention.form)
    log.info("attention in the form %s", attention.form)


def trainable_of(recipe: Recipe, attention: AttentionChoice | None = None) -> Trainable:
    """Return what an engine is built from: model, initial values and optimizer of a recipe."""
    return Trainable(
        build=partial(GPT, recipe.model, attention),
        initial_value=partial(initial_value, config=recipe.model, seed=recipe.train.seed),
        optimizer=partial(build_optimizer, config=recipe.optim),
    )


def _measure_speed(recipe: Recipe, runtime: Runtime) -> Speed:
    """Measure the peak of all ranks, and look up that of their datasheets. Collective."""
    measured = measure_matmul_peak(runtime.device, DTYPES[recipe.parallel.precision])
    datasheet = device_peak(runtime.device)
    peaks = torch.tensor([measured, math.nan if datasheet is None else datasheet]).double()
    measured_sum, datasheet_sum = sum_over_ranks(peaks).tolist()
    return Speed(
        tokens_per_step=recipe.train.global_batch_size * recipe.model.seq_len,
        flops_per_token=flops_per_token(recipe.model),
        measured_peak=measured_sum,
        datasheet_peak=None if math.isnan(datasheet_sum) else datasheet_sum,
    )


def _stop_if_asked(stop: StopRequest, record: EventLog, lap: Lap) -> None:
    """Raise StoppedError on all ranks if any was asked to stop: there is nothing to save yet. Collective."""
    if any_rank(bool(stop)):
        reason = stop.reason or "another rank was asked to stop"
        record("stopped", phase="start", reason=reason, seconds=lap.take())
        raise StoppedError(f"stopped before the first step of this start ({reason}); the same command resumes the run")


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """Return what must be the same when a run resumes. `Stream.restore` compares the data.

    Differences in `noted` (`train.checkpoint.load.NOTED`) are reported and need no permission."""
    schedule = {"lr", "min_lr_ratio", "schedule", "warmup_steps", "decay_steps"}
    free = {"max_grad_norm", "ema_decay"}
    return {
        "model": recipe.model.model_dump(mode="json", exclude={"dropout", "init_std"}),
        "schedule": {
            "steps": recipe.train.steps,
            **recipe.optim.model_dump(mode="json", include=schedule),
            **({"seq_lens": [list(change) for change in recipe.seq_lens]} if recipe.seq_lens else {}),
        },
        "optimizer": recipe.optim.model_dump(mode="json", exclude=schedule | free),
        "dropout": recipe.model.dropout,
        "seed": recipe.train.seed,
        "batch_size": recipe.train.global_batch_size,
        "batch_changes": [list(change) for change in recipe.batch_changes],
        "data_weights": [source.weight for source in recipe.data.sources],
        "weight_changes": [[change.step, list(change.weights)] for change in recipe.data.weight_changes],
        "noted": {
            "optim.max_grad_norm": recipe.optim.max_grad_norm,
            "optim.ema_decay": recipe.optim.ema_decay,
            "train.micro_batch_size": recipe.train.micro_batch_size,
            "parallel": recipe.parallel.model_dump(mode="json", include={"engine", "tensor", "precision", "compile"}),
            "guard.on_spike": recipe.guard.on_spike,
        },
    }


def check_fit(recipe: Recipe, runtime: Runtime, stream: Stream) -> None:
    """Raise ConfigError if the recipe does not fit the data or the number of ranks."""
    multiple = math.lcm(64, recipe.parallel.tensor)
    if stream.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size ({recipe.model.vocab_size}) must be at least the tokenizer's size "
            f"({stream.vocab_size}); set model.vocab_size={-(-stream.vocab_size // multiple) * multiple}"
        )
    recipe.grad_accum_steps(runtime.data_parallel_size)


def announce(recipe: Recipe, runtime: Runtime, stream: Stream) -> None:
    """Log what will be trained, in three lines."""
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
    for step, size in recipe.batch_changes:
        log.info("from step %d on: %d sequences = %d tokens a step", step, size, size * model.seq_len)
    for step, seq_len in recipe.seq_lens:
        log.info("from step %d on: rows of %d tokens, %d from each sequence", step, seq_len, model.seq_len // seq_len)
    if train.eval_every and train.eval_sequences and not stream.has_validation:
        log.warning(
            "train.eval_every is %d, but no source has validation documents, so there will be no validation loss; "
            "build with a larger --validation-share or --validation FILES",
            train.eval_every,
        )
