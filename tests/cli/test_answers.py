"""`--json`: every command has it, and what is printed is what the schema says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from jsonschema import Draft202012Validator
from typer.main import get_command
from typer.testing import CliRunner

from rlix.cli.answers import StatusAnswer
from rlix.cli.main import app
from rlix.cli.said_status import status_answer
from rlix.protocol.messages import Demand, Ending, LeaseState, NodeState, NodeStatus, PipelineStatus, Waiting
from rlix.protocol.types import Phase
from tests.cli.fakes import control, job_status, lease

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


def test_a_status_has_who_holds_what_and_who_waits() -> None:
    found = replace(
        control(lease(1, "ft_1", (0, 1), LeaseState.DRAINING), lease(2, "p_2", (2,), LeaseState.QUARANTINED)),
        waiting=(Waiting("ft_1", "actor_train", Phase.ACTOR_TRAINING, 5.0, "copy (ft_2)"),),
        granted_at={1: 3.0},
        endings=(Ending(4.0, "ft_0", "old", "it did not answer"),),
        trouble="the disk is full",
    )
    job = SimpleNamespace(known=job_status(reward=0.5), run_dir=Path("/runs/sort"))
    program = PipelineStatus("p_2", (), (), Demand(0), "script")
    hosts = (NodeStatus("n", "node1", "10.0.0.1", NodeState.DRAINING, "why"),)
    answer = status_answer("joined", [job], [program], found, hosts)  # type: ignore[list-item]
    assert StatusAnswer.model_validate_json(answer.model_dump_json()) == answer
    assert [(j.name, j.state, j.run_dir) for j in answer.jobs] == [
        ("sort", "running", "/runs/sort"),
        ("script", "attached", None),
    ]
    assert [(held.devices, held.state, held.since) for held in answer.leases] == [
        ((0, 1), "draining", 3.0),
        ((2,), "quarantined", None),
    ]
    assert (answer.waiting[0].phase, answer.waiting[0].behind) == ("actor_training", "copy (ft_2)")
    assert (answer.endings[0].why, answer.hosts[0].state) == ("it did not answer", "draining")
    assert (answer.trouble, len(answer.devices)) == ("the disk is full", 4)
