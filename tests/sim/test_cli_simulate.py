"""`rlix simulate`: what it prints and writes, and how it refuses."""

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from rlix.cli.simulate import simulate
from tests.sim.test_workload import GOOD

FIELDS = [
    "workload",
    "policy",
    "seed",
    "gpus",
    "jobs",
    "makespan_s",
    "bound_s",
    "makespan_over_bound",
    "useful_share",
    "tight_share",
    "idle_share",
    "surplus_share",
    "steps_per_hour_per_gpu",
    "mean_job_s",
    "slowdown_mean",
    "slowdown_p95",
    "slowdown_max",
    "switches",
    "plan_ms_p50",
    "plan_ms_p99",
]


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(simulate)
    return app


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    return file


def test_results_are_a_page_and_rows(app: typer.Typer, workload: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    arguments = [str(workload), "--policy", "rlix", "--policy", "slots", "--seeds", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--html", str(page)])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["policy"], row["seed"]) for row in rows] == [("rlix", 0), ("slots", 0), ("rlix", 1), ("slots", 1)]
    assert all(field in row for row in rows for field in FIELDS)
    assert all(row["makespan_s"] >= row["bound_s"] for row in rows)
    assert page.read_text().count("<svg") == 2
    assert "http" not in page.read_text()


def test_gangs_move_is_a_workload_of_its_own(app: typer.Typer, workload: Path) -> None:
    result = CliRunner().invoke(app, [str(workload), "--policy", "rlix", "--gangs-move", "--json"])
    assert result.exit_code == 0, result.output
    assert [row["workload"] for row in json.loads(result.stdout)] == [f"{GOOD['name']}-moving"]


def test_a_table_is_for_people_and_json_for_programs(app: typer.Typer, workload: Path) -> None:
    arguments = [str(workload), "--policy", "static", "--gpus", "4"]
    shown = CliRunner().invoke(app, [*arguments, "--policy", "rlix"])
    assert shown.exit_code == 0 and "static" in shown.stdout, shown.output
    rows = json.loads(CliRunner().invoke(app, [*arguments, "--policy", "rlix", "--json"]).stdout)
    assert rows[0]["gpus"] == 4
    parts, shared = (row["steps_per_hour_per_gpu"] for row in rows)
    first, *lines = shown.stdout.splitlines()
    assert first.endswith(f" {shared / parts:.2f} x those of equal parts (static)")
    assert any(line.split()[:2] == ["tight", "share"] for line in lines)
    *_, legend = lines
    signs = [legend.split(use)[0].split()[-1] for use in (" gang", " decode", " load", " drain")]
    assert len(set(signs)) == 4
    assert "sharing" not in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-such-workload"], "give a file or one of"),
        (["balanced", "--policy", "best"], "--policy best: unknown; choose from rlix"),
        (["balanced", "--gpus", "4"], "the pool has 4"),
    ],
)
def test_mistakes_end_with_one_message_and_code_2(app: typer.Typer, arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_cannot_be_written_is_named(app: typer.Typer, workload: Path, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "out.html"
    result = CliRunner().invoke(app, [str(workload), "--policy", "static", "--html", str(target)])
    assert result.exit_code == 2
    assert "--html" in result.stderr
