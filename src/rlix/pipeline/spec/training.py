"""The sections of a job spec that say how it trains, and what all sections have in common."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(gt=0)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class AlgorithmSpec(Section):
    name: Literal["grpo", "rloo", "reinforce_pp", "ppo", "dapo"] = "grpo"
    """ppo needs 'pipeline: actor_critic'; dapo changes the defaults of clip_high and resample_rounds."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Positive = 0.2
    """With dapo 0.28 unless given (clip-higher)."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the reference model, in the loss (in the reward with ppo and reinforce_pp); above 0 it needs
    `clusters.reference`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    normalize_by_std: bool = True
    aggregation: Literal["token", "sequence"] = "token"
    epochs: Count = 1
    """Passes over each step's completions."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    resample_rounds: Index = 0
    """How often groups whose rewards are all equal are replaced by groups of new prompts; with dapo 3 unless given."""
    overlong_buffer: Index = 0
    """Tokens before `rollout.max_new_tokens` over which a penalty grows from 0 to 1 (soft overlong punishment)."""
    discount: Share = 1.0
    """Of later rewards, per token (ppo, reinforce_pp)."""
    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalised advantage estimation (ppo)."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_dapo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == "dapo":
            return {"clip_high": 0.28, "resample_rounds": 3, **values}
        return values

    @property
    def kl_in_reward(self) -> bool:
        return self.name in ("ppo", "reinforce_pp")


class OptimizerSpec(Section):
    """AdamW."""

    learning_rate: Positive = 1e-6
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
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
    """Apply the model's own dropout in training steps; log-probs never have any."""


class CriticSpec(Section):
    """The value model of actor-critic training; it starts from the policy's weights with a new head."""

    learning_rate: Positive = 1e-5
    clip: Positive | None = 0.2
    """How far a prediction may move from its value before the update; null leaves it free."""


class AsynchronousSpec(Section):
    """Generating the next steps' trajectories while a step trains."""

    max_staleness: Count = 1
    """Oldest a token may be when it is trained on, in optimizer steps of the weights that produced it."""
    ahead: Count | None = None
    """How many steps beyond the one that trains may be generated; null: `max_staleness`."""
    on_stale: Literal["wait", "drop", "rescore"] = "wait"
    """wait: never run further ahead than the bound. drop: leave a trajectory with an older token out of the update.
    rescore: keep it, with its older tokens scored as if the policy that trains had produced them."""
    in_flight: Literal["continue", "finish"] = "continue"
    """What new weights do to trajectories that are being generated: they go on with them, or finish without them."""
    importance_cap: Positive = 2.0
    """Truncation of the importance weight of a token."""


class CheckpointSpec(Section):
    every: Count = 50
    """Steps between checkpoints."""
    keep: Count = 2
    """How many of the newest stay on disk."""
