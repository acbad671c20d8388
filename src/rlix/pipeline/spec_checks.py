"""What must hold between the sections of a job, and between a job and the machine it is submitted from."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlix.pipeline.rewards import import_object
from rlix.pipeline.spec_file import Problem, nearest
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from rlix.pipeline.spec import JobSpec

PIPELINES = ("full_finetune",)
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
    if spec.algorithm.kl_coefficient > 0 and spec.clusters.reference is None:
        devices = list(spec.clusters.actor_train.devices)
        yield Problem(
            "algorithm.kl_coefficient",
            f"is {spec.algorithm.kl_coefficient:g}, which needs a reference model; under clusters add "
            f"'reference: {{devices: {devices}}}', or set it to 0",
        )
    for name, cluster in spec.clusters.items():
        count = len(cluster.devices)
        if count % cluster.tensor_parallel:
            yield Problem(
                f"clusters.{name}.tensor_parallel",
                f"{cluster.tensor_parallel} does not divide the {count} devices {list(cluster.devices)}; use "
                f"a divisor of {count}, or list another number of devices",
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
    ranks = len(spec.clusters.actor_train.devices)
    parts = ranks * spec.algorithm.minibatches
    total = spec.trajectories_per_step
    if total % parts:
        yield Problem(
            "rollout.prompts_per_step",
            f"{spec.rollout.prompts_per_step} prompts × {spec.rollout.samples_per_prompt} samples are {total} and "
            f"do not divide into {spec.algorithm.minibatches} minibatches × {ranks} training devices; "
            f"use a multiple of {parts}",
        )
    if spec.warmup and spec.warmup.batch_size % ranks:
        yield Problem(
            "warmup.batch_size",
            f"{spec.warmup.batch_size} does not divide over {ranks} training devices; use a multiple of {ranks}",
        )
    if spec.clusters.reference and total % len(spec.clusters.reference.devices):
        count = len(spec.clusters.reference.devices)
        yield Problem("clusters.reference.devices", f"{total} completions do not divide over {count} devices")


def environment_problems(spec: "JobSpec") -> Iterator[Problem]:
    """Problems that only this machine can show: paths, imports, installed packages."""
    if spec.data is not None:
        from rlix.pipeline.data import column_problems

        yield from column_problems(spec.data)
    if spec.model.kind == "pretrained":
        yield from _model_path(spec.model.path)
    if spec.pipeline not in PIPELINES:
        yield from _importable("pipeline", spec.pipeline)
    if spec.reward and spec.reward.function:
        yield from _importable("reward.function", spec.reward.function)
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
