"""From the source that a job describes to the object."""

from typing import Any, cast

from rlix.pipeline.sources.base import Source, Surroundings
from rlix.pipeline.sources.conversations import ConversationSource
from rlix.pipeline.sources.data import DataTask
from rlix.pipeline.sources.episodes import EpisodeSource
from rlix.pipeline.sources.prompts import PromptSource
from rlix.pipeline.sources.tables import load_tables
from rlix.pipeline.sources.tasks.base import Task
from rlix.pipeline.spec.named import import_class, import_object, options_of, parse_options
from rlix.pipeline.spec.source import TASK_GIVEN, SourceSpec, TaskSpec
from rlix.protocol.errors import SpecError


def build_source(spec: SourceSpec, around: Surroundings) -> Source:
    """Raises SpecError when the data does not hold what the spec says, or what the job names is no source."""
    if spec.environment is not None:
        return EpisodeSource(spec.environment, around, spec.chat)
    if spec.openai is not None:  # by name: what ships for others is above this layer
        agents: Any = import_object("rlix.integrations.openai.source:AgentSource")
        return cast(Source, agents(spec.openai, around, spec.chat))
    if spec.task is not None:
        return PromptSource(build_task(spec.task, around.tokenizer), around)
    if spec.data is not None:
        room = around.context - around.sampling.max_new_tokens
        longest = min(room, spec.data.max_prompt_tokens or room)
        rows, most = load_tables(spec.data), around.sampling.max_new_tokens
        task = DataTask(
            spec.data, rows, spec.rewards, around.tokenizer, longest, around.stop, spec.chat, most, around.group_size
        )
        return PromptSource(task, around)
    if spec.conversations is not None:
        return ConversationSource(spec.conversations, around, spec.chat)
    if spec.name is None:
        raise SpecError("source: is missing: where samples come from; add e.g. 'source: {task: sort_digits}'")
    found = import_class("source", spec.name)
    return cast(Source, found(options_of(found, spec.options), around))


def build_task(spec: TaskSpec, tokenizer: Any) -> Task:
    """The task that a job names."""
    make: Any = import_object(spec.target)
    options = parse_options(make, spec.options, TASK_GIVEN)
    task = make(tokenizer, **options) if isinstance(options, dict) else make(tokenizer, options)
    if not isinstance(task, Task):
        raise SpecError(f"source.task.name: {spec.name!r} is not a rlix.pipeline.sources.tasks.Task")
    return task
