"""Which checkpoints a run keeps: the newest, every n-th step for good, and those with the lowest validation loss."""

from collections.abc import Mapping

from train.config import CheckpointConfig


def steps_to_delete(losses: Mapping[int, float | None], config: CheckpointConfig) -> list[int]:
    """Steps whose checkpoints the settings do not keep, oldest first.

    `losses` has the validation loss of each existing checkpoint by step; None if it was not evaluated at that step."""
    steps = sorted(losses)
    keep = set(steps[-config.keep_last :])
    if config.keep_every:
        keep |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best:
        evaluated = [(loss, step) for step, loss in losses.items() if loss is not None]
        keep |= {step for _, step in sorted(evaluated)[: config.keep_best]}
    return [step for step in steps if step not in keep]
