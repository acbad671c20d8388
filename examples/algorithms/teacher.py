"""GRPO, and at each token how much more a larger model would have said it (arXiv:2306.13649)."""

from rlix.pipeline.algorithms import Estimate, Grpo, Needs
from rlix.pipeline.spec.algorithm import GrpoOptions


class Options(GrpoOptions):
    teacher: str  # a folder or a name on the hub; its tokenizer must be the policy's
    weight: float = 0.1


class Taught(Grpo):
    Options = Options
    kl_in_reward = True  # the teacher is no reference to stay near to in the loss

    @classmethod
    def needs(cls, options):
        return Needs(old_log_probs=True, reference=True, teacher=options.teacher)

    def estimate(self, samples, batch):
        better = batch["reference_log_probs"] - batch["old_log_probs"]  # 0 where there is no token of the policy's
        rewarded = super().estimate(samples, batch).advantages
        return Estimate(rewarded.unsqueeze(1) + self.options.weight * better)
