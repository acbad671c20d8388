"""Writes the pages that say what the code says: `python docs/reference.py`."""

import ast
import asyncio
import json
import re
import runpy
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import typer

from rlix.cli.main import app
from rlix.serve.api import models
from rlix.serve.api.app import Service, make_app

DOCS = Path(__file__).parent
SOURCES = DOCS.parent / "src" / "rlix"
WRITTEN = "This page is written from the code by `python docs/reference.py`; a test keeps it current.\n"

CLI = f"""# Command line

How commands belong together is said on the pages of their tasks: [share a pool](share.md), [a queue](queue.md),
[a cluster](cluster.md), [simulator](simulator.md), [flows](flows.md), [multi-LoRA](multi-lora.md). Every command knows
`--help`; `rlix --verbose COMMAND` logs what the library does, on stderr.

Commands work on the control plane that runs *here*: the Ray cluster that `RAY_ADDRESS` names, else that of `RLIX_HOME`.
A `SPEC` is a job file, or the name of a job that ships with RLix. A `JOB` is a job's name, or its id (`ft_1`).

`--json` makes every command but `serve`, `deploy` and `schema` print one JSON value on stdout (`logs` one for each
part, a line each); anything else goes to stderr. Those of the queue print what [its API](http-api.md) answers,
`run`, `watch` and `report` the summary of [the report](reports.md), `simulate` its rows; `rlix schema --answers`
describes the others. `--gpus` counts GPUs, `--memory` is in GiB. `rlix --install-completion` lets the shell complete
commands and options.

An editor with the YAML language server completes and checks a job file that begins with
`# yaml-language-server: $schema=job.schema.json`, beside what `rlix schema > job.schema.json` has written.

| exit code | |
|---|---|
| 0 | done; of `run` and `watch`: every job finished, or `watch` was left |
| 1 | a job failed or was stopped by somebody else; something is wrong (`doctor`); the control plane does not answer |
| 2 | a mistake in a spec or an option, or something you may not do: one message, nothing was started |
| 130, 143 | stopped by Ctrl-C, by SIGTERM |

{WRITTEN}"""
HTTP = f"""# HTTP API

Of [the queue](queue.md) (`rlix serve`, port 7459). Every request has the header `Authorization: Bearer TOKEN`.
`/openapi.json` describes it for programs. What is wrong is answered by `{{"error": "..."}}`: 401 no such token,
403 not yours, 404 no such job, 409 not in this state, 422 a mistake in what was sent, 503 not now. Agents ask
[endpoints](agents.md) of their own, and so do clients of [Tinker](tinker.md).

{WRITTEN}"""
ERRORS = f"""# Errors

What RLix raises is an `rlix.RlixError`, which is a `RuntimeError`; messages say what is wrong, where, and what
to do. By message: [troubleshooting](troubleshooting.md).

{WRITTEN}"""


def command_line() -> str:
    return "\n".join(
        [CLI, *(part for name, command in _commands(typer.main.get_command(app)) for part in _command(name, command))]
    )


def _commands(group: Any, before: str = "rlix") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def _command(name: str, command: Any) -> list[str]:
    arguments = [one for one in command.params if not one.opts[0].startswith("-")]
    options = [one for one in command.params if one.opts[0].startswith("-") and one.name != "help" and not one.hidden]
    usage = " ".join([name, *(_argument(one) for one in arguments)])
    text = [f"## `{usage}`", "", *_paragraphs(command.help)]
    text += [f"- `{_argument(one)}`: {_line(one.help)}" for one in arguments if one.help]
    text += [""] if any(one.help for one in arguments) else []
    if options:
        rows = [f"| {_option(one)} | {_line(one.help or '')}{_default(one)} |" for one in options]
        text += ["| option | |", "|---|---|", *rows, ""]
    return text


def _paragraphs(text: str | None) -> list[str]:
    return [line for paragraph in (text or "").split("\n\n") for line in (_line(paragraph), "")]


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _argument(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return name if one.required or name.startswith("[") else f"[{name}]"


def _option(one: Any) -> str:
    names = ", ".join([*one.opts, *one.secondary_opts])
    value = "" if one.is_flag or one.is_bool_flag else f" {one.metavar or _value(one.type_descriptor.annotation)}"
    return f"`{names}{value}`".replace("|", "\\|")


def _value(annotation: Any) -> str:
    inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, inner))
    if inner:
        return _value(inner[0])
    return {int: "N", float: "NUMBER", Path: "PATH", bool: ""}.get(annotation, "TEXT")


def _default(one: Any) -> str:
    if one.is_flag or one.is_bool_flag or one.default in (None, (), []) or callable(one.default):
        return ""
    return f" (`{one.default}`)"


def http_api() -> str:
    application = make_app(cast(Service, Service(None, None, None, None, None)))  # type: ignore[arg-type]
    (route,) = [one for one in application.routes if one.path == "/openapi.json"]  # type: ignore[attr-defined]
    api = json.loads(asyncio.run(route.endpoint(None)).body)  # type: ignore[attr-defined]
    rows = [
        f"| `{method.upper()} {path}` | {one['summary']} | {_body(one.get('requestBody'))} | "
        f"{_body(one['responses']['200'])} |"
        for path, methods in api["paths"].items()
        for method, one in methods.items()
    ]
    meanings = _meanings(Path(models.__file__))
    parts = [HTTP, "| request | | body | answer |", "|---|---|---|---|", *rows, ""]
    for name, schema in api["components"]["schemas"].items():
        needed = schema.get("required", [])
        rows = [
            f"| `{field}` | {_json_type(kind)}{'' if field in needed else ', optional'} | "
            f"{meanings.get((name, field), '')} |"
            for field, kind in schema.get("properties", {}).items()
        ]
        about = [_line(schema["description"]), ""] if "description" in schema else []
        parts += [f"## {name}", "", *about, "| field | type | |", "|---|---|---|", *rows, ""]
    return "\n".join([*parts, *prometheus()])


def prometheus() -> list[str]:
    rows = []
    for node in ast.walk(ast.parse((SOURCES / "serve" / "api" / "metrics.py").read_text())):
        if isinstance(node, ast.Call):
            given, kind = node.args, getattr(node.func, "id", "")
        elif isinstance(node, ast.Tuple):
            given, kind = node.elts, "a counter of a job" if len(node.elts) == 4 else "a gauge of a job"
        else:
            continue
        texts = [one.value for one in given[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if len(texts) == 2 and texts[0].startswith("rlix_"):
            labels = _labels(node, kind)
            name = texts[0] + ("_total" if "counter" in kind.lower() and not texts[0].endswith("_total") else "")
            rows.append((node.lineno, f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {texts[1]} |"))
    head = ["## `GET /metrics`", "", "For Prometheus, with a token like everything else.", ""]
    return [*head, "| metric | labels | |", "|---|---|---|", *(row for _, row in sorted(rows)), ""]


def _labels(node: ast.Call | ast.Tuple, kind: str) -> list[str]:
    if isinstance(node, ast.Tuple):
        own = node.elts[2] if len(node.elts) == 4 else None
        return ["id", "name", "owner", "team", *(_texts(own) if own else [])]
    given = [one.value for one in node.keywords if one.arg == "labels"]
    return _texts(given[0]) or ["team"] if given else []


def _texts(node: ast.expr) -> list[str]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]


def _body(content: dict[str, Any] | None) -> str:
    if content is None or "content" not in content:
        return ""
    kind = content["content"].get("application/json", {}).get("schema", {})
    return _json_type(kind)


def _json_type(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        name = kind["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(_json_type(one) for one in kind["anyOf"])
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("type") == "array":
        return f"list of {_json_type(kind.get('items', {}))}"
    return {"null": "null", "string": "text", "object": "object"}.get(kind.get("type", ""), kind.get("type", "any"))


def _meanings(file: Path) -> dict[tuple[str, str], str]:
    """The text below each field of each class in a file."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                ):
                    found[node.name, cast(ast.Name, field.target).id] = _line(str(text.value.value))
    return found


def errors() -> str:
    classes: dict[str, tuple[str, list[str], str]] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        module = ".".join(["rlix", *file.relative_to(SOURCES).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes.setdefault(node.name, (module, bases, ast.get_docstring(node) or ""))

    def ours(name: str) -> bool:
        return name == "RlixError" or (name in classes and any(map(ours, classes[name][1])))

    exported = set(re.findall(r"\w+Error", (SOURCES / "__init__.py").read_text()))
    rows = []
    for name, (module, bases, text) in sorted(classes.items(), key=lambda item: (item[0] not in exported, item[0])):
        if ours(name):
            where = f"rlix.{name}" if name in exported else f"{module}.{name}"
            rows.append(
                f"| `{where}` | {', '.join(f'`{base}`' for base in bases)} | {_line(text.split(chr(10) * 2)[0])} |"
            )
    return "\n".join([ERRORS, "| error | is a | |", "|---|---|---|", *rows, ""])


def of_specs(page: str) -> Callable[[], str]:
    return lambda: str(runpy.run_path(str(DOCS / "job_spec.py"))[page]())


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_line,
    "errors.md": errors,
    "http-api.md": http_api,
    "job-spec.md": of_specs("reference"),
    "settings.md": of_specs("settings"),
}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write())
