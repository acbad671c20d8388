"""The description of the API, made from the table of its doors."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import rlix
from rlix.serve.api.models import Problem

_REFERENCE = "#/components/schemas/{model}"
_PROBLEMS = {
    "401": "No user has this token",
    "403": "Not yours",
    "404": "There is no such job",
    "409": "Not in this state",
    "422": "A mistake in what was sent",
    "503": "Not now",
}


@dataclass(frozen=True, slots=True)
class Door:
    """One thing that can be asked. `body` and `answer`: its JSON."""

    method: str
    path: str
    summary: str
    handler: Callable[..., Awaitable[BaseModel]]
    body: type[BaseModel] | None
    answer: type[BaseModel]


def describe(doors: Sequence[Door]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    models = {m for door in doors for m in (door.body, door.answer) if m is not None} | {Problem}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, definitions = models_json_schema([(m, "validation") for m in ordered], ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for door in doors:
        paths.setdefault(door.path, {})[door.method.lower()] = _operation(door)
    return {
        "openapi": "3.1.0",
        "info": {"title": "RLix", "version": rlix.__version__},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(door: Door) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", door.path)
    problems = {code: {"description": text, **_json(Problem)} for code, text in _PROBLEMS.items()}
    return {
        "summary": door.summary,
        "operationId": f"{door.handler.__name__}",
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _schema(name)} for name in names],
        **({} if door.body is None else {"requestBody": {"required": True, **_json(door.body)}}),
        "responses": {"200": {"description": "Done", **_json(door.answer)}, **problems},
    }


def _schema(name: str) -> dict[str, str]:
    return {"type": "integer" if name == "id" else "string"}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}}
