"""The learning rate as a pure function of the step, so a resume needs nothing but the step."""

import math

from train.optim.config import OptimConfig


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step `step`, counted from 1.

    Linear warm-up reaches the peak exactly at `warmup_steps`. Then cosine (Loshchilov and Hutter 2017, equation 5), or
    for wsd a stable phase and a linear decay, reaches `min_lr_ratio` exactly at `total_steps`. It is constant after
    that."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    lowest = config.min_lr_ratio
    if step >= total_steps:
        return config.lr * lowest
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
        return config.lr * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress)))
    left = min(1.0, (total_steps - step) / config.decay_of_wsd(total_steps))
    return config.lr * (lowest + (1 - lowest) * left)
