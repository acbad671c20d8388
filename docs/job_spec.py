"""Writes docs/job-spec.md from the spec's own field descriptions: `python docs/job_spec.py`."""

import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlix.pipeline.spec.algorithm import ALGORITHMS
from rlix.pipeline.spec.executor import EXECUTORS
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.model import PretrainedModel, TinyModel
from rlix.pipeline.spec.schedule import SCHEDULES
from rlix.serve.queue.config import QueueSpec
from rlix.serve.tinker.settings import ServerSettings

TARGET = Path(__file__).with_name("job-spec.md")
_HUGE = 1e9
SETTINGS = """# Settings of servers

`server.yaml` is what `rlix serve --tinker server.yaml` reads ([Tinker's API](tinker.md)), `RLIX_HOME/queue.yaml` what
`rlix serve` reads ([the queue](queue.md#who-is-next)), when they start. Unknown keys are errors.

This page is written from the code by `python docs/reference.py`; a test keeps it current.
"""
INTRODUCTION = """# Job spec reference

A job is one YAML file, checked before anything starts. Unknown keys are errors. Paths are relative to the file. The
jobs that ship with RLix can be named without a path (`rlix run sort_digits`).

Whatever has a `name` and `options` may be something that ships or your own: `file.py:name`, relative to the job's file,
or `package.module:name`. A name alone may stand for the section: `algorithm: ppo` is `algorithm: {name: ppo}`. Options
are checked by what is named: by its class `Options` (a pydantic model or a dataclass), else by its signature. A file is
loaded under a name of its own, and its classes travel to other machines whole; it can import what is installed there.

This page is written from the code by `python docs/job_spec.py`; a test keeps it current.
"""


def reference() -> str:
    sections = [("", JobSpec)]
    done: set[type[BaseModel]] = set()
    parts = [INTRODUCTION]
    while sections:
        path, model = sections.pop(0)
        if model in done:
            continue
        done.add(model)
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in nested(model)]
        sections = [*children, *sections] if path else [*sections, *children]
        parts.append(section(path, model))
    parts += [options("algorithm", name, model) for name, model in ALGORITHMS.items()]
    parts += [section("rollout.executor_options", model, f" of `{name}`") for name, model in EXECUTORS.items()]
    parts += [options("schedule", name, model) for name, model in SCHEDULES.items() if model.model_fields]
    return "\n".join(parts)


def settings() -> str:
    """Of the files that servers read."""
    parts = [SETTINGS]
    for heading, name, model in (
        ("## `server.yaml`", "models.NAME", ServerSettings),
        ("## `queue.yaml`", "teams.NAME", QueueSpec),
    ):
        (inner,) = [child for _, child in nested(model)]
        parts += [section("", model).replace("## Top level", heading), section(name, inner)]
    return "\n".join(parts)


def options(path: str, name: str, model: type[BaseModel]) -> str:
    """The options of what is called `name`, and those of its own sections."""
    inner = [section(f"{path}.options.{child}", of_child) for child, of_child in nested(model)]
    return "\n".join([section(f"{path}.options", model, f" of `{name}`"), *inner])


def section(path: str, model: type[BaseModel], more: str = "") -> str:
    title = f"## `{path}`{more}" if path else "## Top level"
    if model in (TinyModel, PretrainedModel):
        title += " (built in)" if model is TinyModel else " (Hugging Face)"
    rows = [row(name, field) for name, field in model.model_fields.items()]
    doc = model.__doc__ if model.__doc__ and not model.__doc__.startswith("!!!") else ""
    intro = [" ".join(doc.split()), ""] if doc and path else []
    return "\n".join([title, "", *intro, "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def row(name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    elif isinstance(field.get_default(call_default_factory=True), BaseModel):
        default = "see below"
    else:
        value = field.get_default(call_default_factory=True)
        default = "–" if value in (None, "") else f"`{list(value) if isinstance(value, tuple) else value}`"
    meaning = " ".join((field.description or "").split())
    return f"| `{name}` | {type_name(field.annotation)}{bounds(field)} | {default} | {meaning} |"


def bounds(field: FieldInfo) -> str:
    """ ", above 0, at most 1": what a number may be. Limits that nobody meets are left out."""
    words = {Gt: "above", Ge: "at least", Lt: "below", Le: "at most"}
    given = [*field.metadata, *_constraints(field.annotation)]
    limits = [(words[type(one)], getattr(one, type(one).__name__.lower())) for one in given if type(one) in words]
    return "".join(f", {word} {limit:,}" for word, limit in limits if limit < _HUGE)


def _constraints(annotation: Any) -> list[Any]:
    """Of a number that may be left out."""
    if typing.get_origin(annotation) is typing.Annotated:
        given = typing.get_args(annotation)[1:]
        return [each for one in given for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [each for one in typing.get_args(annotation) for each in _constraints(one)]
    return []


def nested(model: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    return [(name, child) for name, field in model.model_fields.items() for child in models_in(field.annotation)]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(arg) for arg in args if arg is not type(None)))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        inner = [type_name(arg) for arg in args if arg is not ...]
        return f"list of {inner[0]}" if ... in args else f"[{', '.join(inner)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "section"}
    return names.get(origin or annotation, str(annotation))


if __name__ == "__main__":
    TARGET.write_text(reference())
