"""Algorithms that give every token a return of its own; the KL to the reference is a cost per token."""

from rlix.pipeline.algorithms.advantages import gae, reinforce_plus_plus_advantages, rewards_less_kl, whiten
from rlix.pipeline.algorithms.base import Algorithm, Estimate
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.samples import Samples
from rlix.pipeline.spec.algorithm import DistillOptions, PpoOptions, ReinforceOptions


class ReinforcePlusPlus(Algorithm):
    """Hu et al. 2025, arXiv:2501.03262."""

    Options = ReinforceOptions
    kl_in_reward = True

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        options = self.options
        advantages = reinforce_plus_plus_advantages(
            self.token_rewards(samples, batch),
            batch["mask"],
            self.kl(batch),
            kl_coefficient=options.kl_coefficient,
            discount=options.discount,
        )
        return Estimate(advantages)


class Distill(Algorithm):
    """On-policy distillation: the policy gradient of KL(policy || teacher) at each token that the policy sampled, as in
    Gu et al. 2023, arXiv:2306.08543 (without what later tokens cost), on its own samples as in Agarwal et al. 2023,
    arXiv:2306.13649. The metric `kl` is the divergence from the teacher."""

    Options = DistillOptions
    kl_in_reward = True

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        return Estimate(batch["reference_log_probs"] - batch["old_log_probs"])


class Ppo(Algorithm):
    """Schulman et al. 2017, arXiv:1707.06347, with generalised advantage estimation and, with a reference model, a
    per-token KL penalty in the reward (Ouyang et al. 2022, arXiv:2203.02155)."""

    Options = PpoOptions
    kl_in_reward = True

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        options, mask = self.options, batch["mask"]
        per_token = rewards_less_kl(self.token_rewards(samples, batch), mask, self.kl(batch), options.kl_coefficient)
        advantages, returns = gae(
            per_token, batch["values"], mask, discount=options.discount, smoothing=options.smoothing
        )
        return Estimate(whiten(advantages, mask), returns)
