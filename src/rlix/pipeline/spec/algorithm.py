"""What a job learns from its samples: the algorithms that ship, and the options of each."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rlix.pipeline.spec.named import Named, Shipped, import_object, parse_options
from rlix.pipeline.spec.section import Count, Index, NonNegative, Positive, Section, Share
from rlix.protocol.errors import SpecError


def kl_problem(estimator: Any, *, in_reward: bool) -> str | None:
    """What is wrong with an estimator of the KL as part of the reward, or as a term of the loss.

    Source: arXiv:2510.01555 and arXiv:2512.21852, which derive what each estimator's gradient is in either place.
    """
    if in_reward and estimator in ("k2", "k3"):
        return (
            f"{estimator} does not work in a reward: it charges for what the policy says too rarely as for what it "
            "says too often, and so pushes away from the reference; leave it out (k1 is used)"
        )
    if not in_reward and estimator == "k1":
        return "k1 does not work in a loss: its gradient has mean zero; use k2 (the gradient of the KL) or k3"
    return None


def _in_loss(given: Any) -> Any:
    if (problem := kl_problem(given, in_reward=False)) is not None:
        raise ValueError(problem)
    return given


def _in_reward(given: Any) -> Any:
    if (problem := kl_problem(given, in_reward=True)) is not None:
        raise ValueError(problem)
    return given


LossKl = Annotated[Literal["k2", "k3"], BeforeValidator(_in_loss)]
RewardKl = Annotated[Literal["k1"], BeforeValidator(_in_reward)]
Aggregation = Literal["token", "sequence"]
_IMPORTANCE_CAP = 2.0


class PolicyOptions(Section):
    """Of algorithms with an advantage for each sample, or each token."""

    compares_groups: ClassVar[bool] = True
    """Whether the samples of a prompt are compared with each other."""
    compares_before: ClassVar[bool] = False
    """Whether `estimate` always reads the log-probs before the step,"""
    compares_reference: ClassVar[bool] = False
    """and those under the reference."""

    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the policy as reinforcement learning found it; above 0 the job has a reference model."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of a bonus for entropy, in nats per token."""


class ClippedOptions(PolicyOptions):
    """Of algorithms with PPO's clipped loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio where the advantage is negative; 3 is usual."""


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


class ClipCovOptions(GrpoOptions):
    """GRPO in which a random few of the tokens that cost the most entropy have no gradient."""

    compares_before: ClassVar[bool] = True

    covariance_share: Share = 2e-4
    """How many tokens, of all of a step."""
    covariance_low: float = 1.0
    """Only tokens with a higher covariance of log-probability and advantage"""
    covariance_high: float = 5.0
    """and a lower one than this."""


class DistillOptions(ClippedOptions):
    """Learn what a teacher finds likelier, from the policy's own samples; rewards are only shown."""

    compares_groups: ClassVar[bool] = False
    compares_before: ClassVar[bool] = True

    teacher: str
    """A model with the same tokenizer: a whole path, or a name on the Hugging Face hub. It takes the devices of
    `clusters.reference`."""
    kl_coefficient: Annotated[float, Field(ge=0, le=0)] = 0.0
    """No choice: the teacher is in the place of the reference."""
    aggregation: Aggregation = "token"


class SftOptions(PolicyOptions):
    """Supervised fine-tuning: what is given is made likelier."""

    compares_groups: ClassVar[bool] = False

    kl_estimator: LossKl = "k3"
    aggregation: Aggregation = "token"


class DpoOptions(PolicyOptions):
    """Direct preference optimisation: what was chosen is made likelier than what was rejected, both against the policy
    at the start."""

    compares_before: ClassVar[bool] = True
    compares_reference: ClassVar[bool] = True

    beta: Positive = 0.1
    """How near to the policy at the start it stays."""
    kl_coefficient: Annotated[float, Field(ge=0, le=0)] = 0.0
    """No choice: `beta` says it."""


class RewardKlOptions(ClippedOptions):
    """Of algorithms with the KL to the reference as part of the reward."""

    kl_estimator: RewardKl = "k1"
    """No choice: in a reward only the difference of the log-probabilities pulls towards the reference."""
    aggregation: Aggregation = "token"


class RlooOptions(RewardKlOptions):
    """Reward against the mean of the other samples of the group; the KL is part of the reward."""


class GspoOptions(PolicyOptions):
    """GRPO with one ratio, the geometric mean of the tokens', for a whole sequence."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    clip_high: Positive = 4e-4
    kl_estimator: LossKl = "k3"
    normalize_by_std: bool = True
    """Divide by the standard deviation of a group's rewards."""


class CispoOptions(PolicyOptions):
    """REINFORCE weighted by a ratio that is capped, not clipped: no token loses its gradient."""

    ratio_cap: Positive = 5.0
    """The largest weight of a token."""
    kl_estimator: LossKl = "k3"
    normalize_by_std: bool = True
    """Divide by the standard deviation of a group's rewards."""


class ReinforceOptions(RewardKlOptions):
    """REINFORCE++: discounted returns, normalised over the batch; the KL is part of the reward."""

    compares_groups: ClassVar[bool] = False

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


@dataclass(frozen=True, slots=True)
class Needs:
    """What is known of a step's samples before an algorithm estimates: what the job must have, and score, for it.

    `old_log_probs`: under the policy before the step; `reference`: under the one that reinforcement learning found;
    `teacher`: the folder or hub name of a model with the same tokenizer that stands in the reference's place; `critic`:
    its values of each token.
    """

    old_log_probs: bool = False
    reference: bool = False
    critic: CriticSpec | None = None
    teacher: str | None = None

    @property
    def starting_policy(self) -> bool:
        """Whether the policy as reinforcement learning found it is kept."""
        return (self.reference and self.teacher is None) or self.critic is not None

    def reference_engine(self, *, adapter: bool) -> bool:
        """Whether the reference is an engine of its own: an adapter's is the model that it is on."""
        return self.reference and (self.teacher is not None or not adapter)


def needs_of(options: Any, *, kl_in_reward: bool) -> Needs:
    """What options say that are named as those that ship: a `kl_coefficient` above 0 needs a reference, a `critic`
    and a `teacher` one; who is paid less for the KL, or has a critic, compares with the policy before the step."""
    critic, teacher = getattr(options, "critic", None), getattr(options, "teacher", None)
    always = getattr(options, "compares_reference", False)
    reference = always or getattr(options, "kl_coefficient", 0.0) > 0 or teacher is not None
    before = getattr(options, "compares_before", False) or (kl_in_reward and reference) or critic is not None
    return Needs(before, reference, critic, teacher)


ALGORITHMS: dict[str, type[PolicyOptions]] = {
    "grpo": GrpoOptions,
    "dr_grpo": DrGrpoOptions,
    "dapo": DapoOptions,
    "rloo": RlooOptions,
    "gspo": GspoOptions,
    "cispo": CispoOptions,
    "clip_cov": ClipCovOptions,
    "distill": DistillOptions,
    "sft": SftOptions,
    "dpo": DpoOptions,
    "reinforce_pp": ReinforceOptions,
    "ppo": PpoOptions,
}
"""The options of the algorithms that ship; `rlix.pipeline.algorithms.choice` has their classes."""
_ROUNDS = {"dapo": 3}


class AlgorithmSpec(Named):
    """What is learnt from the samples. `options` are the algorithm's own; the other keys work with any of them."""

    name: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `rloo`, `gspo`, `cispo`, `clip_cov`, `reinforce_pp`, `ppo`, `distill`, `sft`, `dpo`,
    or your own: `file.py:Class`."""
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
    """Weight each token by min(p_trainer / p_sampler, cap): truncated importance sampling. Left out: 2 in steps that
    learn from tokens of older weights, whatever schedule made them, else no weights."""
    importance_floor: NonNegative = 0.0
    """The least weight, likewise."""
    importance_level: Literal["token", "sequence"] = "token"
    """sequence: one weight for a sample, the product over its tokens."""
    importance_beyond: Literal["cut", "drop"] = "cut"
    """A weight that is out of bounds is cut to the bound, or its tokens are dropped from the loss (masked importance
    sampling)."""

    @property
    def compares_groups(self) -> bool:
        """Whether it is known to compare the samples of a prompt with each other."""
        return self.name in ALGORITHMS and ALGORITHMS[self.name].compares_groups

    @property
    def rounds(self) -> int:
        return _ROUNDS.get(self.name, 0) if self.resample_rounds is None else self.resample_rounds

    def cap(self, off_policy: bool) -> float | None:
        return _IMPORTANCE_CAP if self.importance_cap is None and off_policy else self.importance_cap

    def parse(self) -> Any:
        """The options as the algorithm takes them.

        Raises:
            SpecError: the algorithm cannot be imported, or its KL cannot be what its options say.
            pydantic.ValidationError: the options do not fit.
        """
        owner = self.options_owner()
        options = parse_options(owner, self.options)
        in_reward = _kl_in_reward(owner, options)
        # In a reward no default is read: what counts is whether somebody expects another than k1.
        estimator = self.options.get("kl_estimator") if in_reward else getattr(options, "kl_estimator", None)
        if problem := kl_problem(estimator, in_reward=in_reward):
            raise SpecError(f"algorithm.options.kl_estimator: {problem}")
        return options

    def needs(self, *, off_policy: bool) -> Needs:
        """What the algorithm needs, of samples that older weights have a part in or of others."""
        owner, options = self.options_owner(), self.parse()
        said = getattr(owner, "needs", None)
        needs = needs_of(options, kl_in_reward=_kl_in_reward(owner, options)) if said is None else said(options)
        return self.scored(needs, off_policy=off_policy)

    def scored(self, needs: Needs, *, off_policy: bool) -> Needs:
        """With the log-probs before the step, where they are not those of its only update, or tokens are weighed."""
        several = self.epochs * self.minibatches > 1
        return replace(needs, old_log_probs=needs.old_log_probs or several or self.cap(off_policy) is not None)

    def options_owner(self) -> object:
        """Has the options' class as `Options`."""
        if self.name in ALGORITHMS:
            return Shipped(ALGORITHMS[self.name])
        return import_object(self.name)


def _kl_in_reward(owner: object, options: Any) -> bool:
    """As `Algorithm.kl_in_reward` says, without loading the class of what ships."""
    return isinstance(options, RewardKlOptions) or bool(getattr(owner, "kl_in_reward", False))
