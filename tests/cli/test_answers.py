"""`--json`: every command has it, and what is printed is what the schema says."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from jsonschema import Draft202012Validator
from typer.main import get_command
from typer.testing import CliRunner

from rlix.cli.main import app

DOCUMENTS = {"serve", "deploy", "schema"}
"""What these print is no answer."""


def commands(group: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in getattr(group, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


@pytest.mark.parametrize(
    ("name", "command"),
    [each for each in commands(get_command(app)) if each[0] not in DOCUMENTS],
    ids=lambda each: each,
)
def test_every_command_speaks_json_and_the_one_vocabulary(name: str, command: click.Command) -> None:
    options = {option for parameter in command.params for option in parameter.opts}
    (as_json,) = (parameter for parameter in command.params if "--json" in parameter.opts)
    assert getattr(as_json, "is_flag", False), name
    assert not options & {"--devices", "--gigabytes", "--num-gpus"}


def printed(*arguments: str, code: int = 0) -> object:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_what_is_printed_is_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIX_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    described = printed("schema", "--answers")
    assert isinstance(described, dict)

    def is_a(name: str, found: object) -> None:
        Draft202012Validator({**described, "$ref": f"#/$defs/{name}"}).validate(found)

    is_a("StatusAnswer", found := printed("status", "--json"))
    assert isinstance(found, dict) and found["running"] is False and found["jobs"] == []
    is_a("DownAnswer", found := printed("down", "--json"))
    assert isinstance(found, dict) and found["ended"] is False
    is_a("JobsAnswer", printed("stop", "--all", "--json"))
