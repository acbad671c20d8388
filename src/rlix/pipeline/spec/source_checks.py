"""What contradicts itself in a job's source: found without importing or reading anything."""

from collections.abc import Iterator

from rlix.pipeline.spec.algorithm import ALGORITHMS
from rlix.pipeline.spec.columns import data_fields
from rlix.pipeline.spec.sections import Sections
from rlix.pipeline.spec.source import EXTERNAL, REWARDS, VERIFIERS, ChatSpec, SourceSpec, TableSpec
from rlix.protocol.spec_file import Problem

_KINDS = ("task", "data", "environment", "openai", "conversations", "name")


def source_problems(spec: Sections) -> Iterator[Problem]:
    source = spec.source
    given = [kind for kind in _KINDS if getattr(source, kind) is not None]
    if len(given) > 1:
        yield Problem("source", f"has {' and '.join(given)}; keep one")
    elif not given and spec.pipeline is None:
        yield Problem("source", "is missing: where samples come from; add e.g. 'source: {task: sort_digits}'")
    if source.options and source.name is None:
        owner = next((kind for kind in given if kind != "data"), None)
        yield Problem("source.options", f"are for a source of your own; write them under 'source.{owner or 'task'}'")
    yield from _options(source)
    yield from _conversations(spec)
    if source.openai and spec.rollout.spare_prompts:
        yield Problem("rollout.spare_prompts", "is not for agents, whose episodes end by themselves only; remove it")
    if source.openai and spec.warmup and spec.warmup.conversations is None:
        yield Problem("warmup", "learns from right answers, of which agents have none; remove it")
    yield from _rewards(source, given)
    yield from _tables(source)
    without = [] if source.data is None else [at for at, table in data_fields(source.data) if table.answer is None]
    if without:
        if named := [r.name for r in source.rewards if r.name in REWARDS]:
            yield Problem(
                f"{without[0]}.answer",
                f"the reward {named[0]} compares with an answer; name the column that holds it",
            )
        if spec.warmup:
            yield Problem(
                f"{without[0]}.answer", "a warm-up learns from answers; name the column that holds them, or drop warmup"
            )


def _conversations(spec: Sections) -> Iterator[Problem]:
    """What learns from given samples, and what from the policy's own; a pair is a group."""
    if spec.source.conversations is not None and spec.rollout.spare_prompts:
        yield Problem("rollout.spare_prompts", "is for what the policy generates; remove it")
    given, name = spec.source.conversations is not None, spec.algorithm.name
    offline = {"sft": 1, "dpo": 2}
    if (name in offline) != given and name in ALGORITHMS:
        fix = "name a table under 'source: {conversations: ...}'" if name in offline else "use sft or dpo"
        yield Problem("algorithm.name", f"{name} does not learn from samples of this source; {fix}")
    elif given and name in offline and spec.rollout.samples_per_prompt != offline[name]:
        each = "pairs" if name == "dpo" else "one conversation in a row"
        yield Problem("rollout.samples_per_prompt", f"{name} learns from {each}; set it to {offline[name]}")
    if name == "dpo" and spec.algorithm.epochs * spec.algorithm.minibatches > 1:
        yield Problem(
            "algorithm.minibatches" if spec.algorithm.minibatches > 1 else "algorithm.epochs",
            "dpo takes one update per step, which the log-probs before it belong to; lower prompts_per_step instead",
        )


def _options(source: SourceSpec) -> Iterator[Problem]:
    """Options that nobody would read, or that are missing."""
    agent = source.openai
    if agent and agent.name == EXTERNAL and agent.options:
        yield Problem("source.openai.options", f"{EXTERNAL} takes none: whoever has the job's key plays; remove them")
    if agent and agent.name == VERIFIERS and "environment" not in agent.options:
        yield Problem("source.openai.options.environment", "is missing: what verifiers.load_environment finds; add it")
    if (source.task or source.name) and source.chat != ChatSpec():
        yield Problem("source.chat", "is not used: it is of data, environments and agents; remove it")
    if source.chat.system is not None and (source.environment or agent):
        yield Problem(
            "source.chat.system",
            "is not used: what the model reads first is said by the environment or the agent; have that say it",
        )
    if source.chat.history != "refuse" and source.data:
        yield Problem("source.chat.history", "is not used: prompts from data have one turn; remove it")


def _tables(source: SourceSpec) -> Iterator[Problem]:
    if source.data is None:
        return
    if source.data.mix and source.data.path:
        yield Problem("source.data", "has path and mix; keep one")
    elif source.data.mix:
        for name, field in TableSpec.model_fields.items():
            if getattr(source.data, name) != field.default:
                yield Problem(f"source.data.{name}", "is one table's; write it with those in mix that it holds for")
    for where, table in data_fields(source.data):
        if not table.path:
            yield Problem(f"{where}.path", "is missing and has no default (a file, a folder, or a hub name); add it")


def _rewards(source: SourceSpec, given: list[str]) -> Iterator[Problem]:
    if source.data and not source.rewards:
        yield Problem("source.rewards", "prompts from data need one; add e.g. 'rewards: [exact_match]'")
    elif source.rewards and not source.data and given:
        yield Problem(
            "source.rewards", f"a source with {given[0]} brings its own reward; remove this, or use data for prompts"
        )


def not_held_out(trained: SourceSpec, evaluated: SourceSpec) -> Iterator[Problem]:
    """Tables that are trained on. That two of them share rows is not looked for."""
    if trained.data is None or evaluated.data is None:
        return
    seen = {(table.path, table.config, table.split) for table in trained.data.tables}
    for where, table in data_fields(evaluated.data):
        if (table.path, table.config, table.split) in seen:
            yield Problem(f"{where}.path", "is what is trained on, so not held out; name another, or a split")
