"""Reinforcement-learning arithmetic as pure functions on tensors; each names its source."""

from rlix.pipeline.algorithms.advantages import (
    gae,
    group_relative_advantages,
    groups_with_spread,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    rewards_less_kl,
    rloo_advantages,
    whiten,
)
from rlix.pipeline.algorithms.base import Algorithm, Estimate, Setting
from rlix.pipeline.algorithms.given import Dpo, Sft
from rlix.pipeline.algorithms.groups import Cispo, ClipCov, Dapo, DrGrpo, Grpo, Gspo, Rloo
from rlix.pipeline.algorithms.kl import kl_estimate
from rlix.pipeline.algorithms.losses import (
    PolicyLoss,
    capped_ratio_loss,
    clipped_policy_loss,
    importance_weights,
    mismatch,
    sequence_log_ratio,
    value_loss,
)
from rlix.pipeline.algorithms.returns import Distill, Ppo, ReinforcePlusPlus
from rlix.pipeline.algorithms.tensors import Scores, aggregate, entropy, masked_mean, token_log_probs
from rlix.pipeline.spec.algorithm import Needs

__all__ = [
    "Algorithm",
    "Cispo",
    "ClipCov",
    "Dapo",
    "Distill",
    "Dpo",
    "DrGrpo",
    "Estimate",
    "Grpo",
    "Gspo",
    "Needs",
    "PolicyLoss",
    "Ppo",
    "ReinforcePlusPlus",
    "Rloo",
    "Scores",
    "Setting",
    "Sft",
    "aggregate",
    "capped_ratio_loss",
    "clipped_policy_loss",
    "entropy",
    "gae",
    "group_relative_advantages",
    "groups_with_spread",
    "importance_weights",
    "kl_estimate",
    "masked_mean",
    "mismatch",
    "overlong_penalty",
    "reinforce_plus_plus_advantages",
    "rewards_less_kl",
    "rloo_advantages",
    "sequence_log_ratio",
    "token_log_probs",
    "value_loss",
    "whiten",
]
