"""Estimates of KL divergence from sampled tokens."""

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) for tokens drawn from the policy; same shape as the inputs.

    With d = log_probs - reference_log_probs: `k1` = d (unbiased, high variance, may be negative); `k2` = d²/2 (biased,
    low variance; its gradient is the unbiased one of the KL); `k3` = exp(-d) - 1 + d (unbiased, never negative).

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return (-difference).expm1() + difference
    raise ValueError(f"estimator is {estimator!r}; it must be 'k1', 'k2' or 'k3'")
