"""Reinforcement-learning arithmetic as pure functions on tensors; each names its source."""

from rlix.pipeline.algorithms.advantages import (
    gae,
    group_relative_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
)
from rlix.pipeline.algorithms.kl import kl_estimate
from rlix.pipeline.algorithms.losses import PolicyLoss, clipped_policy_loss, value_loss
from rlix.pipeline.algorithms.tensors import aggregate, entropy, masked_mean, token_log_probs

__all__ = [
    "PolicyLoss",
    "aggregate",
    "clipped_policy_loss",
    "entropy",
    "gae",
    "group_relative_advantages",
    "kl_estimate",
    "masked_mean",
    "reinforce_plus_plus_advantages",
    "rloo_advantages",
    "token_log_probs",
    "value_loss",
]
