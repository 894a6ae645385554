"""Loss on the validation split: summed loss over summed targets, so a short last batch weighs what it holds."""

import math
from dataclasses import dataclass

import torch

from parallel.collectives import any_rank
from train.device_batch import count_targets_by_source, loss_by_source, to_device
from train.run import Run, total


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss in nats per token."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def evaluate(run: Run, step: int) -> ValidationLoss | None:
    """The validation loss; None if the run was asked to stop on the way or there is nothing held out. Collective."""
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
        loss_S = run.engine.evaluate(to_device(batch, runtime.device), loss_fn)
        totals += torch.stack((loss_S.sum().double().cpu(), count_targets_by_source([batch], n_sources).sum()))
        if any_rank(bool(run.stop)):
            return None
    loss, tokens = total(totals, runtime)
    return ValidationLoss(loss / tokens, int(tokens)) if tokens else None
