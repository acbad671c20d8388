"""`rlix run` as a user runs it: a process of its own, from files to report, and stopped half-way."""

import json
import re
from pathlib import Path

import pytest

from rlix.pipeline.spec.job import load_job
from tests.cli.commands import JOB, Command, write_jobs

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_two_jobs_run_to_their_report(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "run", *write_jobs(tmp_path, steps=3), "--private", "--json")
    commands.append(command)
    assert command.wait() == 0, command.output()
    summary = json.loads(command.stdout.read_text())  # nothing but the summary is on stdout
    assert [(job["name"], job["state"], job["steps"]) for job in summary["jobs"]] == [
        ("left", "finished", 3),
        ("right", "finished", 3),
    ]
    assert len(summary["devices"]) == 2
    assert summary["busy_share"] > 0
    assert "left: finished, step 3/3" in command.stderr.read_text()
    runs = tmp_path / "runs"
    for path in ("report.html", "left/report.html", "left/trace.json", "right/metrics.jsonl", "right/spec.yaml"):
        assert (runs / path).stat().st_size > 0
    assert command.marked() == []


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "run", write_jobs(tmp_path, steps=100_000)[0], "--private")
    commands.append(command)
    command.wait_for(r"left: starting")
    command.interrupt()
    command.wait_for("Ctrl-C again to end at once")  # two signals at the same moment are one
    command.interrupt()
    assert command.wait() == 130, command.output()
    assert "Traceback" not in command.stderr.read_text()
    assert command.marked() == []


def test_a_job_is_profiled_planned_and_run(tmp_path: Path, commands: list[Command]) -> None:
    home = tmp_path / "home"
    job = JOB.format(name="planned", steps=2, train="0").partition("clusters:")[0] + "plan: auto\n"
    (tmp_path / "planned.yaml").write_text(job)
    profiled = Command(tmp_path, "profile", "planned.yaml", "--gpus", "2", "--width", "1", "--repeats", "1")
    commands.append(profiled)
    assert profiled.wait() == 0, profiled.output()
    assert "actor_train: " in profiled.stdout.read_text()
    assert list(home.glob("profiles/*/job-*.json"))
    command = Command(tmp_path, "run", "planned.yaml", mark=profiled.mark)
    commands.append(command)
    assert command.wait() == 0, command.output()
    said = command.stdout.read_text()
    assert re.search(r"planned: plan: \w+: .*actor_infer on [12].* s a step, by its profile", said)
    assert "planned: finished, step 2/2" in said
    ran = load_job(tmp_path / "runs" / "planned" / "spec.yaml")
    assert ran.plan is None
    made = json.loads((tmp_path / "runs" / "planned" / "plan.json").read_text())
    assert made["seconds"].keys() == {"actor_infer", "actor_train"}
    assert ran.clusters.actor_train.count in (1, 2)
