"""The training loop: one function, read from top to bottom.

`step` counts finished optimizer steps; `skipped` counts batches that moved nothing. Their sum is the place in the
data, and the learning rate follows `step`, so a skipped batch moves neither weights nor schedule.
"""

import logging

import torch

from parallel.bootstrap import seed_rank
from train import garbage
from train.device_batch import labels_by_source, loss_by_source, to_device
from train.evaluate import evaluate
from train.exit_codes import FINISHED, STOPPED
from train.flops import flops_per_token
from train.metrics import peak_memory_gib
from train.run import Losses, Run, total
from train.schedule import learning_rate

log = logging.getLogger(__name__)


def train(run: Run) -> int:
    """Train until the recipe's last step or a request to stop; returns the exit code. Collective."""
    recipe, runtime, engine, guard, place = run.recipe, run.runtime, run.engine, run.guard, run.place
    n_sources = len(recipe.data.sources)
    loss_fn = loss_by_source(n_sources)
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_len
    batches = run.open_batches(place.data_step)
    forward = "compile" if recipe.parallel.compile else "forward"

    while place.step < recipe.train.steps:
        run.enter("data", place.step)
        micro_batches = next(batches)
        # One sum over ranks: the targets of the whole global batch, who quarantined a block, who was asked to stop.
        flags = torch.tensor([run.stream.has_news, bool(run.stop)], dtype=torch.float64)
        *targets_S, news, stops = total(torch.cat((labels_by_source(micro_batches, n_sources), flags)), runtime)
        if stops:
            break
        if news:
            batches = run.share_quarantine(place)
            continue
        if place.data_step in guard.step_over:
            place = run.pass_over(place, "a roll-back found it bad")
            continue
        if not sum(targets_S):
            guard.count_bad(place.data_step, "no targets in the batch")
            place = run.pass_over(place, "no targets in the batch")
            continue

        run.enter(forward, place.step)
        seed_rank(recipe.train.seed, runtime, place.data_step)
        lr = learning_rate(place.step + 1, recipe.train.steps, recipe.optim)
        loss_S = engine.forward_backward(
            [to_device(batch, runtime.device) for batch in micro_batches],
            loss_fn,
            scale=runtime.data_parallel_size / sum(targets_S),
        )
        run.enter("update", place.step)
        forward = "forward"
        losses = Losses(loss_S, targets_S, runtime)
        # The one wait for the device: the losses, when the norm is on its way too.
        grad_norm = engine.step(lr, recipe.optim.max_grad_norm, lambda losses=losses: guard.norm_limit(losses.mean))
        verdict, why = guard.judge(place.data_step, losses.mean, grad_norm)
        if verdict == "skip":
            place = run.pass_over(place, why)
            continue
        if verdict == "rollback":
            place = run.roll_back(place, why)
            batches = run.open_batches(place.data_step)
            continue
        if verdict == "report":
            run.report_spike(place, why)
        place = place.after_step(tokens_per_step)

        spent = run.clock.take()
        seconds = sum(spent.get(kind, 0.0) for kind in ("data_wait", "compile", "step"))
        run.report_compiling(place, seconds)
        flops = flops_per_token(recipe.model) * tokens_per_step / seconds
        run.metrics.write(
            place.step,
            {
                "loss": losses.mean,
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": place.tokens,
                "data_step": place.data_step,
                "tokens_per_second": tokens_per_step / seconds,
                "model_flops_per_second": flops,
                "share_of_peak": flops / run.peak_flops,
                "memory_gib": peak_memory_gib(runtime.device),
                **run.loss_of_each_source(losses),
                "seconds": spent,
                "attempt": run.attempt,
            },
            seconds,
        )
        if place.step % recipe.train.log_every == 0:
            run.tell_pace(spent)
        if recipe.guard.compare_replicas_every and place.step % recipe.guard.compare_replicas_every == 0:
            run.compare_copies()

        last = place.step == recipe.train.steps
        every = recipe.train.eval_every
        if recipe.train.eval_sequences and (last or (every and place.step % every == 0)):
            held_out = evaluate(run, place.step)
            if held_out is not None:
                place = place.evaluated(held_out.loss)
                run.metrics.write_evaluation(place.step, {"held_out_loss": held_out.loss})
                log.info("step %d  held-out loss %.4f (%d tokens)", place.step, held_out.loss, held_out.tokens)
        if last or place.step % recipe.checkpoint.every == 0:
            run.save(place)
        elif recipe.checkpoint.local_dir and place.step % recipe.checkpoint.local_every == 0:
            run.save(place, local=True)
        run.checkpoints.poll()
        garbage.collect(place.step)

    run.be_saved(place)
    finished = place.step >= recipe.train.steps
    reason = run.stop.reason if run.stop else None if finished else "another rank was asked"
    run.record("finished" if finished else "stopped", step=place.step, reason=reason, seconds=run.ledger.take())
    if not finished:
        log.info("stopped at step %d (%s); the same command goes on from there", place.step, reason)
    return FINISHED if finished else STOPPED
