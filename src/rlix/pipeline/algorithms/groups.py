"""Algorithms that compare the samples of a group."""

from typing import Any

import torch
from torch import Tensor

from rlix.pipeline.algorithms.advantages import group_relative_advantages, highest_covariance, rloo_advantages
from rlix.pipeline.algorithms.base import Algorithm, Estimate
from rlix.pipeline.algorithms.losses import PolicyLoss, capped_ratio_loss
from rlix.pipeline.algorithms.tensors import Aggregation
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.samples import Samples
from rlix.pipeline.spec.algorithm import (
    CispoOptions,
    ClipCovOptions,
    DapoOptions,
    DrGrpoOptions,
    GrpoOptions,
    GspoOptions,
    RlooOptions,
)


class Grpo(Algorithm):
    """Shao et al. 2024, arXiv:2402.03300; with `aggregation: token`, DAPO's loss, Yu et al. 2025, arXiv:2503.14476."""

    Options: Any = GrpoOptions

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        return Estimate(
            group_relative_advantages(
                self.rewards(samples),
                samples.group_size,
                counts=samples.counts,
                normalize_by_std=self.options.normalize_by_std,
            )
        )


class Dapo(Grpo):
    """GRPO with clip-higher: Yu et al. 2025, arXiv:2503.14476. Its dynamic sampling is `algorithm.resample_rounds`."""

    Options = DapoOptions


class DrGrpo(Algorithm):
    """Liu et al. 2025, arXiv:2503.20783: sums over tokens divided by a constant, the longest possible sample times the
    samples, so that a token's weight depends neither on its own sequence's length nor on the others'."""

    Options = DrGrpoOptions

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        rewards, counts = self.rewards(samples), samples.counts
        return Estimate(group_relative_advantages(rewards, samples.group_size, counts=counts, normalize_by_std=False))

    def denominator(self, mask: Tensor) -> float:
        return float(len(mask) * self.setting.longest)


class Rloo(Algorithm):
    """Ahmadian et al. 2024, arXiv:2402.14740; the KL of a whole sample is part of its reward (eq. 3 there)."""

    Options = RlooOptions
    kl_in_reward = True

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        rewards = self.rewards(samples)
        if (kl := self.kl(batch)) is not None:
            paid = torch.where(batch["mask"].bool(), kl, torch.zeros_like(kl)).sum(dim=1)
            rewards = rewards - self.options.kl_coefficient * paid
        return Estimate(rloo_advantages(rewards, samples.group_size, counts=samples.counts))


class Gspo(Grpo):
    """Zheng et al. 2025, arXiv:2507.18071: one clipped ratio for a whole sequence."""

    Options = GspoOptions

    per_sequence = True

    @property
    def aggregation(self) -> Aggregation:
        return "sequence"


class ClipCov(Grpo):
    """Cui et al. 2025, arXiv:2505.22617: which tokens is decided once, by the policy before the step."""

    Options = ClipCovOptions

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        options, mask, before = self.options, batch["mask"], batch["old_log_probs"]
        advantages = super().estimate(samples, batch).advantages.unsqueeze(1).expand_as(mask)
        chosen = highest_covariance(
            before,
            advantages,
            mask,
            share=options.covariance_share,
            low=options.covariance_low,
            high=options.covariance_high,
            seed=samples.learner or 0,
        )
        return Estimate(advantages.masked_fill(chosen, 0.0))


class Cispo(Grpo):
    """MiniMax-M1 2025, arXiv:2506.13585: the ratio is capped and carries no gradient, so that every token has one."""

    Options = CispoOptions

    def policy_loss(self, log_probs: Tensor, old: Tensor, batch: PolicyBatch, denominator: float) -> PolicyLoss:
        return capped_ratio_loss(
            log_probs,
            old,
            batch["advantages"],
            batch["mask"],
            cap=self.options.ratio_cap,
            denominator=denominator,
            weights=batch.get("importance"),
        )
