"""The training loop: one function, read from top to bottom.

`step` counts finished optimizer steps; `skipped` counts batches that moved nothing. Their sum is the place in the
data, and the learning rate follows `step`, so a skipped batch moves neither weights nor schedule.
"""

import logging
import math
import time

import torch

from parallel.bootstrap import seed_rank
from train.device_batch import labels_by_source, loss_by_source, to_device
from train.evaluate import evaluate
from train.exit_codes import FINISHED, STOPPED
from train.flops import flops_per_token
from train.metrics import peak_memory_gib
from train.run import Run, total
from train.schedule import learning_rate

log = logging.getLogger(__name__)


def train(run: Run) -> int:
    """Train until the recipe's last step or a request to stop; returns the exit code. Collective."""
    recipe, runtime, engine, progress = run.recipe, run.runtime, run.engine, run.progress
    n_sources = len(recipe.data.sources)
    loss_fn = loss_by_source(n_sources)
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_len
    batches = run.open_batches(progress.data_step)
    saved_step = progress.step if run.resumed else -1
    started = time.perf_counter()

    while progress.step < recipe.train.steps:
        micro_batches = next(batches)
        # One sum over ranks tells the targets of the whole global batch and whether anybody was asked to stop.
        told = torch.cat((labels_by_source(micro_batches, n_sources), torch.tensor([float(bool(run.stop))])))
        *targets_S, stops = total(told, runtime)
        if stops:
            break
        if not sum(targets_S):
            log.warning("no targets in the batch of step %d; it is skipped", progress.step + 1)
            progress = progress.after_skip()
            continue

        seed_rank(recipe.train.seed, runtime, progress.data_step)
        lr = learning_rate(progress.step + 1, recipe.train.steps, recipe.optim)
        loss_S = engine.forward_backward(
            [to_device(batch, runtime.device) for batch in micro_batches],
            loss_fn,
            scale=runtime.data_parallel_size / sum(targets_S),
        )
        grad_norm = engine.step(lr, recipe.optim.max_grad_norm)
        losses_S = total(loss_S.double().cpu(), runtime)
        if not math.isfinite(grad_norm):
            log.warning("gradient norm %s after step %d; the batch is skipped", grad_norm, progress.step)
            progress = progress.after_skip()
            continue
        progress = progress.after_step(tokens_per_step)

        seconds = time.perf_counter() - started
        started = time.perf_counter()
        flops = flops_per_token(recipe.model) * tokens_per_step / seconds
        run.metrics.write(
            progress.step,
            {
                "loss": sum(losses_S) / sum(targets_S),
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": progress.tokens,
                "data_step": progress.data_step,
                "tokens_per_second": tokens_per_step / seconds,
                "model_flops_per_second": flops,
                "share_of_peak": flops / run.peak_flops,
                "memory_gib": peak_memory_gib(runtime.device),
                **run.loss_of_each_source(losses_S, targets_S),
            },
            seconds,
        )

        last = progress.step == recipe.train.steps
        every = recipe.train.eval_every
        if recipe.train.eval_sequences and (last or (every and progress.step % every == 0)):
            held_out = evaluate(recipe, runtime, engine, run.stream, run.stop)
            if held_out is not None:
                progress = progress.with_held_out(held_out.loss)
                run.metrics.write_evaluation(progress.step, {"held_out_loss": held_out.loss})
                log.info("step %d  held-out loss %.4f (%d tokens)", progress.step, held_out.loss, held_out.tokens)
        if last or progress.step % recipe.checkpoint.every == 0:
            run.save(progress)
            saved_step = progress.step
        run.checkpoints.poll()

    if saved_step != progress.step:
        run.save(progress)
    run.checkpoints.wait()
    return FINISHED if progress.step >= recipe.train.steps else STOPPED
