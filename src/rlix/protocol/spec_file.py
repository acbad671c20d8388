"""Reading what users write in YAML so that every mistake can be reported by file, line, field and fix."""

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticCustomError

from rlix.protocol.errors import SpecError

_MOST_SHOWN = 80  # characters of a value that is wrong
_MOST_VALUES = 100_000  # of a file, its aliases written out
FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the dotted field ("" for the file as a whole) and what to do about it."""

    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a spec came from: a file, and the line of each dotted field in it; `given` are the fields that were said
    beside it. Never part of a spec's identity."""

    path: str = field(default="", compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    given: tuple[str, ...] = field(default=(), compare=False)

    def describe(self, problem: Problem) -> str:
        if any(f"{problem.field}.".startswith(f"{name}.") for name in self.given):
            return f"--set {problem.field}: {problem.message}"
        parts = problem.field.split(".")
        # A missing key has no line of its own; the section it belongs to is the place to look.
        line = next((n for i in range(len(parts), 0, -1) if (n := self.lines.get(".".join(parts[:i])))), None)
        where = self.path + (f":{line}" if line else "")
        return ": ".join(part for part in (where, problem.field, problem.message) if part)

    def error(self, problems: Iterable[Problem]) -> SpecError:
        return SpecError("\n".join(self.describe(problem) for problem in problems))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of a number: 1e-3 is one (YAML 1.1 reads it as text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def read_yaml(
    path: Path, what: str = "a job spec is a mapping of keys such as 'name: my_job'"
) -> tuple[dict[str, Any], Origin]:
    """The mapping in the file and where its fields stand. Raises SpecError for anything that is not one mapping."""
    name = str(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise SpecError(f"{name}: is no regular file, so it is not read")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{name}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise SpecError(f"{name}: cannot be read: {error.strerror}") from error
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node and (values := _size(node, {})) > _MOST_VALUES:
            raise SpecError(
                f"{name}: holds {values:,} values with its aliases (*name) written out; write fewer of them"
            )
        lines = dict(_lines(node, "", name)) if node else {}
        data = _with_text_keys(loader.construct_document(node)) if node else None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(f"{name}:{line}: not valid YAML: holds the character {chr(error.character)!r}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        hint = "; indent with spaces" if "\\t" in str(error.problem) else ""
        raise SpecError(f"{where}: not valid YAML: {error.problem or error.context}{hint}") from error
    except RecursionError as error:
        raise SpecError(f"{name}: not valid YAML: nested too deeply, or an alias is part of itself") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{name}: not valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        found = "empty" if data is None else f"a {type(data).__name__}"
        raise SpecError(f"{name}: is {found}; {what}")
    return data, Origin(name, lines)


def with_values(data: dict[str, Any], origin: Origin, given: Sequence[str]) -> tuple[dict[str, Any], Origin]:
    """The mapping with values set as by `--set section.key=value`, each read as YAML; sections that lack are made.

    Raises SpecError: one is not of that form, or leads through what is no section.
    """
    result = copy.deepcopy(data)
    names = []
    for text in given:
        name, equals, value = text.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise SpecError(f"--set {text}: must be key=value, such as rollout.temperature=0.8")
        here: Any = result
        for key in keys[:-1]:
            here = here.setdefault(key, {}) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            raise SpecError(f"--set {text}: {'.'.join(keys[:-1])} is no section of {origin.path}")
        try:
            here[keys[-1]] = _with_text_keys(yaml.load(value, _Loader))
        except (yaml.YAMLError, RecursionError) as error:
            raise SpecError(f"--set {text}: its value is not valid YAML") from error
        names.append(".".join(keys))
    return result, replace(origin, given=tuple(names))


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many nodes there are with aliases written out; `known`: by the id of those that were counted.

    Raises RecursionError for one that is part of itself.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if (size := known.get(id(node))) is None:
        known[id(node)] = 0  # while it is being counted
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        size = known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    elif size == 0:
        raise RecursionError
    return size


def _with_text_keys(value: Any) -> Any:
    """As JSON has it: `2020-01-01: 3` has a date for a key."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _lines(node: yaml.Node, prefix: str, file: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            dotted = f"{prefix}.{key}" if prefix else key
            if key in seen:
                raise SpecError(f"{file}:{line}: {dotted}: given twice, first on line {seen[key]}; keep one")
            seen[key] = line
            yield dotted, line
            yield from _lines(value_node, dotted, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{prefix}.{index}", item.start_mark.line + 1
            yield from _lines(item, f"{prefix}.{index}", file)


_BEGIN_PATTERN = re.compile(r"\^([\w/]+)\.\+")
_MEANT = re.compile(r"unknown key; did you mean '([^']*)'")
"""Of a key that is misspelt; that the right one is missing need not be said then."""
_NAME_PATTERN = re.compile(r"\^\[A-Za-z0-9\]\[A-Za-z0-9(.*?)\]\*\$")


def problems_of(
    errors: Sequence[ErrorDetails],
    model: type[BaseModel],
    data: Mapping[str, Any],
    moved: Callable[[str], str | None] = lambda _: None,
) -> list[Problem]:
    """Pydantic's errors in words: which field, what is wrong, and the nearest thing that would be right.

    `moved`: what to write instead of a key that there was, by its dotted name.
    """
    problems: list[Problem] = []
    inner = {error["loc"][:depth] for error in errors for depth in range(len(error["loc"]))}
    for error in errors:
        if error["type"] == "too_short" and error["loc"] in inner:
            continue  # what is wrong with its items is said
        if "problems" in error.get("ctx", {}):  # checks across fields report several at once
            problems += error["ctx"]["problems"]
            continue
        loc = _without_tags(error["loc"], data, may_end_outside=error["type"] == "missing")
        problems.append(Problem(".".join(map(str, loc)), _message(error, loc, model, moved)))
    meant = {".".join([*p.field.split(".")[:-1], key[1]]) for p in problems if (key := _MEANT.match(p.message))}
    return [p for p in problems if p.field not in meant or not p.message.startswith("is missing")]


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when nothing is near."""
    match = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _message(error: ErrorDetails, loc: FieldPath, model: type[BaseModel], moved: Callable[[str], str | None]) -> str:
    given, text = (
        error["input"],
        error["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String should", "must")
        .replace("Value should", "must")
        .replace("a valid array", "a list"),
    )
    match error["type"]:
        case "missing":
            section = _models_at(model, loc[:-1])
            about = next((m.model_fields[str(loc[-1])].description for m in section if loc[-1] in m.model_fields), None)
            meaning = f" ({' '.join(about.split()).rstrip('.')})" if about else ""
            return f"is missing and has no default{meaning}; add it"
        case "extra_forbidden" | "unexpected_keyword_argument":
            if (instead := moved(".".join(map(str, loc)))) is not None:
                return instead
            return f"unknown key{_hint_for_key(str(loc[-1]), loc[:-1], model)}"
        case "literal_error" | "enum":
            allowed: list[str] = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            if loc[-1] == "kind" and len(kinds := _kinds(_models_at(model, loc[:-1]))) > 1:
                allowed, text = kinds, f"must be {' or '.join(map(repr, kinds))}"
            return f"{text}, not {_short(given)}{nearest(str(given), allowed)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a section with keys of its own, not {_short(given)}"
        case "value_error":
            return text
        case "string_pattern_mismatch" if allowed_letters := _NAME_PATTERN.fullmatch(error["ctx"]["pattern"]):
            marks = " ".join(allowed_letters[1].replace("-", "") + "-")
            return f"must begin with a letter or a digit and hold letters, digits and {marks}, not {_short(given)}"
        case "string_pattern_mismatch" if begins := _BEGIN_PATTERN.fullmatch(error["ctx"]["pattern"]):
            return f"must begin with {begins[1]!r}, not {_short(given)}"
        case "too_short":
            return f"must have at least {error['ctx']['min_length']}, not {_short(given)}"
        case _:
            return f"is empty, and {text}" if given is None else f"{text}, not {_short(given)}"


def _kinds(models: Iterable[type[BaseModel]]) -> list[str]:
    """What `kind` may be where sections of several kinds stand; each knows only its own."""
    return [m.model_fields["kind"].default for m in models if "kind" in m.model_fields]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 4]} ..."


def _hint_for_key(key: str, section: FieldPath, model: type[BaseModel]) -> str:
    models = _models_at(model, section)
    if other := next((m for m in models if {key, "kind"} <= m.model_fields.keys()), None):
        return f"; it goes with 'kind: {other.model_fields['kind'].default}'"
    siblings = {name for m in models for name in m.model_fields}
    if hint := nearest(key, siblings):
        return hint
    if "options" in siblings:
        return f"; an option of what is named is written under 'options' (known here: {', '.join(sorted(siblings))})"
    if elsewhere := [dotted for dotted in _dotted_names(model, "") if dotted.rsplit(".", 1)[-1] == key]:
        where = [f"{key!r} of the job as a whole" if dotted == key else repr(dotted) for dotted in elsewhere]
        return f"; did you mean {' or '.join(where)}?"
    return f"; known here: {', '.join(sorted(siblings)) or 'none'}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _models_at(model: type[BaseModel], path: FieldPath) -> list[type[BaseModel]]:
    models = [model]
    for part in path:
        fields = [m.model_fields[str(part)] for m in models if part in m.model_fields]
        if fields:  # else it is the place in a list, or a key of the user's
            models = [nested for info in fields for nested in _models_in(info.annotation)]
    return models


def _dotted_names(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        if get_origin(info.annotation) is dict:
            continue  # keys of the user's come between
        for nested in _models_in(info.annotation):
            yield from _dotted_names(nested, f"{prefix}{name}.")


def _without_tags(loc: FieldPath, data: Mapping[str, Any], may_end_outside: bool) -> FieldPath:
    """Pydantic puts the name of the union member it chose into the path; the file has no such key."""
    result: list[str | int] = []
    here: Any = data
    for position, part in enumerate(loc):
        known = part in (here if isinstance(here, Mapping) else range(len(here)) if isinstance(here, list) else ())
        if known:
            here = here[part]
        elif not (may_end_outside and position == len(loc) - 1):
            continue
        result.append(part)
    return tuple(result)


def inconsistent(problems: Sequence[Problem]) -> PydanticCustomError:
    """What a validator raises for what does not fit together; `problems_of` gives the problems back."""
    text = "\n".join(f"{p.field}: {p.message}" for p in problems)
    return PydanticCustomError("inconsistent", "{text}", {"text": text, "problems": list(problems)})
