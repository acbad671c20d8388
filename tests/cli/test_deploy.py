"""Files that ship for other systems: they are there, can be read, and run commands that exist."""

import configparser
import re
import shlex

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from rlix.cli.deploy import FILES, shipped
from rlix.cli.main import app


def parses(command: list[str]) -> bool:
    """Whether the command line takes it: `rlix ...`."""
    group, rest = get_command(app), command[1:]
    while getattr(group, "commands", None):
        group, rest = group.commands[rest[0]], rest[1:]
    return bool(group.make_context("rlix", rest, resilient_parsing=False))


def commands() -> list[str]:
    found = []
    for name in ("systemd", "systemd-jobs"):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(shipped(name))
        assert {"Unit", "Service", "Install"} <= set(unit.sections())
        found += [value for key, value in unit["Service"].items() if key.startswith("Exec")]
    (job,) = [each for each in yaml.safe_load_all(shipped("kuberay")) if each["kind"] == "RayJob"]
    entrypoint = re.search(r"ENTRYPOINT (\[.*\])", shipped("dockerfile"))
    assert entrypoint is not None
    return [*found, job["spec"]["entrypoint"], shlex.join(yaml.safe_load(entrypoint[1]))]


@pytest.mark.parametrize("command", commands())
def test_what_is_run_is_a_command_of_ours(command: str) -> None:
    assert parses(shlex.split(command))


def test_every_file_is_listed_and_printed_and_others_are_refused() -> None:
    listed = CliRunner().invoke(app, ["deploy"]).output
    for name in FILES:
        assert name in listed
        assert CliRunner().invoke(app, ["deploy", name]).stdout == shipped(name)
    refused = CliRunner().invoke(app, ["deploy", "nomad"])
    assert refused.exit_code == 2 and "there are systemd" in " ".join(refused.output.split())


def test_a_service_that_is_restarted_ends_no_job() -> None:
    assert "KillMode=process" in shipped("systemd") and "UMask=0077" in shipped("systemd")
    assert "Restart=on-failure" in shipped("systemd-jobs"), "a service that starts slowly leaves no queue drained"
