"""Loads the newest good checkpoint into the engine and the data stream."""

import logging
import time

from data_pipeline.stream.stream import Stream
from parallel.engine import Engine
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.saved_state import SavedProgress
from train.export.carried_tokenizer import check_tokenizer
from train.optim.average import is_average, start_averages
from train.records.events import EventLog

log = logging.getLogger(__name__)


def resume(checkpoints: CheckpointManager, engine: Engine, stream: Stream, record: EventLog) -> SavedProgress | None:
    """Set engine and stream to the newest good checkpoint; return its progress, or None if there is none. Collective.

    Raises CheckpointError if the checkpoint belongs to another run, or if only damaged ones are left."""
    started = time.perf_counter()
    state = engine.state()
    loaded = checkpoints.load_newest(state)
    if loaded is None:
        return None
    engine.refresh_working_weights()
    progress = loaded.progress
    if any(is_average(name) for name in loaded.missing):
        start_averages(state)
        log.warning("the checkpoint of step %d has no average of weights: it starts from the weights", progress.step)
    elif any(is_average(name) for name in loaded.unread):
        log.warning("the average of weights in the checkpoint of step %d is dropped (optim.ema_decay)", progress.step)
    if "imported" not in progress.extra:
        stream.restore(loaded.rank_states)
    elif wanted := progress.extra["imported"].get("tokenizer"):  # it has no state of the data: they begin at its step
        check_tokenizer(wanted, stream.tokenizer_dir, loaded.path)
    seconds = time.perf_counter() - started
    log.info("resumed from step %d (%d tokens) in %.1f s", progress.step, progress.tokens, seconds)
    record("resumed", step=progress.step, tokens=progress.tokens, took_seconds=round(seconds, 3))
    return progress
