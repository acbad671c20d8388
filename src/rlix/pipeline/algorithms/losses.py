"""Losses of the policy and of the critic."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlix.pipeline.algorithms.tensors import Aggregation, aggregate, masked_mean


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` carries the gradient; the rest are detached scalars for the metrics."""

    loss: Tensor
    clip_fraction: Tensor  # share of tokens whose update the clip stopped
    approx_kl: Tensor  # k3 estimate of KL(old || new)


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = "token",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
    per_sequence: bool = False,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), reduced to a scalar.

    `log_probs`, `old_log_probs` and `mask` are [batch, time] (mask: the tokens the policy generated); `advantages` is
    [batch, time], or [batch] for one per sequence. `aggregation` and `denominator` are those of `aggregate`. `weights`
    [batch, time], without gradient, multiply each token's term: see `importance_weights`. `per_sequence`: one ratio for
    a sequence, see `sequence_log_ratio`, instead of one for each token. `dual_clip` bounds the ratio where the
    advantage is negative, too, so that what has become much likelier is not pushed down without bound.

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher, Yu et al.
    2025, arXiv:2503.14476, section 3.1; dual_clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    # Positions outside the mask may hold anything; make them neutral before exp can overflow into NaN gradients.
    difference = torch.where(mask.bool(), log_probs - old_log_probs, torch.zeros_like(log_probs))
    ratio = (sequence_log_ratio(log_probs, old_log_probs, mask) if per_sequence else difference).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    stopped, terms = clipped < free, -torch.minimum(free, clipped)
    if dual_clip is not None:
        most = -dual_clip * advantages
        bounded = (advantages < 0) & (terms > most)
        stopped, terms = stopped | bounded, torch.where(bounded, most, terms)
    loss = aggregate(terms if weights is None else terms * weights, mask, aggregation, denominator)
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clip_fraction=masked_mean(stopped.to(ratio.dtype), mask),
            approx_kl=masked_mean(difference.expm1() - difference, mask),
        )


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log of GSPO's ratio, the mean of log_probs - old_log_probs over a sequence, at each of its tokens: [batch, time].

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7.
    """
    difference = torch.where(mask.bool(), log_probs - old_log_probs, torch.zeros_like(log_probs))
    return masked_mean(difference, mask, dim=1).unsqueeze(1).expand_as(log_probs)


def capped_ratio_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """-clip(ratio, floor, cap) * A * log_prob with no gradient through the ratio, a mean over tokens; shapes as in
    `clipped_policy_loss`.

    Source: CISPO, MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5 (with 1 + eps_high = cap and 1 - eps_low = floor).
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    difference = torch.where(mask.bool(), log_probs - old_log_probs, torch.zeros_like(log_probs))
    ratio = difference.detach().exp()
    terms = (
        -ratio.clamp(min=floor, max=cap) * advantages * torch.where(mask.bool(), log_probs, torch.zeros_like(log_probs))
    )
    loss = aggregate(terms if weights is None else terms * weights, mask, "token", denominator)
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clip_fraction=masked_mean(((ratio > cap) | (ratio < floor)).to(ratio.dtype), mask),
            approx_kl=masked_mean(difference.expm1() - difference, mask),
        )


def quadratic_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float,
    denominator: float | Tensor | None = None,
) -> PolicyLoss:
    """-(A * log_prob - beta / 2 * (log_prob - old_log_prob)²), a mean over tokens; shapes as in `clipped_policy_loss`.

    Source: DRO, Richemond et al. 2024, arXiv:2405.19107, eq. 4, token by token and with an advantage in place of the
    reward less its value.
    """
    difference = torch.where(mask.bool(), log_probs - old_log_probs, torch.zeros_like(log_probs))
    terms = 0.5 * beta * difference.square() - advantages * torch.where(mask.bool(), log_probs, difference)
    loss = aggregate(terms, mask, "token", denominator)
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clip_fraction=torch.zeros_like(loss),
            approx_kl=masked_mean(difference.expm1() - difference, mask),
        )


def importance_weights(
    log_probs: Tensor,
    sampled_log_probs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    level: Literal["token", "sequence"] = "token",
    beyond: Literal["cut", "drop"] = "cut",
) -> Tensor:
    """exp(log_probs - sampled_log_probs) within its bounds, under `mask`, 1 outside; [batch, time], without gradient.

    Corrects for tokens that another policy than `log_probs`' sampled. `level` sequence: each token of a sequence has
    the product over all of them. A ratio above `cap` or below `floor` is `cut` to the bound, which bounds the variance
    at the price of bias, or its tokens are `drop`ped: they weigh 0.

    Source: truncated importance sampling, Ionides 2008, doi:10.1198/106186008X320456; as a factor of PPO's loss, with
    the policy before the update in the ratio: Hilton et al. 2021, arXiv:2110.00641 (decoupled PPO). Dropped by token:
    IcePop, Ling team 2025, arXiv:2510.18855; by sequence: Liu et al. 2025, "When speed kills stability".
    """
    difference = torch.where(mask.bool(), log_probs - sampled_log_probs, torch.zeros_like(log_probs)).detach()
    if level == "sequence":
        difference = torch.where(mask.bool(), difference.sum(dim=1, keepdim=True), torch.zeros_like(difference))
    ratio = difference.exp()
    if beyond == "cut":
        return torch.where(mask.bool(), ratio.clamp(min=floor, max=cap), torch.ones_like(ratio))
    inside = ~mask.bool() | ((ratio >= floor) & (ratio <= cap))
    return torch.where(inside, ratio, torch.zeros_like(ratio))


def mismatch(log_probs: Tensor, sampled_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the policy that samples is from the one that trains, as metrics: of tokens that the first one drew, an
    estimate of KL(sampler || trainer) (k3), and how many times more or less likely the second one finds any of them."""
    with torch.no_grad():
        difference = torch.where(mask.bool(), log_probs - sampled_log_probs, torch.zeros_like(log_probs))
        kl = masked_mean(difference.expm1() - difference, mask)
        return {"mismatch_kl": kl, "mismatch_ratio_max": difference.abs().max().exp()}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    aggregation: Aggregation = "token",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Half the squared error of the critic, the worse of the free and the clipped prediction; a scalar.

    `values`, `old_values`, `returns` and `mask` are [batch, time]. `clip` bounds how far a prediction may move from
    `old_values`; None leaves it free.

    Source: the PPO implementation of Dhariwal et al. 2017 (OpenAI Baselines, ppo2).
    """
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * aggregate(error, mask, aggregation, denominator)
