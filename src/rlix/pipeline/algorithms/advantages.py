"""How much better than expected an action was."""

import torch
from torch import Tensor

from rlix.pipeline.algorithms.tensors import masked_mean

_NO_SPREAD = 1e-6  # a group whose rewards differ by less than rounding error carries no signal


def group_relative_advantages(
    rewards: Tensor, group_size: int, *, counts: Tensor | None = None, normalize_by_std: bool = True
) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation: [groups * group_size].

    `rewards` is [groups * group_size], the samples of one prompt next to each other; `counts` (bool, of the same
    shape) says which are compared at all, default: all. The standard deviation is the unbiased one. Who does not count,
    a group of which fewer than two count, and one whose rewards are all equal get 0.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. Without the division: Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783.
    """
    groups = _in_groups(rewards, group_size)
    if counts is not None and not counts.all():
        return _among_those_that_count(groups, counts.view(-1, group_size), normalize_by_std).reshape(rewards.shape)
    centered = groups - groups.mean(dim=1, keepdim=True)
    if normalize_by_std:
        std = groups.std(dim=1, keepdim=True)
        has_spread = std > _NO_SPREAD
        centered = torch.where(has_spread, centered / torch.where(has_spread, std, torch.ones_like(std)), 0.0)
    return centered.reshape(rewards.shape)


def _among_those_that_count(groups: Tensor, valid: Tensor, normalize_by_std: bool) -> Tensor:
    number = valid.sum(dim=1, keepdim=True)
    mean = torch.where(valid, groups, 0.0).sum(dim=1, keepdim=True) / number.clamp(min=1)
    centered = torch.where(valid & (number > 1), groups - mean, 0.0)
    if normalize_by_std:
        std = (centered.square().sum(dim=1, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
        centered = torch.where(std > _NO_SPREAD, centered / std.clamp(min=_NO_SPREAD), 0.0)
    return centered


def rloo_advantages(rewards: Tensor, group_size: int, *, counts: Tensor | None = None) -> Tensor:
    """Reward minus the mean of the *other* samples of its group that count: [groups * group_size].

    Laid out as `rewards`. Who does not count, or is alone, gets 0.

    Source: RLOO, Ahmadian et al. 2024, arXiv:2402.14740, section 3.
    """
    groups = _in_groups(rewards, group_size)
    if counts is None or counts.all():
        others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
        return (groups - others).reshape(rewards.shape)
    valid = counts.view(-1, group_size)
    number = valid.sum(dim=1, keepdim=True)
    kept = torch.where(valid, groups, 0.0)
    others = (kept.sum(dim=1, keepdim=True) - kept) / (number - 1).clamp(min=1)
    return torch.where(valid & (number > 1), groups - others, 0.0).reshape(rewards.shape)


def reinforce_plus_plus_advantages(
    rewards: Tensor, mask: Tensor, kl: Tensor | None = None, *, kl_coefficient: float = 0.0, discount: float = 1.0
) -> Tensor:
    """Discounted return at each token, with the per-token KL as a cost, normalised over the whole batch: [batch, time].

    `rewards`, `mask` and `kl`, the penalty per token, are [batch, time]. Positions outside the mask are 0.

    Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262, section 3.
    """
    mask = mask.bool()
    per_token = rewards_less_kl(rewards, mask, kl, kl_coefficient)
    returns = torch.zeros_like(per_token)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(mask.shape[1])):
        running = torch.where(mask[:, t], per_token[:, t] + discount * running, running)
        returns[:, t] = running
    return whiten(returns, mask)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shifted and scaled to mean 0 and (biased) standard deviation 1 under `mask`; 0 outside: [batch, time].

    Source: advantage normalisation, Andrychowicz et al. 2020, arXiv:2006.05990, section 3.5 and appendix B.9.
    """
    mask = mask.bool()
    mean = masked_mean(values, mask)
    std = masked_mean((values - mean) ** 2, mask).sqrt()
    normalised = (values - mean) / std if std > _NO_SPREAD else values - mean
    return torch.where(mask, normalised, torch.zeros_like(normalised))


def groups_with_spread(rewards: Tensor, group_size: int, *, counts: Tensor | None = None) -> Tensor:
    """Which groups have rewards (of samples that count) that differ: bool [groups]. One without has no gradient.

    Source: dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2 (which filters by accuracy 0 or 1).
    """
    groups = _in_groups(rewards, group_size)
    if counts is None:
        return groups.amax(dim=1) - groups.amin(dim=1) > _NO_SPREAD
    valid = counts.view(-1, group_size)
    highest, lowest = (torch.where(valid, groups, filler) for filler in (-torch.inf, torch.inf))
    return highest.amax(dim=1) - lowest.amin(dim=1) > _NO_SPREAD


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length: [batch] for `lengths` [batch].

    Source: soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    if buffer <= 0:
        return torch.zeros(lengths.shape)
    return -((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def highest_covariance(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, *, share: float, low: float, high: float, seed: int
) -> Tensor:
    """Tokens whose gradient would cost the most entropy: bool, of the shape of `mask` [batch, time].

    Of those whose covariance of log-probability and advantage, (log p - mean) (A - mean), lies between `low` and
    `high`, a random `share` of all tokens, one at least. `advantages` is [batch, time], or [batch] for one per
    sequence.

    Source: Clip-Cov, Cui et al. 2025, arXiv:2505.22617, eq. 10 and 11.
    """
    mask, spread = mask.bool(), advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand_as(log_probs)
    covariance = (log_probs - masked_mean(log_probs, mask)) * (spread - masked_mean(spread, mask))
    among = (mask & (covariance > low) & (covariance < high)).flatten().nonzero().squeeze(1)
    count = max(int(share * int(mask.sum())), 1)
    order = torch.randperm(len(among), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(mask.numel(), dtype=torch.bool)
    chosen[among[order[:count]]] = True
    return chosen.view(mask.shape)


def rewards_less_kl(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """`rewards` per token minus the KL penalty, under `mask`; 0 outside; all [batch, time].

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4 (the KL penalty as part of the reward).
    """
    paid = rewards if kl is None else rewards - kl_coefficient * kl
    return torch.where(mask.bool(), paid, torch.zeros_like(paid))


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float = 1.0, smoothing: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets: (advantages, returns), each [batch, time].

    `rewards`, `values` and `mask` are [batch, time]; `values[:, t]` is the critic's estimate *before* token t. A
    sequence ends at its last masked-in position, after which the value is 0; positions outside the mask are skipped and
    come out 0. `smoothing` is lambda.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.
    """
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + discount * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + discount * smoothing * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], running, torch.zeros_like(running))
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def _in_groups(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}; comparing samples of one prompt needs at least 2")
    if rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [groups * {group_size}]")
    return rewards.view(-1, group_size)
