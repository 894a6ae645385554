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
    recipe, runtime, engine, place = run.recipe, run.runtime, run.engine, run.place
    n_sources = len(recipe.data.sources)
    loss_fn = loss_by_source(n_sources)
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_len
    batches = run.open_batches(place.data_step)
    saved_step = place.step if run.resumed else -1
    started = time.perf_counter()

    while place.step < recipe.train.steps:
        micro_batches = next(batches)
        # One sum over ranks tells the targets of the whole global batch and whether anybody was asked to stop.
        told = torch.cat((labels_by_source(micro_batches, n_sources), torch.tensor([float(bool(run.stop))])))
        *targets_S, stops = total(told, runtime)
        if stops:
            break
        if not sum(targets_S):
            log.warning("no targets in the batch of step %d; it is skipped", place.step + 1)
            place = place.after_skip()
            continue

        seed_rank(recipe.train.seed, runtime, place.data_step)
        lr = learning_rate(place.step + 1, recipe.train.steps, recipe.optim)
        loss_S = engine.forward_backward(
            [to_device(batch, runtime.device) for batch in micro_batches],
            loss_fn,
            scale=runtime.data_parallel_size / sum(targets_S),
        )
        grad_norm = engine.step(lr, recipe.optim.max_grad_norm)
        losses_S = total(loss_S.double().cpu(), runtime)
        if not math.isfinite(grad_norm):
            log.warning("gradient norm %s after step %d; the batch is skipped", grad_norm, place.step)
            place = place.after_skip()
            continue
        place = place.after_step(tokens_per_step)

        seconds = time.perf_counter() - started
        started = time.perf_counter()
        flops = flops_per_token(recipe.model) * tokens_per_step / seconds
        run.metrics.write(
            place.step,
            {
                "loss": sum(losses_S) / sum(targets_S),
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": place.tokens,
                "data_step": place.data_step,
                "tokens_per_second": tokens_per_step / seconds,
                "model_flops_per_second": flops,
                "share_of_peak": flops / run.peak_flops,
                "memory_gib": peak_memory_gib(runtime.device),
                **run.loss_of_each_source(losses_S, targets_S),
            },
            seconds,
        )

        last = place.step == recipe.train.steps
        every = recipe.train.eval_every
        if recipe.train.eval_sequences and (last or (every and place.step % every == 0)):
            held_out = evaluate(recipe, runtime, engine, run.stream, run.stop)
            if held_out is not None:
                place = place.evaluated(held_out.loss)
                run.metrics.write_evaluation(place.step, {"held_out_loss": held_out.loss})
                log.info("step %d  held-out loss %.4f (%d tokens)", place.step, held_out.loss, held_out.tokens)
        if last or place.step % recipe.checkpoint.every == 0:
            run.save(place)
            saved_step = place.step
        run.checkpoints.poll()

    if saved_step != place.step:
        run.save(place)
    run.checkpoints.wait()
    finished = place.step >= recipe.train.steps
    run.record("finished" if finished else "stopped", step=place.step, reason=run.stop.reason)
    if not finished:
        log.info("stopped at step %d (%s); the same command goes on from there", place.step, run.stop.reason)
    return FINISHED if finished else STOPPED
