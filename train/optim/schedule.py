"""The learning rate as a pure function of the step, so that a resume needs nothing but the step."""

import math

from train.optim.config import OptimConfig


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The rate applied in optimizer step `step`, counted from 1.

    Linear warm-up reaches the peak exactly at `warmup_steps`; cosine (Loshchilov and Hutter 2017, equation 5) or, for
    wsd, a stable phase and a linear decay reach `min_lr_ratio` exactly at `total_steps`; constant afterwards."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    lowest = config.min_lr_ratio
    if step >= total_steps:
        return config.lr * lowest
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
        return config.lr * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress)))
    decay_steps = config.decay_steps or max(1, total_steps // 5)
    left = min(1.0, (total_steps - step) / decay_steps)
    return config.lr * (lowest + (1 - lowest) * left)
