"""Masked reductions, and per-token quantities of logits computed in slices so that memory stays bounded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Aggregation = Literal["token", "sequence"]
Terms = tuple[Tensor, Mapping[str, Tensor]]
"""A micro-batch's part of the loss of the global batch, and metrics as means over the micro-batch's tokens."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token that a mask counts, 0 elsewhere: [rows, length - 1], float32. Entropies are in nats; gradients flow
    from both. Where a batch names several targets for a position, both are [rows, length - 1, targets]."""

    log_probs: Tensor
    entropies: Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is non-zero, over all elements or along `dim`.

    `values` and `mask` have the same shape. Values outside the mask are never read, not even when NaN or infinite.
    Where the mask selects nothing the result is 0 (with zero gradient).
    """
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    count = mask.bool().to(values.dtype)
    if dim is None:
        return kept.sum() / count.sum().clamp(min=1.0)
    return kept.sum(dim) / count.sum(dim).clamp(min=1.0)


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "token",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """One scalar of per-token `values` [batch, time] under `mask` [batch, time].

    `token`: every token of the batch weighs the same (DAPO, arXiv:2503.14476, eq. 8). `sequence`: the mean over the
    tokens of each sequence, then over the sequences that have any (GRPO, arXiv:2402.03300, eq. 3).

    `denominator` replaces the number of tokens (or sequences) of this batch. A rank that holds a slice of a larger
    batch passes (count over all ranks) / (number of ranks) when gradients are then averaged over the ranks, or the
    count over all ranks when they are summed: the gradient is then that of the whole batch, however it was split.
    """
    if aggregation == "token":
        total, count = torch.where(mask.bool(), values, torch.zeros_like(values)).sum(), mask.bool().sum()
    elif aggregation == "sequence":
        total, count = masked_mean(values, mask, dim=1).sum(), mask.bool().any(dim=1).sum()
    else:
        raise ValueError(f"aggregation is {aggregation!r}; it must be 'token' or 'sequence'")
    return total / (count.clamp(min=1) if denominator is None else denominator)


def token_log_probs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, slice_tokens: int = 4096) -> Tensor:
    """Log-probabilities of `tokens` [batch, time] under `logits` [batch, time, vocabulary]: float32 [batch, time].

    `logits[:, t]` must be the prediction *for* `tokens[:, t]`: shift before calling. Rows are taken `slice_tokens` at a
    time, and recomputed in the backward pass, so that no float32 copy of all logits exists at once.
    """

    def of_slice(rows: Tensor, ids: Tensor) -> Tensor:
        scaled = rows.float() / temperature
        return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)

    flat, ids = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)
    pairs = zip(flat.split(slice_tokens), ids.split(slice_tokens), strict=True)
    return torch.cat([_recomputed(of_slice, rows, part) for rows, part in pairs]).view(tokens.shape)


def entropy(logits: Tensor, *, temperature: float = 1.0, slice_tokens: int = 4096) -> Tensor:
    """Entropy in nats at each position of `logits` [batch, time, vocabulary]: float32 [batch, time]."""

    def of_slice(rows: Tensor) -> Tensor:
        log_p = (rows.float() / temperature).log_softmax(-1)
        # A token masked out with -inf has probability 0 and contributes nothing; 0 * -inf would be NaN.
        return -torch.where(log_p.isinf(), torch.zeros_like(log_p), log_p.exp() * log_p).sum(-1)

    flat = logits.reshape(-1, logits.shape[-1])
    return torch.cat([_recomputed(of_slice, rows) for rows in flat.split(slice_tokens)]).view(logits.shape[:-1])


def _recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and args[0].requires_grad):
        return function(*args)
    result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result
