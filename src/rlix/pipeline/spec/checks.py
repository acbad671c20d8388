"""What must hold between the sections of a job."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from math import gcd

from pydantic import ValidationError

from rlix.pipeline.spec.algorithm import ALGORITHMS
from rlix.pipeline.spec.clusters import ClusterSpec, GpuRange, cluster_problems
from rlix.pipeline.spec.evaluation import EvaluationSetSpec
from rlix.pipeline.spec.executor import executor_problems, name_problems
from rlix.pipeline.spec.lora import MULTI_LORA, unknown_targets
from rlix.pipeline.spec.named import Shipped, option_problems, parse_options, unknown_name
from rlix.pipeline.spec.schedule import SCHEDULES, AheadOptions
from rlix.pipeline.spec.sections import Sections
from rlix.pipeline.spec.source import AGENTS, ENVIRONMENTS, REWARDS, TASKS
from rlix.pipeline.spec.source_checks import not_held_out, source_problems
from rlix.protocol.spec_file import Problem

_SMALLEST_VLLM_HEAD = _MOST_DIGITS = 32


def _names(spec: Sections) -> Iterator[Problem]:
    source = spec.source
    yield from unknown_name("algorithm.name", spec.algorithm.name, ALGORITHMS)
    yield from unknown_name("schedule.name", spec.schedule.name, SCHEDULES)
    yield from name_problems(spec.rollout.executor, spec.training.executor)
    if source.task:
        yield from unknown_name("source.task.name", source.task.name, TASKS)
    if source.environment:
        yield from unknown_name("source.environment.name", source.environment.name, ENVIRONMENTS)
    if source.openai:
        yield from unknown_name("source.openai.name", source.openai.name, AGENTS)
    for i, reward in enumerate(source.rewards):
        yield from unknown_name(f"source.rewards.{i}.name", reward.name, REWARDS)
    if source.name is not None:
        yield from unknown_name("source.name", source.name, ())
    if spec.pipeline:
        yield from unknown_name("pipeline", spec.pipeline.name, (MULTI_LORA,))


def _lora(spec: Sections) -> Iterator[Problem]:
    if spec.runs and not spec.multi_lora:
        yield Problem("runs", "are of a job with many adapters; add 'pipeline: multi_lora'")
    if spec.multi_lora and not spec.runs:
        yield Problem("runs", "is missing: multi_lora trains an adapter for each of them; add e.g. 'runs: {a: {}}'")
    if (spec.lora or spec.multi_lora) and spec.optimizer.groups:
        yield Problem("optimizer.groups", "has no effect on an adapter, whose parameters all learn alike; remove it")
    if (path := spec.lora and spec.lora.path) and (given := sorted(spec.lora.model_fields_set - {"path"})):
        yield Problem(f"lora.{given[0]}", f"is what the adapter in {path} has; remove this, or the path")
    if spec.model.kind == "tiny":
        yield from unknown_targets(spec.lora, spec.model.linear)


def _unused_clusters(spec: Sections) -> Iterator[Problem]:
    """Of parts that an algorithm of ours does without; a pipeline of the user's has what it likes."""
    if spec.algorithm.name not in ALGORITHMS or (spec.pipeline is not None and not spec.multi_lora):
        return
    try:
        needs = spec.algorithm.needs(off_policy=False)
    except ValidationError:  # reported with the other options
        return
    if spec.clusters.critic and needs.critic is None:
        yield Problem(
            "clusters.critic", f"is not used: {spec.algorithm.name} has no critic; remove this, or use 'algorithm: ppo'"
        )
    adapter = bool(spec.lora or spec.runs)
    if spec.clusters.reference and not needs.reference_engine(adapter=adapter):
        why = (
            "with LoRA it is the model without its adapter; remove this"
            if adapter
            else ("without a KL there is no reference model; remove this, or set algorithm.options.kl_coefficient")
        )
        yield Problem("clusters.reference", f"is not used: {why}")


def _attention(spec: Sections) -> Iterator[Problem]:
    if spec.training.attention == "flash_attention_2" and spec.model.dtype != "bfloat16":
        yield Problem(
            "training.attention",
            f"flash_attention_2 computes in bfloat16, and the model in {spec.model.dtype}; set 'model.dtype: bfloat16' "
            "(of a model with a path), or use sdpa",
        )


def _plan(spec: Sections) -> Iterator[Problem]:
    plan = spec.plan
    if plan is None:
        return
    if spec.pipeline is not None:
        yield Problem("plan", "is for jobs that train one policy with RLix's own pipeline; write 'clusters' instead")
    if not spec.generates:
        yield Problem("plan", "is for jobs with rollouts; write 'clusters: {actor_train: {gpus: 8}}' instead")
    if spec.declared_speed is None:
        return
    if plan.prompt_tokens is None and spec.source.longest_prompt is None:
        yield Problem("plan.prompt_tokens", "is missing: a plan from declared_speed needs to know how long prompts are")
    if plan.answer_tokens is None and (spec.source.environment or spec.source.openai):
        yield Problem("plan.answer_tokens", "is missing: how much a trajectory generates in all its turns is not known")


def _schedule(spec: Sections) -> Iterator[Problem]:
    """Schedules and algorithms of the user's are theirs to combine."""
    off_policy = spec.schedule.works_ahead
    if off_policy:
        try:
            ahead: AheadOptions = parse_options(Shipped(AheadOptions), spec.schedule.options)
        except ValidationError:  # reported with the other options
            return
        where = "schedule.options"
        if ahead.on_stale == "wait" and ahead.steps_ahead > ahead.max_staleness:
            yield Problem(
                f"{where}.ahead",
                f"{ahead.ahead} exceeds max_staleness {ahead.max_staleness}; lower it, or use 'on_stale: drop' or "
                "rescore",
            )
        if ahead.in_flight == "finish" and ahead.steps_ahead > 1:
            yield Problem(f"{where}.in_flight", "finish generates one step at a time; set 'ahead: 1'")
    algorithm = spec.algorithm
    if (cap := algorithm.cap(off_policy)) is None and spec.schedule.name == "on_policy":
        for key in ("importance_floor", "importance_level", "importance_beyond"):
            if getattr(algorithm, key) == type(algorithm).model_fields[key].default:
                continue
            yield Problem(f"algorithm.{key}", "has no effect where no token is weighed; set algorithm.importance_cap")
    elif cap is not None and algorithm.importance_floor > cap:
        yield Problem(
            "algorithm.importance_floor", f"{algorithm.importance_floor:g} is above the cap {cap:g}; lower it"
        )
    if spec.algorithm.cap(off_policy) is not None and (problem := spec.rollout.not_as_the_policy_says):
        yield Problem("rollout.temperature", problem)


def _shipped_options(spec: Sections) -> Iterator[Problem]:
    if spec.algorithm.name in ALGORITHMS:
        yield from option_problems("algorithm.options", spec.algorithm.options_owner(), spec.algorithm.options)
    if spec.schedule.name in SCHEDULES:
        owner = Shipped(SCHEDULES[spec.schedule.name])
        yield from option_problems("schedule.options", owner, spec.schedule.options)
    rollout = spec.rollout
    yield from executor_problems(rollout.executor, rollout.executor_options, rollout.max_new_tokens)


def _model(spec: Sections) -> Iterator[Problem]:
    model = spec.model
    if model.kind != "tiny":
        return
    for name, cluster in spec.clusters.items():
        if model.heads % cluster.together:
            yield Problem(
                f"clusters.{name}.sequence_parallel",
                f"{cluster.together} does not divide the model's {model.heads} heads",
            )
    if model.hidden_size % (2 * model.heads):
        yield Problem(
            "model.hidden_size", f"{model.hidden_size} is not a multiple of {2 * model.heads} (twice the heads)"
        )
    if twice := sorted(c for c, count in Counter(model.alphabet).items() if count > 1):
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


def _lengths(spec: Sections) -> Iterator[Problem]:
    task = spec.source.task
    if spec.model.kind != "tiny":
        return
    if task is None or task.name not in TASKS:
        if spec.rollout.max_new_tokens >= spec.model.context:
            yield Problem(
                "rollout.max_new_tokens",
                f"{spec.rollout.max_new_tokens} leaves no room for a prompt in the {spec.model.context} tokens of "
                "model.context; lower it, or raise that",
            )
        return
    digits = task.options.get("digits", 4)
    if not (isinstance(digits, int) and 1 <= digits <= _MOST_DIGITS):
        return  # reported with the other options
    answer, prompt = digits + 1, digits + 2
    if spec.rollout.max_new_tokens < answer:
        yield Problem(
            "rollout.max_new_tokens",
            f"is {spec.rollout.max_new_tokens}, but an answer takes {answer} tokens ({digits} digits and the "
            f"end token); set it to {answer} or more",
        )
    if prompt + spec.rollout.max_new_tokens > spec.model.context:
        yield Problem(
            "model.context",
            f"is {spec.model.context}, but a prompt of {prompt} tokens and {spec.rollout.max_new_tokens} new ones need "
            f"{prompt + spec.rollout.max_new_tokens}; raise it",
        )
    if absent := sorted(set("0123456789>") - set(spec.model.alphabet)):
        yield Problem("model.alphabet", f"lacks {''.join(absent)!r}, which the task {task.name} uses; add it")


def _overlong(spec: Sections) -> Iterator[Problem]:
    """Of sources of which one answer is a sample; how long others get shows when the model is there."""
    buffer, longest = spec.algorithm.overlong_buffer, spec.rollout.max_new_tokens
    if buffer > longest and (spec.source.task or spec.source.data):
        yield Problem(
            "algorithm.overlong_buffer",
            f"{buffer} is more than the {longest} tokens of rollout.max_new_tokens, so every answer would be punished; "
            "lower it",
        )


def _groups(spec: Sections) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if spec.rollout.samples_per_prompt > 1:
        return
    if algorithm.compares_groups:
        yield Problem(
            "rollout.samples_per_prompt",
            f"is 1, and {algorithm.name} compares the samples of a prompt with each other; use 2 or more, or an "
            "algorithm that does not (ppo, reinforce_pp)",
        )
    elif algorithm.rounds:
        yield Problem(
            "algorithm.resample_rounds",
            "replaces prompts whose samples have equal rewards: those are all with samples_per_prompt 1; remove it",
        )


def _batches(spec: Sections) -> Iterator[Problem]:
    """Every rank gets the same share of a batch, so that a step's result does not depend on how it was split."""
    total, minibatches = spec.trajectories_per_step, spec.algorithm.minibatches
    train = spec.clusters.actor_train
    ranks, named = _ranks(train), f"clusters.actor_train.{train.field}"
    if train.sequence_parallel > 1:
        named += f" / sequence_parallel {train.sequence_parallel}"
    parts = ranks * minibatches
    if total % parts:
        samples = spec.rollout.samples_per_prompt
        step = parts // gcd(parts, samples)
        fitting = next((d for d in range(min(ranks - 1, total), 0, -1) if total % (d * minibatches) == 0), None)
        fewer = f", or {fitting} training devices" if fitting else ", or another number of minibatches"
        times = f"{minibatches} minibatches × " if minibatches > 1 else ""
        yield Problem(
            "rollout.prompts_per_step",
            f"{spec.rollout.prompts_per_step} prompts × {samples} samples are {total} and do not divide among {times}"
            f"{ranks} training devices ({named}); use a multiple of {step} prompts ({step} × "
            f"{samples} samples are {step * samples // parts} for each){fewer}",
        )
    if spec.warmup and spec.warmup.batch_size % ranks:
        yield Problem(
            "warmup.batch_size",
            f"{spec.warmup.batch_size} does not divide over {ranks} training devices "
            f"({named}); use a multiple of {ranks}",
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


def _evaluation(spec: Sections) -> Iterator[Problem]:
    for where, own in (spec.evaluation.by_field if spec.evaluation else {}).items():
        for problem in _evaluated(spec, own):
            yield problem if problem.field.startswith("model") else Problem(f"{where}.{problem.field}", problem.message)


def _evaluated(spec: Sections, own: EvaluationSetSpec) -> Iterator[Problem]:
    """Checked as the job is that learns from what this one is evaluated on."""
    if own.source is not None and not own.source.model_fields_set:
        yield Problem("source", "is empty; add e.g. 'source: {task: sort_digits}'")
    elif own.source is not None and own.source.conversations is not None:
        yield Problem("source.conversations", "has no rewards; name prompts, e.g. 'data' with 'rewards'")
    elif own.source is None and spec.source.conversations is not None:
        yield Problem("source", "is missing: conversations have no rewards; name prompts")
    elif own.source is None and spec.source.data is not None:
        yield Problem("source", "is missing: data that are trained on are not held out; name others")
    elif own.source is None and spec.source.name is not None:
        yield Problem("source", "is missing: only you know what your own source holds out; name one")
    else:
        source = own.held_out(spec.source)
        yield from not_held_out(spec.source, source)
        if source.openai and spec.source.openai and source.openai.port not in (0, spec.source.openai.port):
            yield Problem("source.openai.port", "is not used: a job has one endpoint, the source's own; leave it out")
        rollout = {"max_new_tokens": own.max_new_tokens or spec.rollout.max_new_tokens}
        held_out = spec.model_copy(
            update={"source": source, "rollout": spec.rollout.model_copy(update=rollout), "warmup": None}
        )
        found = [*_names(held_out), *source_problems(held_out)] if own.source else []
        found += _lengths(held_out) if own.source or own.max_new_tokens else []
        for problem in found:
            section = problem.field.partition(".")[0]
            if problem.field == "rollout.max_new_tokens":
                yield Problem("max_new_tokens", problem.message)
            elif section in ("source", "model"):
                yield problem


def _ranks(cluster: ClusterSpec) -> int:
    """Among how many devices, or groups of them, a batch is split; 1 where that is not fixed."""
    if isinstance(cluster.gpus, GpuRange):
        return 1
    return max(1, (cluster.count or 1) // cluster.together)


def _clusters(spec: Sections) -> Iterator[Problem]:
    fixed = spec.pipeline is None or spec.multi_lora
    yield from cluster_problems(spec.clusters, fixed=fixed, runs=spec.multi_lora, planned=spec.is_unplanned)


_CHECKS: tuple[Callable[[Sections], Iterator[Problem]], ...] = (
    _names, source_problems, _schedule, _shipped_options, _model, _lengths, _overlong, _groups, _batches, _evaluation,
    _lora, _unused_clusters, _attention, _plan, _clusters,
)  # fmt: skip


def inconsistencies(spec: Sections, left_out: Collection[str] = ()) -> list[Problem]:
    """Problems that show in the spec alone, without what is the user's own, and without what looks at a section that is
    `left_out`."""
    found: list[Problem] = []
    for name in left_out:
        del spec.__dict__[name]
    for check in _CHECKS:
        with suppress(*([AttributeError] if left_out else [])):
            found += check(spec)
    return found
