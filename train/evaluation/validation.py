"""The validation losses of a run, on the live weights and on their average.

Losses and targets are summed, so that a short last batch counts for as many targets as it has. The sums stay on the
device and move between hosts once, at the end.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.stream.batch import IGNORE, Batch
from data_pipeline.tokenizers.token_bytes import bytes_of_tokens
from parallel.collectives import any_rank
from parallel.engine import Engine
from train.device_batch import count_targets_by_source, loss_by_source, to_device
from train.evaluation.losses import Losses
from train.exchange import sum_over_data_parallel
from train.optim.average import swap_averages
from train.records.progress import Progress
from train.run import Run

log = logging.getLogger(__name__)

STOP_EVERY = 32
"""Batches between two questions whether a rank was asked to stop. Each is an exchange between hosts."""


def evaluate_after_step(run: Run, progress: Progress) -> Progress:
    """Evaluate, and write what was found; return the progress with the loss of the live weights. Collective."""
    found = evaluate(run, progress.step)
    if found is None:
        return progress
    record = found.metrics(run.stream.source_names)
    log.info("step %d  validation loss %.4f (%s)", progress.step, found.mean, _details(found))
    if run.recipe.optim.ema_decay is not None:
        with averaged(run.engine):
            average = evaluate(run, progress.step)
        if average is not None:
            record |= average.metrics(run.stream.source_names, "average_")
            log.info("step %d  validation loss of the average %.4f", progress.step, average.mean)
    run.metrics.write_evaluation(progress.step, record)
    return progress.evaluated(found.mean)


def _details(found: Losses) -> str:
    targets = f"{sum(found.targets_S)} tokens"
    return targets if found.bits_per_byte is None else f"{found.bits_per_byte:.4f} bits per byte, {targets}"


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """A context in which the engine computes with the average of the weights. Collective."""
    swap_averages(engine.state())
    engine.refresh_working_weights()
    try:
        yield
    finally:
        swap_averages(engine.state())
        engine.refresh_working_weights()


def evaluate(run: Run, step: int) -> Losses | None:
    """Return the validation losses; None if a rank was asked to stop meanwhile or the split is empty. Collective."""
    recipe, runtime = run.recipe, run.runtime
    n_sources = len(recipe.data.sources)
    loss_fn, token_bytes = loss_by_source(n_sources), bytes_of_tokens(run.stream.tokenizer_dir)
    losses_S = torch.zeros(n_sources, dtype=torch.float64, device=runtime.device)
    counts = torch.zeros(2, n_sources, dtype=torch.float64)  # targets, bytes
    batches = run.stream.validation(
        sequences=recipe.train.eval_sequences,
        micro_batch_size=recipe.train.micro_batch_size,
        rank=runtime.data_parallel_rank,
        world_size=runtime.data_parallel_size,
    )
    for number, batch in enumerate(batches):
        run.enter("evaluate", step)
        losses_S += run.engine.evaluate(to_device(batch, runtime.device), loss_fn)[:n_sources].double()
        counts += counted(batch, n_sources, token_bytes)
        if number % STOP_EVERY == 0 and any_rank(bool(run.stop)):
            return None
    totals = sum_over_data_parallel(torch.cat((losses_S.cpu(), counts.flatten())), runtime)
    found = losses_of(totals, n_sources, known_bytes=token_bytes is not None)
    return found if sum(found.targets_S) else None


def counted(batch: Batch, n_sources: int, token_bytes: NDArray[np.int64] | None) -> Tensor:
    """Targets and their bytes of text, by source; bytes are 0 if they are not known. Shape (2, S), fp64, on CPU."""
    targets_S = count_targets_by_source([batch], n_sources)
    sizes_S = torch.zeros_like(targets_S)
    if token_bytes is not None:
        wanted = batch.labels_BT != IGNORE
        sizes_B = np.where(wanted, token_bytes[np.where(wanted, batch.labels_BT, 0)], 0).sum(axis=1)
        sizes_S.index_add_(0, torch.as_tensor(batch.sources_B).long(), torch.as_tensor(sizes_B).double())
    return torch.stack((targets_S, sizes_S))


def losses_of(totals: list[float], n_sources: int, *, known_bytes: bool) -> Losses:
    """The losses from the sums over all ranks: losses, targets and bytes, each by source."""
    sums_S, targets_S, bytes_S = (totals[start : start + n_sources] for start in range(0, 3 * n_sources, n_sources))
    sizes = tuple(int(size) for size in bytes_S) if known_bytes else None
    return Losses(tuple(sums_S), tuple(int(number) for number in targets_S), sizes)
