"""What an algorithm is: what it needs to know of a batch, its advantages and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlix.pipeline.algorithms.advantages import overlong_penalty
from rlix.pipeline.algorithms.kl import KlEstimator, kl_estimate
from rlix.pipeline.algorithms.losses import PolicyLoss, clipped_policy_loss, importance_weights, mismatch
from rlix.pipeline.algorithms.tensors import Aggregation, Scores, Terms, aggregate, masked_mean
from rlix.pipeline.batch import PolicyBatch, policy_batch, stale_tokens, token_rewards
from rlix.pipeline.samples import End, Sample, Samples
from rlix.pipeline.spec.algorithm import AlgorithmSpec, GrpoOptions, Needs, needs_of
from rlix.pipeline.spec.named import where_defined


@dataclass(frozen=True, slots=True)
class Setting:
    """What an algorithm knows of its job: the most tokens that the policy can generate in a sample, and the keys of
    `algorithm` that go with any."""

    longest: int
    spec: AlgorithmSpec = field(default_factory=AlgorithmSpec)


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much better each sample [samples] or token [samples, length - 1] is than expected, and for a critic what its
    values should have been [samples, length - 1]; `metrics` of its own."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


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

    @classmethod
    def needs(cls, options: Any) -> Needs:
        """What the batch must hold for `estimate`, said before anything starts."""
        return needs_of(options, kl_in_reward=cls.kl_in_reward)

    # ---- what it learns from -----------------------------------------------------------------------------------

    def rewards(self, samples: Samples) -> Tensor:
        """As the policy learns from them, which metrics do not show: [samples]."""
        lengths = torch.tensor([sample.generated for sample in samples.samples])
        return samples.rewards + overlong_penalty(lengths, self.setting.longest, self.setting.spec.overlong_buffer)

    def token_rewards(self, samples: Samples, batch: PolicyBatch) -> Tensor:
        """The same token by token, where each turn was paid: [samples, length - 1]."""
        return token_rewards(samples, self.rewards(samples), batch["mask"])

    def learns_from(self, sample: Sample) -> bool:
        """Whether the loss sees it; those that it does not see are compared with all the same, where they count."""
        return sample.counts and not (self.setting.spec.mask_truncated and sample.end is End.LENGTH)

    # ---- what it computes --------------------------------------------------------------------------------------

    @abstractmethod
    def estimate(self, samples: Samples, batch: PolicyBatch) -> Estimate:
        """Of the samples, those of a group next to each other; `samples.counts` says which are compared at all.

        The batch has a row for each, and what `needs` asks for; the mask of who is not learnt from is empty.
        """

    def loss(self, scores: Scores, batch: PolicyBatch, denominator: float) -> Terms:
        """Of a part of a minibatch, on whatever device it is: those of all parts, each with the denominator of the
        whole, add up. The batch has its `advantages`, [rows] or [rows, length - 1], and, where the policy has moved
        since, its `old_log_probs`."""
        log_probs, old = scores.log_probs, batch.get("old_log_probs")
        result = self.policy_loss(log_probs, log_probs.detach() if old is None else old, batch, denominator)
        metrics, loss = {"clip_fraction": result.clip_fraction, "approx_kl": result.approx_kl}, result.loss
        if bonus := getattr(self.options, "entropy_coefficient", 0.0):
            loss = loss - bonus * aggregate(scores.entropies, batch["mask"], self.aggregation, denominator)
        reference = batch.get("reference_log_probs")
        if reference is None:
            return loss, metrics
        metrics["kl"] = masked_mean(kl_estimate(log_probs, reference, "k3"), batch["mask"])
        if self.kl_in_reward:
            return loss, metrics
        per_token = kl_estimate(log_probs, reference, self.kl_estimator)
        kl = aggregate(per_token, batch["mask"], self.aggregation, denominator)
        return loss + self.options.kl_coefficient * kl, metrics

    def policy_loss(self, log_probs: Tensor, old: Tensor, batch: PolicyBatch, denominator: float) -> PolicyLoss:
        """The part of `loss` that the advantages weigh."""
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
            dual_clip=getattr(self.options, "dual_clip", None),
        )

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

    # ---- a step, around what is scored -------------------------------------------------------------------------

    def begin(self, samples: Samples, pad_id: int) -> tuple[PolicyBatch, Needs]:
        """A row for each sample, without what is needed still."""
        needs = self.setting.spec.scored(self.needs(self.options), off_policy=samples.off_policy)
        return policy_batch(samples, pad_id, self.learns_from), needs

    def prepare(self, samples: Samples, batch: PolicyBatch) -> dict[str, float]:
        """Put what the losses read into a batch that has been scored: advantages, returns, weights; with metrics.

        Raises:
            TypeError: `estimate` has returned no advantage, or a row of them, for each sample.
        """
        estimate = _checked(self.estimate(samples, batch), self, len(samples))
        batch["advantages"] = estimate.advantages
        if estimate.returns is not None:
            batch["returns"] = estimate.returns
        if "old_log_probs" not in batch or "sampled_log_probs" not in batch:
            return dict(estimate.metrics)  # the only update compares with what was sampled, if anything does
        return {**estimate.metrics, **self.weigh(samples, batch, batch.pop("sampled_log_probs"))}

    def weigh(self, samples: Samples, batch: PolicyBatch, sampled: Tensor) -> dict[str, float]:
        """Compare with what whoever generated the tokens saw, and weight them for it where that is asked for."""
        old, mask, spec = batch["old_log_probs"], batch["mask"], self.setting.spec
        found = {name: float(value) for name, value in mismatch(old, sampled, mask).items()} if mask.any() else {}
        if (cap := spec.cap(samples.off_policy)) is None:
            return found
        weights = importance_weights(
            old,
            sampled,
            mask * ~stale_tokens(samples, mask),
            cap=cap,
            floor=spec.importance_floor,
            level=spec.importance_level,
            beyond=spec.importance_beyond,
        )
        batch["importance"] = weights
        if mask.any():
            found["importance"] = float(masked_mean(weights, mask))
        if mask.any() and spec.importance_beyond == "drop":
            found["importance_dropped"] = float(masked_mean((weights == 0).float(), mask))
        return found


def _checked(found: Any, algorithm: Algorithm, samples: int) -> Estimate:
    given = found.advantages if isinstance(found, Estimate) else found
    shape = given.shape if isinstance(given, Tensor) else None
    if not isinstance(found, Estimate) or shape is None or shape[:1] != (samples,) or len(shape) > 2:
        what = type(found).__name__ if shape is None else f"{type(found).__name__} of shape {list(shape)}"
        raise TypeError(
            f"{type(algorithm).__name__}.estimate returned {what}; it must be an Estimate with an advantage, or "
            f"a row of them, for each of {samples} samples{where_defined(type(algorithm).estimate)}"
        )
    return found
