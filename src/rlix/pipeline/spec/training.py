"""The sections of a job spec that say how its models are trained and kept."""

from typing import Annotated, Literal

from pydantic import Field

from rlix.pipeline.spec.section import Beta, Count, Index, NonNegative, Positive, Seconds, Section
from rlix.pipeline.spec.source import ConversationsSpec


class GroupSpec(Section):
    """How the parameters learn whose names match a pattern such as `*.lm_head.*`; what is left out is as for all."""

    learning_rate: Positive | None = None
    weight_decay: NonNegative | None = None
    """Of all of them, norms and biases too."""


class OptimizerSpec(Section):
    """AdamW."""

    learning_rate: Positive = 1e-6
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    """Of all but norms and biases (parameters with fewer than two dimensions)."""
    groups: dict[str, GroupSpec] = Field(default_factory=dict)
    """By patterns of parameters' names, as `*` and `?` match them; the first that matches counts."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this L2 norm. A step whose norm is not a finite number is left out, on all devices,
    and counted in the metric `skipped_updates`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after its warm-up: as it is, or falling over the rest of the job."""
    warmup_updates: Index = 0
    """Optimizer steps over which the learning rate rises linearly to `learning_rate`."""
    final_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where linear and cosine end, as a share of `learning_rate`."""


class TrainingSpec(Section):
    """How training and log-probs fit in a device's memory. None of it changes what is learnt, except by rounding
    and by `dropout`."""

    executor: str = "fsdp2"
    """`fsdp2`, or a [backend of your own](engines.md#backends-of-your-own): `package.module:Class`."""
    micro_batch_tokens: Count = 16384
    """Most tokens, padding included, that a device takes through the model at once; gradients are summed up over as
    many such passes as a minibatch needs, and memory does not grow with the batch. A longer sequence goes alone."""
    packing: bool = False
    """Sequences one after the other in a row without padding, instead of those of like length padded to the longest.
    Pays with `attention: flash_attention_2`; with sdpa, attention over such a row costs the square of its length."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """flash_attention_2 needs a GPU, bfloat16 and the package flash-attn."""
    activation_checkpointing: bool = False
    """Keep only what enters each transformer block and compute the rest again in the backward pass: about a third
    more computation for a small part of the memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory, and bring it to the device for each optimizer step."""
    dropout: bool = False
    """Apply the model's own dropout, at the rates of its configuration (many have none), in training steps; log-probs
    never have any."""
    start_timeout_s: Seconds | None = None
    """Longest that the training processes may take to start and to read the weights. Default: 5 minutes, and a second
    for each 50 MB of them."""
    timeout_s: Seconds = 3600.0
    """Longest that one call of the training processes may take: an update of a minibatch, log-probs of a batch, a
    checkpoint; then the job, or of `multi_lora` the run, fails and says which device it waited for. As long may the
    job's own code compute between two such calls while it has their devices; then the job fails and says where."""


class WarmupSpec(Section):
    """Supervised steps on right answers before reinforcement learning starts."""

    steps: Count
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    conversations: ConversationsSpec | None = None
    """What it learns from in place of the source's right answers: supervised fine-tuning as a beginning."""


class CheckpointSpec(Section):
    every: Count = 50
    """Steps between checkpoints."""
    keep: Count = 2
    """How many of the newest stay on disk; the best one stays besides."""
    asynchronous: bool = True
    """Write while the next steps go on, from a second copy of the training state in host memory."""
