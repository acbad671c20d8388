"""Several rewards, each compared within its group before they are added up (GDPO, arXiv:2601.05242)."""

import torch

from rlix.pipeline.algorithms import Estimate, Grpo, group_relative_advantages, whiten


class Gdpo(Grpo):
    def estimate(self, samples, batch):
        size, counts = samples.group_size, samples.counts
        each = [group_relative_advantages(given, size, counts=counts) for given in samples.parts.values()]
        return Estimate(whiten(torch.stack(each).sum(dim=0), counts))
