"""The schema of job files that editors read, and values that are given beside a file."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.pipeline.spec.job import job_text, load_job, named_files, shipped_jobs, shipped_path
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import read_yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted({*(shipped_path(name) for name in shipped_jobs()), *(p.resolve() for p in EXAMPLES.glob("*.yaml"))})


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    described = json.loads(printed.output)
    Draft202012Validator.check_schema(described)
    return Draft202012Validator(described)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_jobs_that_ship_are_valid_as_written_and_as_run_folders_have_them(
    schema: Draft202012Validator, path: Path
) -> None:
    written, _ = read_yaml(path)
    for job in (written, yaml.safe_load(load_job(path).to_yaml())):
        assert not list(schema.iter_errors(job))


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"algorithm": "rloo"}, True),
        ({"plan": "auto"}, True),
        ({"runs": {"plain": None}}, True),
        ({"stps": 3}, False),
        ({"steps": "3"}, False),
        ({"algorithm": {"nam": "grpo"}}, False),
        ({"algorithm": 3}, False),
    ],
)
def test_the_schema_knows_bare_names_and_mistakes(
    schema: Draft202012Validator, change: dict[str, object], valid: bool
) -> None:
    written, _ = read_yaml(shipped_path("sort_digits"))
    assert schema.is_valid({**written, **change}) is valid


def test_values_beside_the_file_take_the_place_of_its_own(tmp_path: Path) -> None:
    given = ("steps=7", "optimizer.learning_rate=1e-3", "algorithm={name: rloo}", "checkpoint.every=5")
    spec = load_job("sort_digits", given=given)
    assert (spec.steps, spec.optimizer.learning_rate, spec.algorithm.name) == (7, 1e-3, "rloo")
    path = shipped_path("sort_digits")
    assert job_text(path) == path.read_text()
    (tmp_path / "job.yaml").write_text(job_text(path, given))
    assert load_job(tmp_path / "job.yaml") == spec, "what goes to a queue says the same"


def test_a_file_that_is_given_beside_the_job_file_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(shipped_path("sort_digits").read_text())
    assert named_files(path, ["algorithm.name=mine.py:Own"]) == ("mine.py",)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("steps", "--set steps: must be key=value"),
        ("=3", "must be key=value"),
        ("steps=[", "not valid YAML"),
        ("steps.more=3", "steps is no section of"),
        ("steps=0", "--set steps: must be greater than 0"),
        ("rollout.temprature=1", "--set rollout.temprature: unknown key; did you mean 'temperature'?"),
    ],
)
def test_a_mistake_in_a_value_is_told_as_that(given: str, why: str) -> None:
    with pytest.raises(SpecError, match=re.escape(why)):
        load_job("sort_digits", given=[given])
