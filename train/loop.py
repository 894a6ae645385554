"""The training loop: one function, read from top to bottom.

`step` counts finished optimizer steps; `skipped` counts batches that moved nothing. Their sum is the progress in the
data, and the learning rate follows `step`, so a skipped batch moves neither weights nor schedule.
"""

import logging

import torch

from parallel.bootstrap import seed_rank
from train.device_batch import count_targets_by_source, loss_by_source, to_device
from train.evaluate import evaluate
from train.exit_codes import FINISHED, STOPPED
from train.health import garbage
from train.model.flops import flops_per_token
from train.optim.schedule import learning_rate
from train.records.metrics import peak_memory_gib
from train.run import Losses, Run, total

log = logging.getLogger(__name__)


def train(run: Run) -> int:
    """Train until the recipe's last step or a request to stop; returns the exit code. Collective."""
    recipe, runtime, engine, guard, progress = run.recipe, run.runtime, run.engine, run.guard, run.progress
    n_sources = len(recipe.data.sources)
    loss_fn = loss_by_source(n_sources)
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_len
    batches = run.open_batches(progress.data_step)
    forward = "compile" if recipe.parallel.compile else "forward"

    while progress.step < recipe.train.steps:
        run.enter("data", progress.step)
        micro_batches = next(batches)
        # One sum over ranks: the targets of the whole global batch, who quarantined a block, who was asked to stop.
        flags = torch.tensor([run.stream.has_news, bool(run.stop)], dtype=torch.float64)
        *targets_S, news, stops = total(torch.cat((count_targets_by_source(micro_batches, n_sources), flags)), runtime)
        if stops:
            break
        if news:
            batches = run.share_quarantine(progress)
            continue
        if progress.data_step in guard.data_steps_to_skip:
            progress = run.skip_batch(progress, "a roll-back found it bad")
            continue
        if not sum(targets_S):
            guard.count_bad(progress.data_step, "no targets in the batch")
            progress = run.skip_batch(progress, "no targets in the batch")
            continue

        run.enter(forward, progress.step)
        seed_rank(recipe.train.seed, runtime, progress.data_step)
        lr = learning_rate(progress.step + 1, recipe.train.steps, recipe.optim)
        loss_S = engine.forward_backward(
            [to_device(batch, runtime.device) for batch in micro_batches],
            loss_fn,
            scale=runtime.data_parallel_size / sum(targets_S),
        )
        run.enter("update", progress.step)
        forward = "forward"
        losses = Losses(loss_S, targets_S, runtime)
        # The one wait for the device: the losses, when the norm is on its way too.
        grad_norm = engine.step(lr, recipe.optim.max_grad_norm, lambda losses=losses: guard.norm_limit(losses.mean))
        verdict, why = guard.judge(progress.data_step, losses.mean, grad_norm)
        if verdict == "skip":
            progress = run.skip_batch(progress, why)
            continue
        if verdict == "rollback":
            progress = run.roll_back(progress, why)
            batches = run.open_batches(progress.data_step)
            continue
        if verdict == "report":
            run.report_spike(progress, why)
        progress = progress.after_step(tokens_per_step)

        spent = run.clock.take()
        seconds = sum(spent.get(kind, 0.0) for kind in ("data_wait", "compile", "step"))
        run.report_compiling(progress, seconds)
        flops = flops_per_token(recipe.model) * tokens_per_step / seconds
        run.metrics.write(
            progress.step,
            {
                "loss": losses.mean,
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": progress.tokens,
                "data_step": progress.data_step,
                "tokens_per_second": tokens_per_step / seconds,
                "model_flops_per_second": flops,
                "share_of_measured_peak": flops / run.peak_flops,
                "memory_gib": peak_memory_gib(runtime.device),
                **run.loss_of_each_source(losses),
                "seconds": spent,
                "attempt": run.attempt,
            },
            seconds,
        )
        if progress.step % recipe.train.log_every == 0:
            run.report_pace(spent)
        if recipe.guard.compare_replicas_every and progress.step % recipe.guard.compare_replicas_every == 0:
            run.compare_replicas()

        last = progress.step == recipe.train.steps
        every = recipe.train.eval_every
        if recipe.train.eval_sequences and (last or (every and progress.step % every == 0)):
            validation = evaluate(run, progress.step)
            if validation is not None:
                progress = progress.evaluated(validation.loss)
                run.metrics.write_evaluation(progress.step, {"validation_loss": validation.loss})
                log.info("step %d  validation loss %.4f (%d tokens)", progress.step, validation.loss, validation.tokens)
        if last or progress.step % recipe.checkpoint.every == 0:
            run.save(progress)
        elif recipe.checkpoint.local_dir and progress.step % recipe.checkpoint.local_every == 0:
            run.save(progress, local=True)
        run.checkpoints.poll()
        garbage.collect(progress.step)

    run.ensure_saved(progress)
    finished = progress.step >= recipe.train.steps
    reason = run.stop.reason if run.stop else None if finished else "another rank was asked"
    run.record("finished" if finished else "stopped", step=progress.step, reason=reason, seconds=run.ledger.take())
    if not finished:
        log.info("stopped at step %d (%s); the same command goes on from there", progress.step, reason)
    return FINISHED if finished else STOPPED
