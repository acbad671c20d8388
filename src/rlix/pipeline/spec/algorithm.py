"""What a job learns from its samples: the algorithms that ship, and the options of each."""

from typing import Annotated, Any, Literal, cast

from pydantic import Field

from rlix.pipeline.spec.named import Named, import_object, parse_options
from rlix.pipeline.spec.section import Count, Index, NonNegative, Positive, Section, Share

LossKl = Literal["k2", "k3"]
"""What may be a term of a loss. k1's gradient has mean zero: with the reward it is a penalty, in a loss only noise."""
RewardKl = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence"]
_IMPORTANCE_CAP = 2.0


class ClippedOptions(Section):
    """Of algorithms with PPO's clipped loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Positive = 0.2
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the policy as reinforcement learning found it; above 0 the job has a reference model."""


class GrpoOptions(ClippedOptions):
    """Group-relative policy optimisation."""

    kl_estimator: LossKl = "k3"
    aggregation: Aggregation = "token"
    """token: every token of a minibatch weighs the same; sequence: every sequence."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of a group's rewards."""


class DrGrpoOptions(ClippedOptions):
    """GRPO without its two biases: not divided by a standard deviation, and by a constant instead of lengths."""

    kl_estimator: LossKl = "k3"


class DapoOptions(GrpoOptions):
    """GRPO with clip-higher and dynamic sampling."""

    clip_high: Positive = 0.28


class RlooOptions(ClippedOptions):
    """Reward against the mean of the other samples of the group."""

    kl_estimator: LossKl = "k3"
    aggregation: Aggregation = "token"


class GspoOptions(Section):
    """GRPO with one ratio, the geometric mean of the tokens', for a whole sequence."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    clip_high: Positive = 4e-4
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the policy as reinforcement learning found it; above 0 the job has a reference model."""
    kl_estimator: LossKl = "k3"
    normalize_by_std: bool = True
    """Divide by the standard deviation of a group's rewards."""


class CispoOptions(Section):
    """REINFORCE weighted by a ratio that is capped, not clipped: no token loses its gradient."""

    ratio_cap: Positive = 5.0
    """The largest weight of a token."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the policy as reinforcement learning found it; above 0 the job has a reference model."""
    kl_estimator: LossKl = "k3"
    normalize_by_std: bool = True
    """Divide by the standard deviation of a group's rewards."""


class ReinforceOptions(ClippedOptions):
    """REINFORCE++: discounted returns, normalised over the batch; the KL is part of the reward."""

    kl_estimator: RewardKl = "k3"
    aggregation: Aggregation = "token"
    discount: Share = 1.0
    """Of later rewards, per token."""


class CriticSpec(Section):
    """The value model; it starts from the policy's weights with a new head."""

    learning_rate: Positive = 1e-5
    clip: Positive | None = 0.2
    """How far a prediction may move from its value before the update; null leaves it free."""


class PpoOptions(ReinforceOptions):
    """Proximal policy optimisation with a critic; the KL is part of the reward."""

    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalised advantage estimation."""
    critic: CriticSpec = CriticSpec()


ALGORITHMS: dict[str, type[Section]] = {
    "grpo": GrpoOptions,
    "dr_grpo": DrGrpoOptions,
    "dapo": DapoOptions,
    "rloo": RlooOptions,
    "gspo": GspoOptions,
    "cispo": CispoOptions,
    "reinforce_pp": ReinforceOptions,
    "ppo": PpoOptions,
}
"""The options of the algorithms that ship; `rlix.pipeline.algorithms.choice` has their classes."""
_ROUNDS = {"dapo": 3}


class AlgorithmSpec(Named):
    """What is learnt from the samples. `options` are the algorithm's own; the other keys work with any of them."""

    name: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `rloo`, `gspo`, `cispo`, `reinforce_pp`, `ppo`, or your own: `file.py:Class`."""
    epochs: Count = 1
    """Passes over each step's samples."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    resample_rounds: Index | None = None
    """How often groups whose rewards are all equal are replaced by groups of new prompts; left out: 3 with dapo, else
    0."""
    overlong_buffer: Index = 0
    """Tokens before the longest possible sample over which a penalty grows from 0 to 1 (soft overlong punishment)."""
    mask_truncated: bool = False
    """Whether samples that were cut off for their length are left out of the loss; their rewards still count for their
    groups."""
    importance_cap: Positive | None = None
    """Weight each token by min(p_trainer / p_sampler, cap): truncated importance sampling. Left out: 2 where samples
    may be older than the policy that trains, else no weights."""

    @property
    def rounds(self) -> int:
        return _ROUNDS.get(self.name, 0) if self.resample_rounds is None else self.resample_rounds

    def cap(self, off_policy: bool) -> float | None:
        return _IMPORTANCE_CAP if self.importance_cap is None and off_policy else self.importance_cap

    def parse(self) -> Any:
        """The options as the algorithm takes them.

        Raises:
            SpecError: the algorithm cannot be imported. pydantic.ValidationError: the options do not fit.
        """
        return parse_options(self.options_owner(), self.options)

    def scores_first(self, off_policy: bool) -> bool:
        """Whether the policy scores a step's samples before it trains on them."""
        options = self.parse()
        in_reward = isinstance(options, ReinforceOptions) and needs_reference(options)
        several = self.epochs * self.minibatches > 1 or self.cap(off_policy) is not None
        return several or in_reward or critic_of(options) is not None

    def options_owner(self) -> object:
        """Has the options' class as `Options`."""
        if self.name in ALGORITHMS:
            return _Shipped(ALGORITHMS[self.name])
        return import_object(self.name)


class _Shipped:
    def __init__(self, options: type[Section]) -> None:
        self.Options = options


def needs_reference(options: Any) -> bool:
    """Whether an algorithm with these options compares with the policy as reinforcement learning found it."""
    return getattr(options, "kl_coefficient", 0.0) > 0


def critic_of(options: Any) -> CriticSpec | None:
    """The critic of an algorithm with these options, if it has one."""
    return cast(CriticSpec | None, getattr(options, "critic", None))
