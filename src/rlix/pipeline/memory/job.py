"""What a job takes of each device, phase by phase, and what to change when that is more than there is."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlix.node.devices import usable
from rlix.pipeline.memory import estimate
from rlix.pipeline.memory.estimate import PREFILL_TOKENS, Generation, Need, Training
from rlix.pipeline.memory.shape import ModelShape, shape_of
from rlix.pipeline.spec.clusters import ClusterSpec
from rlix.pipeline.spec.executor import VllmOptions, parsed_options
from rlix.pipeline.spec.runs import target_problems
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Problem
from rlix.protocol.types import ClusterName

if TYPE_CHECKING:
    from rlix.pipeline.spec.job import JobSpec

logger = logging.getLogger(__name__)

_GIB = 2**30
_WIDE = 4
_WORTH_SAVING = 0.05  # of what a phase needs
_MOST_WAYS = 2


@dataclass(frozen=True, slots=True)
class JobMemory:
    """`fitting`: trajectories of the greatest length that a replica decodes at a time; None without a known memory."""

    needs: tuple[Need, ...]
    longest: int
    sequences: int
    fitting: int | None = None


def job_memory(spec: "JobSpec", model: ModelShape, memory: int | None = None) -> JobMemory:
    """What each phase of the job takes on each of its devices.

    Args:
        memory: bytes of a device, where it is known.
    """
    if spec.multi_lora:
        return _of_runs(spec, model, memory)
    return _of_job(spec, model, memory, _adapter(spec, model))


def _of_runs(spec: "JobSpec", model: ModelShape, memory: int | None) -> JobMemory:
    """Every run's adapter is there; of what else they take in a phase, one run's that takes most."""
    runs = [run.model_copy(update={"warmup": spec.warmup}) for run in spec.run_specs.values()]
    trained = sum(_adapter(run, model) or 0 for run in runs)
    found = [_of_job(run, model, memory, trained) for run in runs]
    most: dict[str, Need] = {}
    for need in (need for job in found for need in job.needs):
        most[need.phase] = max(most.get(need.phase, need), need, key=lambda need: need.total)
    return replace(max(found, key=lambda job: job.longest), needs=tuple(most.values()))


def _of_job(spec: "JobSpec", model: ModelShape, memory: int | None, trained: int | None) -> JobMemory:
    wanted = spec.algorithm.needs(off_policy=spec.schedule.works_ahead)
    clusters = spec.clusters_in_use
    reference = clusters.get(ClusterName.REFERENCE)
    train = replace(_training(spec, clusters[ClusterName.ACTOR_TRAIN], model), trained=trained)
    needs = [estimate.training(model, train)]
    if wanted.old_log_probs:
        needs.append(estimate.scoring(model, train, "old_log_probs", "actor_train"))
    if wanted.reference and reference is not None:
        how = replace(_training(spec, reference, model), stored=_bytes(spec))  # it has no adapter
        needs.append(estimate.scoring(model, how, "reference_log_probs", "reference", moments=False))
    if wanted.critic is not None:
        how = replace(_training(spec, clusters[ClusterName.CRITIC], model), stored=_WIDE)
        needs.append(estimate.training(model, how, "critic", has_logits=False))
    replica = _generation(spec, model)
    if not spec.generates:
        return JobMemory(tuple(needs), replica.longest, replica.sequences, None)
    needs.append(estimate.sync(model, train))
    infer = clusters[ClusterName.ACTOR_INFER]
    needs.append(estimate.generation(model, replica, infer.count or infer.unit))
    fits = None if memory is None else estimate.sequences_that_fit(model, replica, usable(memory))
    return JobMemory(tuple(needs), replica.longest, replica.sequences, fits)


def memory_problems(spec: "JobSpec", found: JobMemory, memory: int) -> Iterator[Problem]:
    """What cannot fit on devices with `memory` bytes: with numbers, and what to change."""
    for need in found.needs:
        if need.cluster == ClusterName.ACTOR_INFER:
            share = parsed_options(spec.rollout.executor, spec.rollout.executor_options).gpu_memory_utilization
            room = int((share or 0.9) * (usable(memory)))
        else:
            room = usable(memory)
        if need.total > room:
            yield Problem(
                f"clusters.{need.cluster}",
                f"{need.phase} needs about {gib(need.total)} on each device, and {gib(room)} of {gib(memory)} are "
                f"there for it: {described(need)}; {_advice(spec, need, found.longest)}",
            )


def check_memory(specs: Sequence["JobSpec"], memory: int) -> None:
    """Raise SpecError when a job cannot fit on devices with `memory` bytes, or its adapters not on its model.

    A job whose model's configuration cannot be had, or that has a pipeline of its own, is not looked at.
    """
    lines: list[str] = []
    for spec in specs:
        if spec.pipeline is not None and not spec.multi_lora:
            continue
        try:
            shape = shape_of(spec.model)
            lines += [spec.described(problem) for problem in target_problems(spec, shape.linear)]
            found = job_memory(spec, shape, memory)
        except SpecError as error:
            logger.warning("%s: the memory that it needs is not known: %s", spec.name, error)
            continue
        lines += [spec.described(problem) for problem in memory_problems(spec, found, memory)]
    if lines:
        raise SpecError("\n".join(lines))


def gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"


def described(need: Need) -> str:
    """The parts, the largest first."""
    parts = sorted(need.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count / _GIB:.1f}" for name, count in parts if count)


def _training(spec: "JobSpec", cluster: ClusterSpec, model: ModelShape) -> Training:
    longest, own = _longest(spec, model), spec.training
    devices = cluster.count or cluster.unit
    parts = spec.algorithm.minibatches * max(1, devices // cluster.together)
    rows = -(-spec.trajectories_per_step // parts)  # of a minibatch, on the devices that compute on it together
    return Training(
        devices=devices,
        width=cluster.copy_of(devices),
        compute=_bytes(spec),
        tokens=-(-min(max(own.micro_batch_tokens, longest), rows * longest) // cluster.together),
        checkpointing=own.activation_checkpointing,
        offload=own.offload_optimizer,
        stored=_WIDE if spec.lora is None or spec.warmup is not None else _bytes(spec),
    )


def _adapter(spec: "JobSpec", model: ModelShape) -> int | None:
    """Numbers of a job's adapter, if each linear layer has one; None: it trains the model."""
    if spec.lora is None:
        return None
    if spec.lora.path is None:
        return estimate.adapter_parameters(model, spec.lora.rank)
    from rlix.engine.lora import AdapterConfig  # imports torch

    return estimate.adapter_parameters(model, AdapterConfig.of_folder(Path(spec.lora.path)).rank)


def _generation(spec: "JobSpec", model: ModelShape) -> Generation:
    rollout, tensor_parallel = spec.rollout, spec.clusters.actor_infer.tensor_parallel
    options = parsed_options(rollout.executor, rollout.executor_options)
    vllm = options if isinstance(options, VllmOptions) else None
    return Generation(
        width=1 if rollout.executor == "transformers" else tensor_parallel,  # which has it whole on the first device
        dtype=_bytes(spec),
        sequences=rollout.max_num_seqs,
        longest=_longest(spec, model),
        share=options.gpu_memory_utilization or 0.9,
        cache_bytes=options.kv_cache_memory_bytes,
        graphs=vllm is not None and not vllm.enforce_eager,
        prefill_tokens=(vllm and vllm.max_num_batched_tokens) or PREFILL_TOKENS,
    )


def _longest(spec: "JobSpec", model: ModelShape) -> int:
    """Tokens of the longest trajectory, prompt included."""
    most = spec.rollout.longest(model.context)
    source = spec.source
    if source.environment is not None:
        return min(most, source.environment.max_tokens or most)
    prompts = source.longest_prompt
    return most if prompts is None else min(most, prompts + spec.rollout.max_new_tokens)


def _bytes(spec: "JobSpec") -> int:
    return 2 if spec.model.dtype == "bfloat16" else 4


def _advice(spec: "JobSpec", need: Need, longest: int) -> str:
    """What helps with the largest parts; of a part that is nothing beside the others nothing would be saved."""
    infers = need.cluster == ClusterName.ACTOR_INFER
    ways = _ways_of_rollout(spec) if infers else _ways_of_training(spec, need, longest)
    largest = sorted(ways.keys() & need.parts.keys(), key=lambda name: (-need.parts[name], name))
    helps = [name for name in largest if need.parts[name] >= _WORTH_SAVING * need.total] or largest[:1]
    return " or ".join(list(dict.fromkeys(way for name in helps for way in ways[name]))[:_MOST_WAYS])


def _ways_of_rollout(spec: "JobSpec") -> dict[str, tuple[str, ...]]:
    return {
        "weights": (f"raise clusters.actor_infer.tensor_parallel above {spec.clusters.actor_infer.tensor_parallel}",),
        "cache": ("lower rollout.executor_options.max_model_len",),
        "logits": (f"lower rollout.max_num_seqs ({spec.rollout.max_num_seqs})",),
        "activations": ("lower rollout.executor_options.max_num_batched_tokens",),
    }


def _ways_of_training(spec: "JobSpec", need: Need, longest: int) -> dict[str, tuple[str, ...]]:
    own, cluster = spec.training, spec.clusters_in_use[need.cluster]
    count = cluster.count or 1
    width = cluster.copy_of(count)
    field, more = ("shards", count) if count > width else ("gpus", 2 * width)
    wider = f"set clusters.{need.cluster}.{field}: {more}"
    offload = count == width and not own.offload_optimizer
    # A batch has at least one trajectory, whatever its tokens may be.
    whole = f"make the longest trajectory shorter ({longest} tokens)"
    fewer = (
        f"lower training.micro_batch_tokens ({own.micro_batch_tokens})" if own.micro_batch_tokens > longest else whole
    )
    keeps = need.phase.endswith("training") and not own.activation_checkpointing
    return {
        "weights": (wider,),
        "gradients": (wider,),
        "optimizer": ("set training.offload_optimizer: true" if offload else wider,),
        "gathered": ("use a smaller model" if spec.model.dtype == "bfloat16" else "use model.dtype: bfloat16",),
        "activations": (*(("set training.activation_checkpointing: true",) if keeps else ()), fewer),
    }
