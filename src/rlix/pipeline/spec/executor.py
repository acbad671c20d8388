"""What a job may tell the executor of its rollouts."""

from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict

from rlix.engine.executors import vllm_options
from rlix.pipeline.spec.named import Shipped, option_problems, parse_options, unknown_name
from rlix.pipeline.spec.section import Count, Section, Share
from rlix.protocol.spec_file import Problem

_ELSEWHERE = {
    "dtype": "model.dtype",
    "kv_cache_bytes": "rollout.executor_options.kv_cache_memory_bytes",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "clusters.actor_infer.tensor_parallel",
}


class _Options(Section):
    gpu_memory_utilization: Share | None = None
    """Share of a GPU's memory that a replica may use in all; null: nine tenths of what is free when it is built. A
    virtual GPU has no such share."""
    max_model_len: Count | None = None
    """Longest trajectory in tokens, prompts and observations included; null: the model's context."""
    kv_cache_memory_bytes: Count | None = None
    """Size of the KV cache instead of what `gpu_memory_utilization` leaves; on a virtual GPU null is 1 GiB, with vLLM
    room for eight trajectories of the greatest length."""


class TransformersOptions(_Options):
    """Generation with the model's own code in PyTorch."""

    exact: bool | None = None
    """Whether what is drawn must not depend, to the bit, on what it is batched with; null: true on a virtual GPU."""


class VllmOptions(_Options):
    """Generation with vLLM. Every other option of its `EngineArgs` may be given, too, by the name it has there."""

    model_config = ConfigDict(extra="allow")

    enforce_eager: bool | None = None
    """No CUDA graphs: less memory, slower decoding; null: true on a virtual GPU only."""
    quantization: str | None = None
    """How vLLM holds the weights that it is sent, `fp8` for instance. Tokens are then drawn by another policy than the
    one that trains: set `algorithm.importance_cap`."""
    max_num_batched_tokens: Count | None = None
    """Most tokens of one forward pass, those of prompts included."""


class OwnOptions(_Options):
    """Of an executor of the user's, which checks all others."""

    model_config = ConfigDict(extra="allow")


EXECUTORS: dict[str, type[_Options]] = {"transformers": TransformersOptions, "vllm": VllmOptions}
_TRAINERS = ("fsdp2",)


def _owner(executor: str) -> Shipped:
    return Shipped(EXECUTORS.get(executor, OwnOptions))


def name_problems(executor: str, trainer: str) -> Iterator[Problem]:
    """Backends of generation and training that neither ship nor can be the user's own."""
    yield from unknown_name("rollout.executor", executor, EXECUTORS)
    yield from unknown_name("training.executor", trainer, _TRAINERS)


def executor_problems(executor: str, options: dict[str, Any], longest_answer: int) -> Iterator[Problem]:
    """What is wrong with the options, as far as it shows without the executor being installed."""
    where = "rollout.executor_options"
    given = {}
    for name, value in options.items():
        if name in _ELSEWHERE:
            yield Problem(f"{where}.{name}", f"is written as '{_ELSEWHERE[name]}'")
        elif executor == "vllm" and name in vllm_options.OURS - vllm_options.BUILD:
            yield Problem(f"{where}.{name}", "is set by RLix, which depends on it; remove it")
        else:
            given[name] = value
    problems = list(option_problems(where, _owner(executor), given))
    yield from problems
    if executor == "vllm":
        own = VllmOptions.model_fields
        for name, problem in vllm_options.unknown({k: v for k, v in given.items() if k not in own}).items():
            yield Problem(f"{where}.{name}", problem)
    if not problems:
        length = parse_options(_owner(executor), given).max_model_len
        if length is not None and length <= longest_answer:
            yield Problem(
                f"{where}.max_model_len",
                f"{length} leaves no room for a prompt before the {longest_answer} tokens of rollout.max_new_tokens",
            )


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those that only an executor of the user's can check."""
    return {name: value for name, value in options.items() if name not in _Options.model_fields}


def parsed_options(executor: str, options: dict[str, Any]) -> TransformersOptions | VllmOptions | OwnOptions:
    """Of a job that has been checked."""
    parsed: TransformersOptions | VllmOptions | OwnOptions = parse_options(_owner(executor), options)
    return parsed


def build_arguments(executor: str, options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `InferenceEngine.build` that the options make."""
    given = {name: value for name, value in dict(parsed_options(executor, options)).items() if value is not None}
    own = {"kv_cache_memory_bytes": "kv_cache_bytes"}
    taken = (TransformersOptions if executor == "transformers" else _Options).model_fields
    arguments = {own.get(name, name): value for name, value in given.items() if name in taken}
    return {**arguments, "executor_options": {k: v for k, v in given.items() if k not in taken}}


def longest_trajectory(executor: str, options: dict[str, Any], context: int) -> int:
    """Tokens of the longest trajectory: the model's `context`, or less where the job says so."""
    length = parsed_options(executor, options).max_model_len
    return min(context, length or context)
