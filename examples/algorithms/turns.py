"""A turn is worth what is paid from it on, compared with the group's turns of that number (arXiv:2505.11821)."""

import torch

from rlix.pipeline.algorithms import Estimate, Grpo, group_relative_advantages
from rlix.pipeline.batch import per_turn


class TurnCredit(Grpo):
    def estimate(self, samples, batch):
        worth = samples.turn_rewards.flip(1).cumsum(1).flip(1)  # [samples, most turns]
        turns = torch.tensor([len(sample.turns) for sample in samples.samples])
        each = [
            group_relative_advantages(worth[:, n], samples.group_size, counts=samples.counts & (turns > n))
            for n in range(worth.shape[1])
        ]
        return Estimate(per_turn(torch.stack(each, dim=1), samples, batch["mask"]))
