"""Sampling by counter: the draw for a token depends on (seed, token position) and on nothing else.

A stateful generator would make a trajectory depend on which worker drew before, in which batch. Here the uniform number
for position p of the stream `seed` is a hash of both, so a trajectory that is interrupted and goes on elsewhere draws
what it would have drawn.
"""

import torch
from torch import Tensor

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of
# Vigna's reference implementation, written as two's complement because torch has no unsigned arithmetic.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64
_UNIT = 2.0**-53


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64, one per (seed, position); both int64 of the same shape."""
    return (_mix(_mix(seed) + (position + 1) * _GAMMA) >> 11 & (2**53 - 1)).double() * _UNIT


def sample(
    logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: (rows, vocabulary), any float type.
        seed, position: (rows,) int64: the stream of each row and how many tokens of it were drawn before.
        temperature: (rows,) float; 0 is greedy (the first of equal maxima).
        top_p: (rows,) float in (0, 1]; 1 keeps everything.
        top_k: (rows,) int64; 0 keeps everything. Applied before top-p, which looks at what top-k left.

    Returns:
        tokens (rows,) int64, and their log-probabilities (rows,) float32 under softmax(logits), i.e. at temperature 1
        and unfiltered.
    """
    logits = logits.float()
    greedy = logits.argmax(-1)
    if bool((temperature > 0).any()):
        scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0).double()[:, None]
        probs = _filter(torch.softmax(scaled, -1), top_p.double(), top_k)
        cumulative = probs.cumsum(-1)
        # The draw is scaled by the kept mass instead of dividing every probability by it.
        target = uniform(seed, position)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
        drawn = torch.minimum(drawn, _last_positive(probs))
        tokens = torch.where(temperature > 0, drawn, greedy)
    else:
        tokens = greedy
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    return tokens, logprobs


def _filter(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what top-k, then top-p (of what top-k left), remove; ties at the edge keep the lower token id."""
    if not bool(((top_k > 0) | (top_p < 1)).any()):
        return probs
    ordered, order = probs.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept_k = (rank < torch.where(top_k > 0, top_k, probs.shape[-1])[:, None]).double() * ordered
    before = kept_k.cumsum(-1) - kept_k
    keep_p = (before < (top_p[:, None] * kept_k.sum(-1, keepdim=True))) | (top_p >= 1)[:, None]
    return torch.zeros_like(probs).scatter(1, order, kept_k * keep_p)


def _last_positive(probs: Tensor) -> Tensor:
    """Index of the last token with any probability: rounding must not push a draw beyond it."""
    size = probs.shape[-1]
    return size - 1 - (probs > 0).flip(-1).int().argmax(-1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's >> keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
