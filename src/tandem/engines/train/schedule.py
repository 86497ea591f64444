"""The learning rate of each optimizer step."""

import math

from tandem.config.train_engine import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Warm-up rises linearly, so that step ``warmup_steps - 1`` has the peak (and step 0 is not lost at 0); then the schedule
    falls to ``min_lr_ratio`` of the peak, which the step after the last one would have.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shapes = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shapes[config.schedule])
