"""The sections of a job."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from rlix.engine.declared import AS_IT_IS, DeclaredSpeed
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.spec.clusters import ClustersSpec
from rlix.pipeline.spec.declared import DeclaredSpeedSpec
from rlix.pipeline.spec.evaluation import EvaluationSpec
from rlix.pipeline.spec.executor import longest_trajectory
from rlix.pipeline.spec.logging import LoggingSpec
from rlix.pipeline.spec.lora import MULTI_LORA, LoraSpec, RunName, RunSpec
from rlix.pipeline.spec.model import ModelSpec, TinyModel
from rlix.pipeline.spec.named import Named
from rlix.pipeline.spec.plan import PlanSpec
from rlix.pipeline.spec.schedule import ScheduleSpec
from rlix.pipeline.spec.section import Count, Index, Positive, Seconds, Section, Seed, Share, one_or_many
from rlix.pipeline.spec.source import SourceSpec
from rlix.pipeline.spec.training import CheckpointSpec, OptimizerSpec, TrainingSpec, WarmupSpec
from rlix.protocol.types import LONGEST_NAME, NAME, folder_problem

_Text = Annotated[str, Field(min_length=1)]


class RolloutSpec(Section):
    prompts_per_step: Count = 32
    samples_per_prompt: Count = 8
    """Completions compared with each other (the group); at least 2, but with ppo, reinforce_pp or an algorithm of your
    own, and without `algorithm.resample_rounds`."""
    spare_prompts: Index = 0
    """So many more prompts are begun with each step. Those with the longest answers are given up as soon as it is sure
    which they are, and not learnt from; which they are never depends on time. It prefers prompts with short answers."""
    max_new_tokens: Count
    """Longest completion in tokens, its end token included; with an environment, of one turn."""
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: Index = 0
    """Sample among this many most likely tokens; 0 for all."""
    stop: Annotated[tuple[_Text, ...], one_or_many(_Text), Field(strict=False)] = ()
    """Strings that end an answer and are part of it. One that is a token of the model's ends generation there; of what
    is generated after another one nothing is kept."""
    stop_token_ids: Annotated[tuple[Index, ...], one_or_many(Index), Field(strict=False)] = ()
    """Tokens that end an answer, besides the end tokens of the tokenizer and of the model's folder."""
    executor: str = "transformers"
    """`transformers`, `vllm`, or a [backend of your own](engines.md#backends-of-your-own): `package.module:Class`."""
    executor_options: dict[str, Any] = Field(default_factory=dict)
    """Of the executor; those of vLLM by the names that vLLM gives them, those of your own as its class `Options` says,
    and the three that both others have."""
    max_num_seqs: Count = 64
    """Most trajectories one replica decodes at a time; fewer where its memory does not hold them."""

    timeout_s: Seconds = 3600.0
    """Longest that the samples of a step, or an evaluation, may take, in seconds in which there are devices for them;
    then the job fails, or goes on without the evaluation, and says what was not finished."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _draws(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError(
                "must be above 0: without chance all samples of a prompt are one; evaluation.temperature may be 0"
            )
        return value

    @property
    def not_as_the_policy_says(self) -> str | None:
        """Why tokens cannot be weighed: they are not drawn from the policy's own probabilities. None: they are."""
        if (self.temperature, self.top_p, self.top_k) == (1.0, 1.0, 0):
            return None
        return (
            "importance weights need the probabilities that tokens were sampled with: use temperature 1, top_p 1, "
            "top_k 0"
        )

    def longest(self, context: int) -> int:
        """Tokens of the longest trajectory that a model with this context can have in this job."""
        return longest_trajectory(self.executor, self.executor_options, context)


class Sections(Section):
    """All that a job says; `JobSpec` has it checked."""

    name: Annotated[str, Field(pattern=NAME.pattern, max_length=LONGEST_NAME)]
    """Also the name of the run's folder."""
    seed: Seed = 0
    steps: Count
    """Number of training steps."""
    source: SourceSpec = SourceSpec()
    """Where samples come from; a pipeline of your own may do without."""
    schedule: ScheduleSpec = ScheduleSpec()
    """When they are made."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """What is learnt from them."""
    pipeline: Named | None = None
    """`multi_lora`, for many adapters on one model (see `runs`), or a pipeline of your own: `file.py:Class` or
    `package.module:Class`."""
    model: ModelSpec = TinyModel()
    lora: LoraSpec | None = None
    """Train an adapter instead of the model; `lora: {}` for one as most are."""
    runs: dict[RunName, RunSpec] = Field(default_factory=dict)
    """Of `multi_lora`, by name: each an adapter of its own, which says what of it differs from the job."""
    warmup: WarmupSpec | None = None
    rollout: RolloutSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    evaluation: EvaluationSpec | None = None
    logging: LoggingSpec = LoggingSpec()
    declared_speed: DeclaredSpeedSpec | None = None
    """Only on virtual GPUs: how fast the GPUs are that they stand for."""
    plan: PlanSpec | None = None
    """`auto`: RLix plans on how many devices each part runs, and on which; `clusters` then says no more than
    `shards` and `tensor_parallel`."""
    clusters: ClustersSpec = ClustersSpec()
    """On how many devices each part runs, at least `actor_train: {gpus: 2}`; or there is a `plan`."""

    @field_validator("name")
    @classmethod
    def _free_name(cls, name: str) -> str:
        if (problem := folder_problem(name)) is not None:
            raise ValueError(problem)
        return name

    @property
    def multi_lora(self) -> bool:
        """Whether it trains many adapters on one model."""
        return self.pipeline is not None and self.pipeline.name == MULTI_LORA

    @property
    def generates(self) -> bool:
        """Whether there are rollouts: not to learn from what is given, unless that is evaluated."""
        return self.source.conversations is None or self.evaluation is not None or bool(self.runs)

    @property
    def is_unplanned(self) -> bool:
        """Whether its clusters are left to a plan that is still to be made."""
        return self.plan is not None

    @property
    def trajectories_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def speed(self) -> DeclaredSpeed:
        return AS_IT_IS if self.declared_speed is None else self.declared_speed.speed

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole job."""
        return self.steps * self.algorithm.epochs * self.algorithm.minibatches
