"""Validation loss: summed loss over summed targets, so that a short last batch counts for as many targets as it has."""

from dataclasses import dataclass

import torch

from parallel.collectives import any_rank
from train.device_batch import count_targets_by_source, loss_by_source, to_device
from train.exchange import sum_over_data_parallel
from train.run import Run


@dataclass(frozen=True)
class Validation:
    """The result of one evaluation on the validation split."""

    loss: float
    """Mean loss in nats per target."""
    targets: int


def evaluate(run: Run, step: int) -> Validation | None:
    """Return the validation loss; None if a rank was asked to stop meanwhile or the split is empty. Collective."""
    recipe, runtime = run.recipe, run.runtime
    n_sources = len(recipe.data.sources)
    loss_fn = loss_by_source(n_sources)
    totals = torch.zeros(2, dtype=torch.float64)  # loss, targets
    batches = run.stream.validation(
        sequences=recipe.train.eval_sequences,
        micro_batch_size=recipe.train.micro_batch_size,
        rank=runtime.data_parallel_rank,
        world_size=runtime.data_parallel_size,
    )
    for batch in batches:
        run.enter("evaluate", step)
        loss_S = run.engine.evaluate(to_device(batch, runtime.device), loss_fn)[:n_sources]
        totals += torch.stack((loss_S.sum().double().cpu(), count_targets_by_source([batch], n_sources).sum()))
        if any_rank(bool(run.stop)):
            return None
    loss, targets = sum_over_data_parallel(totals, runtime)
    return Validation(loss / targets, int(targets)) if targets else None
