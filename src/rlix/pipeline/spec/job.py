"""What a user writes to describe a job: nested, frozen sections that are checked before anything starts."""

import json
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlix.pipeline.spec.checks import environment_problems, inconsistencies
from rlix.pipeline.spec.clusters import ClusterSpec, ClustersSpec, pool_problems
from rlix.pipeline.spec.file import Origin, Problem, nearest, problems_of, read_yaml
from rlix.pipeline.spec.training import (
    AlgorithmSpec,
    AsynchronousSpec,
    CheckpointSpec,
    Count,
    CriticSpec,
    Index,
    NonNegative,
    OptimizerSpec,
    Positive,
    Section,
    Share,
    TrainingSpec,
)
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlix.pipeline.sources.tasks import Task


class TaskSpec(Section):
    """A built-in task; it brings its own reward."""

    name: Literal["sort_digits", "copy_digits"]
    digits: Annotated[int, Field(ge=1, le=32)] = 4
    """How many digits a prompt holds."""


class DataSpec(Section):
    """Prompts from a JSONL or Parquet file, or a dataset saved by `datasets` (`Dataset.save_to_disk`)."""

    path: str
    """File or folder, relative to the job's file."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer: str | None = "answer"
    """Column with the right answer; null when the reward needs none."""
    split: str = "train"
    """Which split, when the folder holds several."""


class EnvironmentSpec(Section):
    """What an agent acts in, turn by turn: a built-in environment or a user's, and what its failures cost."""

    name: Literal["digit_lookup"] | None = None
    factory: str | None = None
    """`package.module:function`, called with an `Instance` and the options; returns an `Environment`."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    runner: Literal["in_process", "subprocess"] = "in_process"
    """In the pipeline's event loop, or each in a process that is killed when it hangs."""
    max_processes: Count = 8
    """With `runner: subprocess`: how many environments run at a time."""
    max_turns: Count = 8
    max_tokens: Count | None = None
    """Longest trajectory in tokens, observations included; null for the model's context."""
    reset_timeout_s: Positive = 60.0
    step_timeout_s: Positive = 30.0
    attempts: Count = 2
    """How often an environment is started for a trajectory before it counts as failed."""
    backoff_s: NonNegative = 0.1
    """Wait before the second attempt; it doubles with each further one."""
    failure_reward: float | None = None
    """Reward of a trajectory whose environment failed; null leaves it out of the update."""


class RewardSpec(Section):
    """How completions of prompts from `data` are judged: one of the built-in rewards, or a function of the user's."""

    name: Literal["exact_match", "number_match", "token_match"] | None = None
    function: str | None = None
    """`package.module:function`, called with (prompt, completion, answer), returns a number."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is None) == (self.function is None):
            raise ValueError("give either 'name: exact_match' (or another built-in) or 'function: package.module:name'")
        return self


class TinyModel(Section):
    """A small Qwen2 with one token per character, initialised from the job's seed."""

    dtype: ClassVar[str] = "float32"

    kind: Literal["tiny"] = "tiny"
    hidden_size: Count = 64
    layers: Count = 2
    heads: Count = 4
    context: Count = 64
    """Longest prompt and completion together, in tokens."""
    alphabet: Annotated[str, Field(min_length=1)] = "0123456789>="

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return torch.float32

    def prepare(self, folder: Path, seed: int) -> Path:
        """Write config, initial weights and tokenizer to `folder`, unless it holds them, and return it."""
        from rlix.pipeline.models import write_tiny_model

        return write_tiny_model(self, folder, seed)


class PretrainedModel(Section):
    """A Hugging Face causal LM: a local folder (relative to the job's file) or a name on the hub."""

    kind: Literal["pretrained"] = "pretrained"
    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which training computes and rollouts hold the weights. The optimizer's own weights are always float32."""

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def prepare(self, folder: Path, seed: int) -> Path:
        """A local folder with the model: `path` itself, or what the hub sent. `folder` and `seed` are not used."""
        from rlix.pipeline.models import local_model

        return local_model(self.path)


def _model_kind(value: Any) -> str:
    given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return "pretrained" if given.get("kind", "pretrained" if "path" in given else "tiny") == "pretrained" else "tiny"


ModelSpec = Annotated[
    Annotated[TinyModel, Tag("tiny")] | Annotated[PretrainedModel, Tag("pretrained")], Discriminator(_model_kind)
]


class WarmupSpec(Section):
    """Supervised steps on right answers before reinforcement learning starts."""

    steps: Count
    batch_size: Count = 64
    learning_rate: Positive = 1e-3


class RolloutSpec(Section):
    prompts_per_step: Count = 32
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Completions compared with each other (the group); at least 2."""
    max_new_tokens: Count
    """Longest completion in tokens, its end token included."""
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: Index = 0
    """Sample among this many most likely tokens; 0 for all."""
    executor: Literal["transformers", "vllm"] = "transformers"
    max_num_seqs: Count = 64
    """Most trajectories one replica decodes at a time; fewer where its memory does not hold them."""


class JobSpec(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    """Also the name of the run's folder."""
    seed: Index = 0
    pipeline: str = "full_finetune"
    """A built-in pipeline, or `package.module:Class`."""
    steps: Count
    """Number of training steps."""
    task: TaskSpec | None = None
    data: DataSpec | None = None
    reward: RewardSpec | None = None
    environment: EnvironmentSpec | None = None
    model: ModelSpec = TinyModel()
    warmup: WarmupSpec | None = None
    rollout: RolloutSpec
    algorithm: AlgorithmSpec = AlgorithmSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    critic: CriticSpec | None = None
    asynchronous: AsynchronousSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    clusters: ClustersSpec
    """On how many devices each part runs, at least `actor_train: {gpus: 2}`."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def clusters_in_use(self) -> dict[str, ClusterSpec]:
        """All worker sets; a reference model or critic that is needed but not mentioned is like `actor_train`."""
        needed = {
            ClusterName.REFERENCE: self.algorithm.kl_coefficient > 0,
            ClusterName.CRITIC: self.pipeline == "actor_critic",
        }
        left_out = {name.value: self.clusters.actor_train for name, is_needed in needed.items() if is_needed}
        return left_out | dict(self.clusters.items())

    @property
    def trajectories_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole job."""
        return self.steps * self.algorithm.epochs * self.algorithm.minibatches

    def build_task(self, tokenizer: "PreTrainedTokenizerBase") -> "Task":
        """The prompts and the reward. Raises SpecError when the data does not hold what the spec says."""
        from rlix.pipeline.sources.tasks import build_task

        return build_task(self, tokenizer)

    def to_yaml(self) -> str:
        """A file that `load_job` reads back as an equal spec."""
        given = {key: value for key, value in self.model_dump(mode="json").items() if value is not None}
        return yaml.dump(given, Dumper=_Dumper, sort_keys=False, width=120)

    def check_devices(self, pool: Collection[int]) -> None:
        """Raise SpecError when a cluster needs devices that a pool with these device ids does not have."""
        if problems := list(pool_problems(self.clusters, pool)):
            raise self._origin.error(problems)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := list(inconsistencies(self)):
            text = "\n".join(f"{p.field}: {p.message}" for p in problems)
            raise PydanticCustomError("inconsistent", "{text}", {"text": text, "problems": problems})
        return self


class _Dumper(yaml.SafeDumper):
    """Lists on one line, sections on many."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def shipped_jobs() -> list[str]:
    """Names of the jobs that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _examples().iterdir() if p.name.endswith(".yaml"))


def load_job(path_or_name: str | Path) -> JobSpec:
    """Read and check a job: a YAML file by path, or the name of one that ships with the package.

    Paths inside the file are relative to it, and absolute in the result. Raises SpecError with one line per problem,
    each naming file, line, field and fix.
    """
    path = _find(path_or_name)
    data, origin = read_yaml(path)
    _anchor_paths(data, path.parent)
    try:
        # JSON mode is strict about types, yet takes a list for a tuple as YAML must.
        spec = JobSpec.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise origin.error(problems_of(error.errors(), JobSpec, data)) from None
    spec._origin = origin
    if problems := list(environment_problems(spec)):
        raise origin.error(problems)
    return spec


def check_jobs(specs: Sequence[JobSpec], pool: Collection[int]) -> None:
    """Raise SpecError when the jobs cannot run together on a pool with these device ids."""
    lines: list[str] = []
    first: dict[str, JobSpec] = {}
    for spec in specs:
        if spec.name in first:
            other = first[spec.name]._origin.path or "another job"
            lines.append(
                spec._origin.describe(Problem("name", f"{spec.name!r} is also the name of {other}; rename one"))
            )
        first.setdefault(spec.name, spec)
        lines += [spec._origin.describe(problem) for problem in pool_problems(spec.clusters, pool)]
    if lines:
        raise SpecError("\n".join(lines))


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_jobs()
    if str(path) in shipped:
        return Path(str(_examples() / f"{path}.yaml"))
    if path.is_dir():
        raise SpecError(f"{path}: is a folder; name the job's YAML file in it")
    beside = [str(path.with_name(p.name)) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = nearest(str(path), beside) or nearest(path.name.removesuffix(".yaml"), shipped)
    raise SpecError(f"{path}: no such file, and no job that ships with rlix ({', '.join(shipped)}){hint}")


def _examples() -> Any:
    return resources.files("rlix") / "examples"


def _anchor_paths(data: dict[str, Any], base: Path) -> None:
    """Make paths absolute. A model that is no folder here and does not look like a path is a name on the hub."""
    for section in ("data", "model"):
        values = data.get(section)
        if not isinstance(values, dict) or not isinstance(given := values.get("path"), str):
            continue
        path = (base / Path(given).expanduser()).absolute()
        if section == "data" or path.exists() or given.startswith((".", "~", "/")):
            data[section] = {**values, "path": str(path)}
