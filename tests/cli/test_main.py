import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.cli.outcome import exit_code, write_reports
from rlix.pipeline.spec.job import load_job
from tests.cli.fakes import job_status
from tests.monitor.synthetic import demo_runs

runner = CliRunner()

GOOD_SPEC = "sort_digits"


def mistake(*arguments: str) -> str:
    """The one message a user gets for a mistake."""
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return re.sub(r"\s+", " ", result.stderr)


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"rlix {version('rlix')}\n")


def test_ctrl_c_while_the_commands_are_imported_is_silent(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import rlix.cli.__main__ as it; "
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", start + "it.main()"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")  # which a shell calls 130


def test_no_arguments_shows_help() -> None:
    assert "run" in runner.invoke(app, []).output


def test_missing_spec_file(tmp_path: Path) -> None:
    message = mistake("run", str(tmp_path / "nothere.yaml"), "--runs-dir", str(tmp_path))
    assert "nothere.yaml" in message


def test_misspelled_key_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: job\nstepz: 3\n")
    message = mistake("run", str(path), "--runs-dir", str(tmp_path / "runs"))
    assert "job.yaml" in message
    assert "stepz" in message


def test_a_check_ends_with_what_it_found() -> None:
    def said(*options: str) -> str:
        return runner.invoke(app, ["check", GOOD_SPEC, *options]).stdout.splitlines()[-1]

    assert said("--memory", "40") == "no mistake in sort_digits; by this estimate it fits"
    assert said().startswith("no mistake in sort_digits; ")


def test_too_few_devices_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlix.cli.run._control_plane", lambda *_: pytest.fail("Ray was started"))
    message = mistake("run", GOOD_SPEC, "--gpus", "1", "--runs-dir", str(tmp_path))
    assert "device" in message
    assert "clusters." in message


@pytest.mark.parametrize("devices", [(), ("--gpus", "4")])
def test_the_same_job_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]) -> None:
    monkeypatch.setattr("rlix.cli.run._control_plane", lambda *_: pytest.fail("Ray was started"))
    assert "is given twice" in mistake("run", GOOD_SPEC, GOOD_SPEC, *devices, "--runs-dir", str(tmp_path))
    assert "is given twice" in mistake("check", GOOD_SPEC, GOOD_SPEC, *devices)


def test_runs_dir_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert "is a file" in mistake("run", GOOD_SPEC, "--runs-dir", str(path))


def test_no_devices_at_all() -> None:
    assert "--gpus" in mistake("run", GOOD_SPEC, "--gpus", "0")
    assert "16384" in mistake("run", GOOD_SPEC, "--gpus", "100000000")
    assert "--memory" in mistake("check", GOOD_SPEC, "--memory", "inf")
    for option in ("--width", "--batch"):
        assert option in mistake("profile", GOOD_SPEC, option, "0")


def test_report_of_what_is_no_run(tmp_path: Path) -> None:
    assert "no such folder" in mistake("report", str(tmp_path / "x"))
    assert "not a run folder" in mistake("report", str(tmp_path))


def test_report_that_cannot_be_written(tmp_path: Path) -> None:
    run, _ = demo_runs(tmp_path, steps=2)
    (tmp_path / "file").write_text("")
    assert "--output" in mistake("report", str(run), "--output", str(tmp_path / "file" / "report.html"))


def test_report_prints_tables_and_writes_the_page(tmp_path: Path) -> None:
    runs = demo_runs(tmp_path, steps=5)
    result = runner.invoke(app, ["report", *map(str, runs)])
    assert result.exit_code == 0, result.output
    for word in ("sort_digits", "copy_digits", "switching", "split 2 + 2", str(tmp_path / "report.html")):
        assert word in result.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_every_launch_keeps_its_report(tmp_path: Path) -> None:
    runs = demo_runs(tmp_path, steps=2)
    for run_dirs in (runs, runs[:1], runs[1:]):
        assert write_reports(run_dirs, tmp_path) is not None
    link, kept = tmp_path / "report.html", sorted((tmp_path / "reports").iterdir())
    assert [path.name.split("-", 2)[2] for path in kept] == ["copy_digits.html", "sort_digits.html"]
    assert link.resolve() == kept[0]  # the newest
    newest = kept[0].read_text()
    result = runner.invoke(app, ["report", *map(str, runs)])  # writes a page of its own in the link's place
    assert result.exit_code == 0
    assert not link.is_symlink()
    assert kept[0].read_text() == newest
    link.unlink()
    (tmp_path / "report.html").mkdir()  # of somebody who had a job of that name
    with pytest.raises(OSError, match=r"report\.html"):
        write_reports(runs, tmp_path)
    assert not list(tmp_path.glob(".report.html*"))


@pytest.mark.parametrize("name", ["report.html", "reports"])
def test_no_job_has_the_name_of_what_is_beside_run_folders(tmp_path: Path, name: str) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(load_job(GOOD_SPEC).to_yaml().replace("name: sort_digits", f"name: {name}", 1))
    assert "is where reports go" in mistake("check", str(spec))


def test_report_as_json(tmp_path: Path) -> None:
    runs = demo_runs(tmp_path, steps=5)
    result = runner.invoke(app, ["report", *map(str, runs), "--json", "--output", str(tmp_path / "out.html")])
    found = json.loads(result.stdout)
    assert [job["name"] for job in found["jobs"]] == ["sort_digits", "copy_digits"]
    assert found["busy_share"] + found["switching_share"] + found["idle_share"] == pytest.approx(1.0)
    assert Path(found["report"]).exists()


def test_without_a_control_plane_there_is_nothing_to_see_or_stop(
    rlix_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for arguments in (["status"], ["watch"], ["stop", "--all"], ["down"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert f"no control plane runs here (RLIX_HOME is {rlix_home})" in result.output
    for arguments in (["watch", "mine"], ["stop", "mine"]):
        assert runner.invoke(app, arguments).exit_code == 1
    assert "name jobs, or say --all" in mistake("stop")
    assert "name jobs, or say --all" in mistake("stop", "x", "--all")


def test_exit_codes() -> None:
    finished, failed = job_status(state="finished"), job_status(state="failed")
    assert exit_code([finished, finished], None) == 0
    assert exit_code([finished, failed], None) == 1
    assert exit_code([finished, job_status(state="stopped")], None) == 1
    assert exit_code([failed], 2) == 130
