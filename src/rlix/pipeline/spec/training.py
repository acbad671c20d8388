"""The sections of a job spec that say how its models are trained and kept."""

from typing import Annotated

from pydantic import Field

from rlix.pipeline.spec.section import Beta, Count, NonNegative, Positive, Section


class OptimizerSpec(Section):
    """AdamW."""

    learning_rate: Positive = 1e-6
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0


class WarmupSpec(Section):
    """Supervised steps on right answers before reinforcement learning starts."""

    steps: Count
    batch_size: Count = 64
    learning_rate: Positive = 1e-3


class CheckpointSpec(Section):
    every: Count = 50
    """Steps between checkpoints."""
    keep: Count = 2
    """How many of the newest stay on disk."""
