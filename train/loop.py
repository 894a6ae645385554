"""The training loop: one function, read from top to bottom.

`progress.step` counts finished optimizer steps; `progress.skipped` counts batches that changed no weights. Their sum is
the position in the data. The learning rate follows `step`, so a skipped batch moves neither weights nor schedule.
"""

import logging

from parallel.bootstrap import seed_rank
from train.device_batch import loss_by_source, to_device
from train.evaluation.scheduled import run_tasks_after_step
from train.evaluation.validation import evaluate_after_step
from train.exit_codes import FINISHED, STOPPED
from train.health import garbage
from train.optim.schedule import learning_rate
from train.run import Run

log = logging.getLogger(__name__)


def train(run: Run) -> int:
    """Train until the recipe's last step or until a rank is asked to stop; return the exit code. Collective."""
    recipe, runtime, engine, guard = run.recipe, run.runtime, run.engine, run.guard
    loss_fn = loss_by_source(len(recipe.data.sources))
    progress = run.resumed_at
    time_is_up = False
    batches = run.open_batches(progress.data_step)

    def norm_limit(totals: list[float]) -> float:
        """The gradient norm above which the guard skips the step, by the losses of all ranks."""
        return guard.norm_limit(batches.receive(totals).mean)

    run.keep_recipe()
    if progress.step >= recipe.train.steps:
        log.info(
            "the run is finished: its newest checkpoint is step %d, and train.steps is %d; to train longer, raise "
            "train.steps and add --allow schedule",
            progress.step,
            recipe.train.steps,
        )

    while progress.step < recipe.train.steps:
        run.enter("data", progress.step)
        micro_batches, (targets_S, quarantined, stop_requested, time_is_up, profile_steps) = batches.next_step()
        if stop_requested or time_is_up:
            break
        run.profile(progress, profile_steps)
        if quarantined:  # before the batch is used: all ranks must replace the same rows
            batches = run.share_quarantine(progress)
            continue
        if why := guard.reason_to_skip(progress.data_step, sum(targets_S)):
            progress = run.skip_batch(progress, why)
            continue

        run.enter("forward", progress.step)
        seed_rank(recipe.train.seed, runtime, progress.data_step)
        sums_R = engine.forward_backward(
            [to_device(batch, runtime.device) for batch in micro_batches],
            loss_fn,
            scale=runtime.data_parallel_size / sum(targets_S),
        )
        if progress.step + 1 < recipe.train.steps:
            run.enter("data", progress.step + 1)
            batches.read_next()  # while the device computes
        run.enter("update", progress.step)
        lr = learning_rate(progress.step + 1, recipe.train.steps, recipe.optim)
        # The only wait for the device in a step: the guard must decide before the weights change.
        grad_norm = engine.step(lr, recipe.optim.max_grad_norm, norm_limit, batches.values(sums_R))
        losses = batches.losses
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
        progress = progress.after_step(run.tokens_of(progress.data_step))
        run.log_step(progress, losses, lr, grad_norm)

        if recipe.guard.compare_replicas_every and progress.step % recipe.guard.compare_replicas_every == 0:
            run.compare_replicas()
        saves_locally = bool(recipe.checkpoint.local_dir) and progress.step % recipe.checkpoint.local_every == 0
        pauses = recipe.evaluates_after(progress.step) or recipe.runs_tasks_after(progress.step)
        if pauses or recipe.saves_after(progress.step) or saves_locally:
            batches.ask_again()  # a stop that is requested meanwhile must not wait for another step
        # Before the save, so that the checkpoint knows its validation loss.
        if recipe.evaluates_after(progress.step):
            progress = evaluate_after_step(run, progress)
        if recipe.saves_after(progress.step):
            run.save(progress)
        elif saves_locally:
            run.save(progress, local=True)
        if recipe.runs_tasks_after(progress.step):
            run_tasks_after_step(run, progress.step)
        run.checkpoints.poll()
        garbage.collect(progress.step)

    run.profiler.finish()
    run.ensure_saved(progress)
    finished = progress.step >= recipe.train.steps or time_is_up
    reason = run.stop.reason if run.stop else None if finished else "another rank was asked to stop"
    if time_is_up:
        reason = f"train.max_seconds ({recipe.train.max_seconds:g})"
        log.info("the run is finished at step %d: %s is used up; raise it to train on", progress.step, reason)
    kind = "finished" if finished else "stopped"
    run.record(kind, step=progress.step, reason=reason, seconds=run.entry_lap.take())
    if not finished:
        log.info("stopped at step %d (%s); the same command resumes from there", progress.step, reason)
    return FINISHED if finished else STOPPED
