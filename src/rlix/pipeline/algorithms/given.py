"""Algorithms that learn from samples that are given, not generated."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlix.pipeline.algorithms.base import Algorithm, Estimate
from rlix.pipeline.algorithms.losses import PolicyLoss
from rlix.pipeline.algorithms.tensors import aggregate
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.samples import Samples
from rlix.pipeline.spec.algorithm import DpoOptions, SftOptions


class Sft(Algorithm):
    """Supervised fine-tuning: the mean negative log-likelihood, each token weighed by its sample's advantage, 1."""

    Options: Any = SftOptions

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        return Estimate(torch.ones(len(samples)))

    def policy_loss(self, log_probs: Tensor, old: Tensor, batch: PolicyBatch, denominator: float) -> PolicyLoss:
        mask = batch["mask"]
        terms = -batch["advantages"].unsqueeze(1) * torch.where(mask.bool(), log_probs, torch.zeros_like(log_probs))
        nothing = torch.zeros((), device=log_probs.device)
        return PolicyLoss(aggregate(terms, mask, self.aggregation, denominator), nothing, nothing)


class Dpo(Sft):
    """Rafailov et al. 2023, arXiv:2305.18290, eq. 7, by its gradient, in which a pair weighs beta sigmoid(-margin): so
    its two need not go through the model together. The margin is that before the step's only update. Metrics:
    `dpo_loss`, and `dpo_accuracy`, the share of pairs whose margin is positive.
    """

    Options = DpoOptions
    kl_in_reward = True

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        gained = batch["old_log_probs"] - batch["reference_log_probs"]
        chosen, rejected = torch.where(batch["mask"].bool(), gained, torch.zeros_like(gained)).sum(dim=1).view(-1, 2).T
        margin = self.options.beta * (chosen - rejected)
        weight = self.options.beta * torch.sigmoid(-margin)
        metrics = {"dpo_loss": float(-logsigmoid(margin).mean()), "dpo_accuracy": float((margin > 0).float().mean())}
        return Estimate(torch.stack([weight, -weight], dim=1).flatten(), metrics=metrics)

    def denominator(self, mask: Tensor) -> float:
        """The pairs."""
        return len(mask) / 2
