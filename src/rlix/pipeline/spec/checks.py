"""What must hold between the sections of a job, and between a job and the machine it is submitted from."""

import inspect
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlix.pipeline.sources.rewards import import_object
from rlix.pipeline.spec.clusters import ClusterSpec, GpuRange, cluster_problems
from rlix.pipeline.spec.file import Problem, nearest
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from rlix.pipeline.spec.job import JobSpec

PIPELINES = ("full_finetune", "agentic", "actor_critic", "asynchronous", "asynchronous_agentic")
_AGENTIC = ("agentic", "asynchronous_agentic")
_ASYNCHRONOUS = ("asynchronous", "asynchronous_agentic")
BUILT_IN_ENVIRONMENTS = {"digit_lookup": "rlix.pipeline.sources.environments.lookup:DigitLookup"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALLEST_VLLM_HEAD = 32


def inconsistencies(spec: "JobSpec") -> Iterator[Problem]:
    """Problems that show in the spec alone."""
    yield from _source_of_prompts(spec)
    yield from _model(spec)
    yield from _lengths(spec)
    yield from _batches(spec)
    if spec.pipeline not in PIPELINES and ":" not in spec.pipeline:
        known = ", ".join(PIPELINES)
        hint = nearest(spec.pipeline, PIPELINES)
        yield Problem("pipeline", f"must be {known} or package.module:Class, not {spec.pipeline!r}{hint}")
    yield from _actor_critic(spec)
    yield from _asynchronous(spec)
    yield from cluster_problems(spec.clusters, spec.pipeline if spec.pipeline in PIPELINES else None)


def _actor_critic(spec: "JobSpec") -> Iterator[Problem]:
    """A user's own pipeline may combine these as it likes."""
    if spec.algorithm.name == "ppo" and spec.pipeline in PIPELINES and spec.pipeline != "actor_critic":
        yield Problem("pipeline", f"is {spec.pipeline}, which has no critic; with ppo set 'pipeline: actor_critic'")
    if spec.pipeline == "actor_critic" and spec.algorithm.name != "ppo":
        yield Problem("algorithm.name", f"must be ppo with 'pipeline: actor_critic', not {spec.algorithm.name!r}")


def _asynchronous(spec: "JobSpec") -> Iterator[Problem]:
    ahead = spec.asynchronous
    if spec.pipeline in PIPELINES and (ahead is None) == (spec.pipeline in _ASYNCHRONOUS):
        wanted = "asynchronous_agentic" if spec.environment is not None else "asynchronous"
        fix = "add e.g. 'asynchronous: {max_staleness: 1}'" if ahead is None else f"set 'pipeline: {wanted}'"
        yield Problem("asynchronous", f"section and 'pipeline: {wanted}' belong together; {fix}")
    if ahead is None:
        return
    if ahead.on_stale == "wait" and (ahead.ahead or 0) > ahead.max_staleness:
        yield Problem(
            "asynchronous.ahead",
            f"{ahead.ahead} exceeds max_staleness {ahead.max_staleness}; lower it, or use 'on_stale: drop' or rescore",
        )
    if ahead.in_flight == "finish" and (ahead.ahead or ahead.max_staleness) > 1:
        yield Problem("asynchronous.in_flight", "finish generates one step at a time; set 'ahead: 1'")
    if spec.algorithm.resample_rounds:
        yield Problem("algorithm.resample_rounds", "steps generated ahead are not sampled again; set it to 0")
    sampling = (spec.rollout.temperature, spec.rollout.top_p, spec.rollout.top_k)
    if sampling != (1.0, 1.0, 0):
        yield Problem(
            "rollout.temperature",
            "importance weights need the probabilities that tokens were sampled with: use temperature 1, top_p 1, "
            "top_k 0",
        )


def _model(spec: "JobSpec") -> Iterator[Problem]:
    model = spec.model
    if model.kind != "tiny":
        return
    if model.hidden_size % (2 * model.heads):
        yield Problem(
            "model.hidden_size", f"{model.hidden_size} is not a multiple of {2 * model.heads} (twice the heads)"
        )
    if twice := sorted({c for c in model.alphabet if model.alphabet.count(c) > 1}):
        yield Problem("model.alphabet", f"holds {twice[0]!r} twice; keep one of each character")
    if spec.rollout.executor == "vllm":
        if model.hidden_size // model.heads < _SMALLEST_VLLM_HEAD:
            yield Problem(
                "model.heads",
                f"hidden_size / heads is {model.hidden_size // model.heads}; vLLM needs {_SMALLEST_VLLM_HEAD} or more: "
                "use fewer heads, or 'executor: transformers' under rollout",
            )
        if model.heads % spec.clusters.actor_infer.tensor_parallel:
            yield Problem(
                "clusters.actor_infer.tensor_parallel",
                f"{spec.clusters.actor_infer.tensor_parallel} does not divide the model's {model.heads} heads",
            )


def _source_of_prompts(spec: "JobSpec") -> Iterator[Problem]:
    if spec.environment is not None:
        yield from _environment(spec)
        return
    if spec.pipeline in _AGENTIC:
        yield Problem("environment", "is missing: what the agent acts in; add e.g. 'environment: {name: digit_lookup}'")
        return
    if (spec.task is None) == (spec.data is None):
        found = "both are given" if spec.task else "neither is given"
        yield Problem("task", f"a job has either a task or data with a reward, and {found}; keep one")
    if spec.task and spec.reward:
        yield Problem("reward", "a built-in task brings its own reward; remove this section, or use data for prompts")
    if spec.data and not spec.reward:
        yield Problem("reward", "prompts from data need a reward; add e.g. 'reward: {name: exact_match}'")
    if spec.data and spec.data.answer is None and spec.reward and spec.reward.name:
        yield Problem(
            "data.answer", f"the reward {spec.reward.name} compares with an answer; name the column that holds it"
        )
    if spec.data and spec.data.answer is None and spec.warmup:
        yield Problem("data.answer", "a warm-up learns from answers; name the column that holds them, or drop warmup")


def _environment(spec: "JobSpec") -> Iterator[Problem]:
    environment = spec.environment
    assert environment is not None
    if spec.pipeline in PIPELINES and spec.pipeline not in _AGENTIC:
        wanted = "agentic" if spec.asynchronous is None else "asynchronous_agentic"
        yield Problem("pipeline", f"is {spec.pipeline}, which has no environment; set 'pipeline: {wanted}'")
    if spec.pipeline in _AGENTIC and spec.algorithm.name != "grpo":
        yield Problem("algorithm.name", f"is {spec.algorithm.name}; with 'pipeline: {spec.pipeline}' it must be grpo")
    if spec.algorithm.resample_rounds or spec.algorithm.overlong_buffer:
        yield Problem("algorithm", "resample_rounds and overlong_buffer do not apply to environments; leave them out")
    for section in ("task", "data", "reward"):
        if getattr(spec, section) is not None:
            yield Problem(section, "an environment brings its own observations and rewards; remove this section")
    if (environment.name is None) == (environment.factory is None):
        yield Problem("environment", "give either 'name: digit_lookup' or 'factory: package.module:function'")


def _lengths(spec: "JobSpec") -> Iterator[Problem]:
    if spec.task is None or spec.model.kind != "tiny":
        return
    answer, prompt = spec.task.digits + 1, spec.task.digits + 2
    if spec.rollout.max_new_tokens < answer:
        yield Problem(
            "rollout.max_new_tokens",
            f"is {spec.rollout.max_new_tokens}, but an answer takes {answer} tokens ({spec.task.digits} digits and the "
            f"end token); set it to {answer} or more",
        )
    if prompt + spec.rollout.max_new_tokens > spec.model.context:
        yield Problem(
            "model.context",
            f"is {spec.model.context}, but a prompt of {prompt} tokens and {spec.rollout.max_new_tokens} new ones need "
            f"{prompt + spec.rollout.max_new_tokens}; raise it",
        )
    if absent := sorted(set("0123456789>") - set(spec.model.alphabet)):
        yield Problem("model.alphabet", f"lacks {''.join(absent)!r}, which the task {spec.task.name} uses; add it")


def _batches(spec: "JobSpec") -> Iterator[Problem]:
    """Every rank gets the same share of a batch, so that a step's result does not depend on how it was split."""
    total, minibatches = spec.trajectories_per_step, spec.algorithm.minibatches
    ranks = _ranks(spec.clusters.actor_train)
    parts = ranks * minibatches
    if total % parts:
        yield Problem(
            "rollout.prompts_per_step",
            f"{spec.rollout.prompts_per_step} prompts × {spec.rollout.samples_per_prompt} samples are {total} and "
            f"do not divide into {minibatches} minibatches × {ranks} training devices; use a multiple of {parts}",
        )
    if spec.warmup and spec.warmup.batch_size % ranks:
        yield Problem(
            "warmup.batch_size",
            f"{spec.warmup.batch_size} does not divide over {ranks} training devices; use a multiple of {ranks}",
        )
    critic, reference = spec.clusters.critic, spec.clusters.reference
    if critic and total % (_ranks(critic) * minibatches):
        yield Problem(
            f"clusters.critic.{critic.field}",
            f"{total} completions do not divide into {minibatches} minibatches × {_ranks(critic)} devices",
        )
    if reference and total % _ranks(reference):
        yield Problem(
            f"clusters.reference.{reference.field}",
            f"{total} completions do not divide over {_ranks(reference)} devices",
        )


def _ranks(cluster: ClusterSpec) -> int:
    """Among how many devices a batch is split; 1 where that is not fixed."""
    return 1 if isinstance(cluster.gpus, GpuRange) else cluster.count or 1


def environment_problems(spec: "JobSpec") -> Iterator[Problem]:
    """Problems that only this machine can show: paths, imports, installed packages."""
    if spec.data is not None:
        from rlix.pipeline.sources.data import column_problems

        yield from column_problems(spec.data)
    if spec.model.kind == "pretrained":
        yield from _model_path(spec.model.path)
    if spec.pipeline not in PIPELINES:
        yield from _importable("pipeline", spec.pipeline)
    if spec.reward and spec.reward.function:
        yield from _importable("reward.function", spec.reward.function)
    if spec.environment:
        if spec.environment.factory:
            yield from _importable("environment.factory", spec.environment.factory)
        factory = spec.environment.factory or BUILT_IN_ENVIRONMENTS[spec.environment.name or ""]
        yield from _options(factory, spec.environment.options)
    if spec.rollout.executor == "vllm" and find_spec("vllm") is None:
        yield Problem(
            "rollout.executor", "vllm is not installed; run 'pip install rlix[vllm]', or use 'executor: transformers'"
        )


def _model_path(given: str) -> Iterator[Problem]:
    path = Path(given)
    if path.is_absolute():
        if not path.is_dir():
            yield Problem(
                "model.path", f"there is no folder {path}; correct the path (it is relative to the job's file)"
            )
        elif not (path / "config.json").is_file():
            yield Problem("model.path", f"{path} holds no config.json, so it is not a saved Hugging Face model")
    elif not _HUB_NAME.fullmatch(given):
        yield Problem("model.path", f"{given!r} is neither a folder nor a hub name such as 'Qwen/Qwen2.5-0.5B'")


def _importable(field: str, name: str) -> Iterator[Problem]:
    try:
        found = import_object(name)
    except SpecError as error:
        yield Problem(field, str(error))
        return
    if not callable(found):
        yield Problem(field, f"{name} is a {type(found).__name__}, not something that can be called")


def _options(factory: str, options: Mapping[str, object]) -> Iterator[Problem]:
    """Options the environment's factory does not take; they would fail every environment, one by one."""
    try:
        found = import_object(factory)
        if callable(found):
            inspect.signature(found).bind(None, **options)
    except TypeError as error:
        yield Problem("environment.options", f"do not fit {factory}: {error}")
    except (SpecError, ValueError):
        return  # it cannot be imported, which is reported, or says nothing of what it takes
