"""Losses as their papers write them: one process, one pass over the whole batch, plain PyTorch, nothing of rlix.

Every function takes the whole [rows, length - 1] tensors of a batch and returns a scalar with gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 4


@dataclass(frozen=True)
class Batch:
    """`lengths`: of prompt and whole sequence, in tokens; the rest is made up at random."""

    ids: Tensor
    prompts: list[int]
    totals: list[int]
    rewards: Tensor
    old: Tensor
    reference: Tensor
    old_values: Tensor
    importance: Tensor

    @property
    def mask(self) -> Tensor:
        """[rows, length - 1]: whether the next token is one of the answer."""
        mask = torch.zeros(self.ids.shape[0], self.ids.shape[1] - 1)
        for row, (prompt, total) in enumerate(zip(self.prompts, self.totals, strict=True)):
            mask[row, prompt - 1 : total - 1] = 1.0
        return mask


def random_batch(rows: int = 8, vocabulary: int = 17, seed: int = 0) -> Batch:
    """Rows of very different lengths."""
    source = torch.Generator().manual_seed(seed)
    prompts = [2 + row % 3 for row in range(rows)]
    totals = [prompt + 1 + (7 * row) % 13 for row, prompt in enumerate(prompts)]
    shape = (rows, max(totals))
    ids = torch.randint(3, vocabulary, shape, generator=source)
    for row, total in enumerate(totals):
        ids[row, total:] = 0
    noise = [torch.randn(shape[0], shape[1] - 1, generator=source) for _ in range(4)]
    return Batch(
        ids=ids,
        prompts=prompts,
        totals=totals,
        rewards=torch.rand(rows, generator=source),
        old=-2.8 + 0.3 * noise[0],
        reference=-2.8 + 0.3 * noise[1],
        old_values=0.3 * noise[2],
        importance=noise[3].exp().clamp(max=2.0),
    )


def token_log_probs(model: torch.nn.Module, ids: Tensor, temperature: float) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def rewards_less_kl(batch: Batch, kl_coefficient: float) -> Tensor:
    """RLOO: a sample's reward is what it got less the log-ratio of the old policy to the reference, summed."""
    return batch.rewards - kl_coefficient * ((batch.old - batch.reference) * batch.mask).sum(dim=1)


def group_advantages(rewards: Tensor, *, leave_one_out: bool = False, by_std: bool = True) -> Tensor:
    """[rows]: each reward against its group of four."""
    result = []
    for group in rewards.split(GROUP):
        for k, reward in enumerate(group):
            if leave_one_out:
                others = torch.cat([group[:k], group[k + 1 :]])
                result.append(reward - others.mean())
            else:
                result.append((reward - group.mean()) / (group.std() if by_std else 1.0))
    return torch.stack(result)


def normalised(values: Tensor, mask: Tensor) -> Tensor:
    chosen = values[mask.bool()]
    return (values - chosen.mean()) / chosen.std(correction=0) * mask


def discounted_returns(batch: Batch, kl_coefficient: float, discount: float) -> Tensor:
    """REINFORCE++: reward at the end, the log-ratio of the old policy to the reference as a cost of each token."""
    kl = batch.old - batch.reference
    result = torch.zeros_like(batch.old)
    for row, (prompt, total) in enumerate(zip(batch.prompts, batch.totals, strict=True)):
        running = 0.0
        for t in range(total - 2, prompt - 2, -1):
            reward = float(batch.rewards[row]) if t == total - 2 else 0.0
            running = reward - kl_coefficient * float(kl[row, t]) + discount * running
            result[row, t] = running
    return result


def generalised_advantages(batch: Batch, kl_coefficient: float, discount: float, smoothing: float) -> Tensor:
    """PPO: the same rewards, against the old values."""
    kl = batch.old - batch.reference
    result = torch.zeros_like(batch.old)
    for row, (prompt, total) in enumerate(zip(batch.prompts, batch.totals, strict=True)):
        running, after = 0.0, 0.0
        for t in range(total - 2, prompt - 2, -1):
            reward = float(batch.rewards[row]) if t == total - 2 else 0.0
            value = float(batch.old_values[row, t])
            delta = reward - kl_coefficient * float(kl[row, t]) + discount * after - value
            running = delta + discount * smoothing * running
            after = value
            result[row, t] = running
    return result


def mean(terms: Tensor, mask: Tensor, aggregation: str) -> Tensor:
    if aggregation == "token":
        return terms[mask.bool()].mean()
    return torch.stack([row[chosen.bool()].mean() for row, chosen in zip(terms, mask, strict=True)]).mean()


def reference_kl(log_probs: Tensor, batch: Batch) -> Tensor:
    """k3 of each token."""
    d = log_probs - batch.reference
    return torch.exp(-d) - 1 + d


def policy_loss(
    log_probs: Tensor,
    batch: Batch,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    aggregation: str,
    kl_coefficient: float,
) -> Tensor:
    """GRPO, DAPO, RLOO, REINFORCE++ and PPO; each token weighs as `batch.importance` says."""
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio = (log_probs - batch.old).exp()
    terms = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages) * batch.importance
    kl = reference_kl(log_probs, batch)
    return mean(terms, batch.mask, aggregation) + kl_coefficient * mean(kl, batch.mask, aggregation)


def dr_grpo_loss(
    log_probs: Tensor, batch: Batch, advantages: Tensor, *, clip: float, longest: int, kl_coefficient: float
) -> Tensor:
    ratio, advantages = (log_probs - batch.old).exp(), advantages[:, None]
    terms = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages) * batch.importance
    every = (terms + kl_coefficient * reference_kl(log_probs, batch))[batch.mask.bool()]
    return every.sum() / (len(batch.ids) * longest)


def gspo_loss(
    log_probs: Tensor, batch: Batch, advantages: Tensor, *, low: float, high: float, kl_coefficient: float
) -> Tensor:
    """One ratio for a sequence: the geometric mean of its tokens'."""
    losses = []
    for row, chosen in enumerate(batch.mask.bool()):
        ratio = (log_probs[row] - batch.old[row])[chosen].mean().exp()
        term = torch.min(ratio * advantages[row], ratio.clamp(1 - low, 1 + high) * advantages[row])
        kl = reference_kl(log_probs, batch)[row][chosen].mean()
        losses.append(kl_coefficient * kl - term * batch.importance[row][chosen].mean())
    return torch.stack(losses).mean()


def cispo_loss(log_probs: Tensor, batch: Batch, advantages: Tensor, *, cap: float, kl_coefficient: float) -> Tensor:
    """The capped ratio is a weight without gradient."""
    weight = (log_probs - batch.old).exp().clamp(max=cap).detach() * batch.importance
    terms = -weight * advantages[:, None] * log_probs + kl_coefficient * reference_kl(log_probs, batch)
    return mean(terms, batch.mask, "token")


def critic_loss(values: Tensor, batch: Batch, targets: Tensor, *, clip: float, aggregation: str) -> Tensor:
    near = torch.clamp(values, batch.old_values - clip, batch.old_values + clip)
    return 0.5 * mean(torch.max((values - targets) ** 2, (near - targets) ** 2), batch.mask, aggregation)
