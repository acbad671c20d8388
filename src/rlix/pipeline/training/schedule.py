"""Learning rate over optimizer steps."""

import math
from collections.abc import Callable

from rlix.pipeline.spec.training import OptimizerSpec


def learning_rate_factor(spec: OptimizerSpec, updates: int) -> Callable[[int], float]:
    """What `learning_rate` is multiplied by in each optimizer step, counted from 0, of `updates` in all."""

    def factor(update: int) -> float:
        if update < spec.warmup_updates:
            return (update + 1) / spec.warmup_updates
        progress = min(1.0, (update - spec.warmup_updates) / max(1, updates - spec.warmup_updates))
        fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[spec.schedule]
        return 1.0 - (1.0 - spec.final_learning_rate) * fall

    return factor
