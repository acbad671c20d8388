"""Log-probabilities and entropies from hidden states, without the logits of all tokens ever existing at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

LOGITS_AT_ONCE = 2**27
"""Tokens × vocabulary whose logits exist at a time: 512 MiB in float32, of which about three copies are needed."""


def chosen_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each of `tokens` [n], and the entropy in nats of what it was drawn from: float32 [n] each.

    The logits are `hidden` [n, width] times `weight` [vocabulary, width], plus `bias`, over `temperature`. They are
    computed `logits_at_once` at a time, in the dtype of the weight and then in float32, and again in the backward pass.
    Gradients flow from both results to `hidden`, `weight` and `bias`.
    """
    chunk = max(1, logits_at_once // weight.shape[0])
    result: tuple[Tensor, Tensor] = _ChosenScores.apply(hidden, weight, bias, tokens, temperature, chunk)
    return result


class _ChosenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        log_probs, entropies, normalizers = (hidden.new_empty(len(tokens), dtype=wide) for _ in range(3))
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperature, wide)
            normalizers[part] = logits.logsumexp(-1)
            log_p = logits.sub_(normalizers[part].unsqueeze(1))
            log_probs[part] = log_p.gather(1, tokens[part].unsqueeze(1)).squeeze(1)
            entropies[part] = torch.special.entr(log_p.exp_()).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizers, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalizers, entropies = ctx.saved_tensors
        needed = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if needed[0] else None
        # Thousands of chunks added up in bfloat16 would end where one more no longer changes the sum.
        wide = weight.dtype if len(tokens) <= ctx.chunk else normalizers.dtype
        to_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        to_bias = torch.zeros_like(bias, dtype=wide) if needed[2] else None
        for start in range(0, len(tokens), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[part], weight, bias, ctx.temperature, normalizers.dtype)
            log_p.sub_(normalizers[part].unsqueeze(1))
            upstream = of_log_probs[part].unsqueeze(1)
            # d log p(token) / d logits = [token] - p, and d entropy / d logits = -p (log p + entropy)
            factor = upstream + of_entropies[part].unsqueeze(1) * (log_p + entropies[part].unsqueeze(1))
            to_logits = log_p.exp_().mul_(factor).neg_()
            del factor
            to_logits.scatter_add_(1, tokens[part].unsqueeze(1), upstream)
            to_logits = to_logits.div_(ctx.temperature).to(weight.dtype)
            if to_hidden is not None:
                to_hidden[part] = to_logits @ weight
            if to_weight is not None:
                to_weight += to_logits.T @ hidden[part]
            if to_bias is not None:
                to_bias += to_logits.sum(0)
        narrow = [None if wide is None else wide.to(weight.dtype) for wide in (to_weight, to_bias)]
        return to_hidden, *narrow, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = linear(hidden, weight, bias).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)
