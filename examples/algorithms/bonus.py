"""More entropy is better (Williams and Peng 1991)."""

from rlix.pipeline.algorithms import Grpo, aggregate


class EntropyBonus(Grpo):
    def loss(self, scores, batch, denominator):
        loss, metrics = super().loss(scores, batch, denominator)
        return loss - 0.01 * aggregate(scores.entropies, batch["mask"], "token", denominator), metrics
