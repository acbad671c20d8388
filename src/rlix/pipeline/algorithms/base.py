"""What an algorithm is: what it needs to know of a batch, its advantages and its loss."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlix.pipeline.algorithms.kl import KlEstimator, kl_estimate
from rlix.pipeline.algorithms.losses import PolicyLoss, clipped_policy_loss
from rlix.pipeline.algorithms.tensors import Aggregation, Terms, aggregate, masked_mean
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.spec.algorithm import CriticSpec, GrpoOptions, critic_of, needs_reference


@dataclass(frozen=True, slots=True)
class Setting:
    """What an algorithm knows of its job: samples per group, and the most tokens the policy can generate in one."""

    group_size: int
    longest: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much better each sample [samples] or token [samples, length - 1] is than expected, and for a critic what its
    values should have been [samples, length - 1]."""

    advantages: Tensor
    returns: Tensor | None = None


class Algorithm(ABC):
    """Says what is learnt from a batch. One object serves the pipeline and, sent there, every training worker.

    `Options` (a pydantic model or a dataclass) checks `algorithm.options` of the job. Options `kl_coefficient` above 0
    and `critic` bring a reference model and a critic; `clip_low`, `clip_high`, `kl_estimator` (k3; of a KL in the loss)
    and `aggregation` (token) are those of the methods below.
    """

    Options: Any = GrpoOptions
    kl_in_reward = False
    """Whether `estimate` makes the KL to the reference part of the reward; else it is a term of the loss."""
    per_sequence = False
    """Whether one clipped ratio holds for all tokens of a sequence."""

    def __init__(self, options: Any, setting: Setting) -> None:
        self.options = options
        self.setting = setting

    # ---- what it needs -----------------------------------------------------------------------------------------

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether `estimate` reads `old_log_probs`. The loss gets them whenever the policy has moved since."""
        return self.kl_in_reward and self.needs_reference

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold `reference_log_probs`."""
        return needs_reference(self.options)

    @property
    def critic(self) -> CriticSpec | None:
        """The critic whose `values` the batch must hold, if any."""
        return critic_of(self.options)

    # ---- what it computes --------------------------------------------------------------------------------------

    @abstractmethod
    def estimate(self, rewards: Tensor, counts: Tensor, batch: PolicyBatch) -> Estimate:
        """Of `rewards` [samples]; `counts` (bool) says which are compared at all. The mask of others is empty.

        `batch["rewards"]` has the same token by token: where each turn of a sample was paid.
        """

    def policy_loss(self, log_probs: Tensor, old: Tensor, batch: PolicyBatch, denominator: float) -> PolicyLoss:
        """The loss without its KL term, for a part of a minibatch, on whatever device it is."""
        return clipped_policy_loss(
            log_probs,
            old,
            batch["advantages"],
            batch["mask"],
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
            aggregation=self.aggregation,
            denominator=denominator,
            weights=batch.get("importance"),
            per_sequence=self.per_sequence,
        )

    def loss(self, log_probs: Tensor, batch: PolicyBatch, denominator: float) -> Terms:
        """Of a part of a minibatch: those of all parts, each with the denominator of the whole, add up."""
        old = batch.get("old_log_probs")
        result = self.policy_loss(log_probs, log_probs.detach() if old is None else old, batch, denominator)
        metrics = {"clip_fraction": result.clip_fraction, "approx_kl": result.approx_kl}
        reference = batch.get("reference_log_probs")
        if reference is None:
            return result.loss, metrics
        metrics["kl"] = masked_mean(kl_estimate(log_probs, reference, "k3"), batch["mask"])
        if self.kl_in_reward:
            return result.loss, metrics
        per_token = kl_estimate(log_probs, reference, self.kl_estimator)
        kl = aggregate(per_token, batch["mask"], self.aggregation, denominator)
        return result.loss + self.options.kl_coefficient * kl, metrics

    def denominator(self, mask: Tensor) -> float:
        """What the sum over a minibatch with `mask` [rows, length - 1] is divided by."""
        return float(mask.sum() if self.aggregation == "token" else mask.any(dim=1).sum())

    @property
    def aggregation(self) -> Aggregation:
        given: Aggregation = getattr(self.options, "aggregation", "token")
        return given

    @property
    def kl_estimator(self) -> KlEstimator:
        given: KlEstimator = getattr(self.options, "kl_estimator", "k3")
        return given

    def kl(self, batch: PolicyBatch) -> Tensor | None:
        """Per token, what a reward pays for being away from the reference before the update, where the batch has one:
        k1, the only estimate that is a penalty when no gradient runs through it (arXiv:2510.01555)."""
        if "reference_log_probs" not in batch:
            return None
        return kl_estimate(batch["old_log_probs"], batch["reference_log_probs"], "k1")


def estimate_of(algorithm: Algorithm, rewards: Tensor, counts: Tensor, batch: PolicyBatch) -> Estimate:
    """What the algorithm estimates. Raises TypeError when it is not an advantage, or a row of them, of each sample."""
    found: Any = algorithm.estimate(rewards, counts, batch)
    given = found.advantages if isinstance(found, Estimate) else found
    shape = given.shape if isinstance(given, Tensor) else None
    if not isinstance(found, Estimate) or shape is None or shape[:1] != rewards.shape or len(shape) > 2:
        what = type(found).__name__ if shape is None else f"{type(found).__name__} of shape {list(shape)}"
        raise TypeError(
            f"{type(algorithm).__name__}.estimate returned {what}; it must be an Estimate with an advantage, or "
            f"a row of them, for each of {len(rewards)} samples"
        )
    return found
