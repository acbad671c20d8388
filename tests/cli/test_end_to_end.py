"""`rlix run` as a user runs it: a process of its own, from files to report, and stopped half-way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

MARK = "RLIX_TEST_RUN"
END_TIMEOUT_S = 200.0

JOB = """
name: {name}
steps: {steps}
task: {{name: copy_digits, digits: 2}}
model: {{kind: tiny, hidden_size: 16, layers: 1, heads: 2}}
rollout: {{prompts_per_step: 4, samples_per_prompt: 2, max_new_tokens: 3}}
optimizer: {{learning_rate: 1e-3}}
checkpoint: {{every: 1000}}
clusters:
  actor_train: {{devices: [{train}]}}
  actor_infer: {{devices: [0, 1]}}
"""


class Command:
    """`rlix` in a process group of its own, as from a terminal, with everything it starts marked."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        environment = {**os.environ, MARK: self.mark, "RLIX_HOME": str(folder / "home"), "RAY_ADDRESS": "local"}
        environment["RLIX_VIRTUAL_GPUS"] = "2"
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlix.cli", *arguments],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def marked(self) -> list[psutil.Process]:
        """Every living process that inherited the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: the signal goes to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while not re.search(pattern, self.stdout.read_text()):
            assert self.process.poll() is None, f"ended early: {self.output()}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {END_TIMEOUT_S} s: {self.output()}"
            time.sleep(0.1)

    def wait(self) -> int:
        return self.process.wait(timeout=END_TIMEOUT_S)

    def output(self) -> str:
        return f"{self.stdout.read_text()[-3000:]}\n{self.stderr.read_text()[-3000:]}"


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        for process in command.marked():
            process.kill()


def write_jobs(folder: Path, steps: int) -> list[str]:
    for train, name in enumerate(("left", "right")):
        (folder / f"{name}.yaml").write_text(JOB.format(name=name, steps=steps, train=train))
    return ["left.yaml", "right.yaml"]


def test_two_jobs_run_to_their_report(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "run", *write_jobs(tmp_path, steps=3), "--json")
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


def test_ctrl_c_stops_cleanly_and_leaves_nothing(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "run", *write_jobs(tmp_path, steps=100_000))
    commands.append(command)
    command.wait_for(r"left: running, step [1-9]")
    command.wait_for(r"right: running, step [1-9]")
    command.interrupt()
    assert command.wait() == 130, command.output()
    assert "Traceback" not in command.stderr.read_text()
    for name in ("left", "right"):
        assert f"{name}: stopped" in command.stdout.read_text()
        assert list((tmp_path / "runs" / name / "checkpoints").glob("step_*")), command.output()
    assert (tmp_path / "runs" / "report.html").exists()
    assert command.marked() == []


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "run", *write_jobs(tmp_path, steps=100_000))
    commands.append(command)
    command.wait_for(r"left: starting")
    command.interrupt()
    command.interrupt()
    assert command.wait() == 130, command.output()
    assert "Traceback" not in command.stderr.read_text()
    assert command.marked() == []
