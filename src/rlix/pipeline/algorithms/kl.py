"""Estimates of KL divergence from sampled tokens."""

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) for tokens drawn from the policy; same shape as the inputs.

    With d = log_probs - reference_log_probs: `k1` = d (unbiased, high variance, may be negative); `k2` = d²/2 (biased,
    low variance); `k3` = exp(-d) - 1 + d (unbiased, never negative). What is an estimate of the KL need not have its
    gradient. As a term of a loss, k2 has that of KL(policy || reference), k3 that of KL(reference || policy), and k1
    none. As a cost in a reward, where it is a number without a gradient, k1 has that of KL(policy || reference); k2 and
    k3 charge for what the policy says too rarely as for what it says too often, and push away.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; of the gradients
    arXiv:2510.01555 and arXiv:2512.21852.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return (-difference).expm1() + difference
    raise ValueError(f"estimator is {estimator!r}; it must be 'k1', 'k2' or 'k3'")
