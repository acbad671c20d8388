"""The losses that a request may name, by the algorithms' own code. All are sums over tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlix.pipeline.algorithms.losses import capped_ratio_loss, clipped_policy_loss, quadratic_policy_loss
from rlix.pipeline.algorithms.tensors import aggregate
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import nearest

SUPERVISED = "cross_entropy"
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OPTIONS: dict[str, dict[str, float]] = {
    SUPERVISED: {},
    "importance_sampling": {},
    "ppo": CLIPS,
    "cispo": CLIPS,
    "gspo": CLIPS,
    "dro": {"beta": 0.05},
}
"""By the name of each loss, its options and what they are where a request does not say."""
REFUSED = {
    "stable_reinforce": "it needs what the sampler records about stability; use ppo, cispo or importance_sampling",
    "custom": "losses are not run here by their id; forward_backward_custom computes them in the client",
}


@dataclass(frozen=True, slots=True)
class RequestedLoss:
    """A loss by name; `of` computes it, here and in every training worker."""

    name: str
    options: Mapping[str, float]

    @classmethod
    def named(cls, name: str, options: Mapping[str, float | str]) -> "RequestedLoss":
        """Raises SpecError: there is no such loss, or it has no such option."""
        if name in REFUSED:
            raise SpecError(f"loss_fn {name!r} is refused: {REFUSED[name]}")
        if name not in OPTIONS:
            raise SpecError(f"there is no loss_fn {name!r}{nearest(name, OPTIONS)}; there are {', '.join(OPTIONS)}")
        known = OPTIONS[name]
        if unknown := sorted(options.keys() - known.keys()):
            raise SpecError(f"loss_fn {name!r} has no option {unknown[0]!r}; it has {sorted(known) or 'none'}")
        numbers = {key: float(value) for key, value in options.items() if not isinstance(value, str)}
        if wrong := [key for key in options if not math.isfinite(numbers.get(key, math.nan))]:
            raise SpecError(f"option {wrong[0]!r} of loss_fn {name!r} must be a finite number")
        return cls(name, {**known, **numbers})

    @property
    def inputs(self) -> tuple[str, ...]:
        """What each token needs besides its target."""
        return ("weights",) if self.name == SUPERVISED else ("logprobs", "advantages")

    def of(self, log_probs: Tensor, part: Mapping[str, Tensor], denominator: float) -> Tensor:
        """The sum over the tokens under the mask of a part of a batch, over `denominator`.

        `log_probs` and the inputs of the loss in `part` are [rows, length - 1], or [.., targets] for cross_entropy.
        """
        mask = part["mask"]
        if self.name == SUPERVISED:
            shown = mask if log_probs.dim() == 2 else mask.unsqueeze(2).expand_as(log_probs)
            return aggregate(-log_probs * part["weights"], shown, "token", denominator)
        learnt, old, advantages = part["learnt"], part["logprobs"], part["advantages"]
        if self.name == "cispo":
            low, high = self._clips
            loss = capped_ratio_loss(log_probs, old, advantages, learnt, floor=low, cap=high, denominator=denominator)
        elif self.name == "dro":
            loss = quadratic_policy_loss(
                log_probs, old, advantages, learnt, beta=self.options["beta"], denominator=denominator
            )
        else:
            low, high = self._clips
            loss = clipped_policy_loss(
                log_probs,
                old,
                advantages,
                learnt,
                clip_low=1 - low,
                clip_high=high - 1,
                denominator=denominator,
                per_sequence=self.name == "gspo",
            )
        return loss.loss

    @property
    def _clips(self) -> tuple[float, float]:
        if self.name == "importance_sampling":
            return -math.inf, math.inf
        return self.options["clip_low_threshold"], self.options["clip_high_threshold"]
