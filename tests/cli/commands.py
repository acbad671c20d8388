"""`rlix` as a user runs it, in a process of its own, for tests."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.waiting import PROGRAM_S, until

MARK = "RLIX_TEST_RUN"

JOB = """
name: {name}
steps: {steps}
source: {{task: {{name: copy_digits, options: {{digits: 2}}}}}}
model: {{kind: tiny, hidden_size: 16, layers: 1, heads: 2}}
rollout: {{prompts_per_step: 4, samples_per_prompt: 2, max_new_tokens: 3}}
optimizer: {{learning_rate: 1e-3}}
checkpoint: {{every: 1000}}
clusters:
  actor_train: {{devices: [{train}]}}
  actor_infer: {{devices: [0, 1]}}
"""
# At a declared speed jobs wait for most of a step, which leaves the cores to what a test does meanwhile.
DECLARED = "declared_speed: {token_ms: 50, trained_token_ms: 2, expand_s: 0.1, sync_s: 0, shrink_s: 0.1, move_s: 0.1}"


class Command:
    """`rlix` in a process group of its own, as from a terminal, with everything it starts marked."""

    def __init__(self, folder: Path, *arguments: str, mark: str | None = None, **variables: str) -> None:
        self.mark = mark or uuid.uuid4().hex
        name = uuid.uuid4().hex
        self.stdout, self.stderr = folder / f"{name}.out", folder / f"{name}.err"
        environment = {**os.environ, MARK: self.mark, "RLIX_HOME": str(folder / "home")}
        environment.pop("RAY_ADDRESS", None)
        environment |= {"RLIX_VIRTUAL_GPUS": "2", **variables}
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
        """Every living process that has the mark."""
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
        self.send(signal.SIGINT)

    def send(self, number: int) -> None:
        """To the whole process group."""
        os.killpg(self.process.pid, number)

    def wait_for(self, pattern: str) -> None:
        def there() -> bool:
            running = self.process.poll() is None  # before what it has printed is read: that may have been its end
            found = bool(re.search(pattern, self.stdout.read_text()))
            assert found or running, f"ended early: {self.output()}"
            return found

        until(there, lambda: f"no {pattern!r}: {self.output()}")

    def wait(self) -> int:
        return self.process.wait(timeout=PROGRAM_S)

    def output(self) -> str:
        return f"{self.stdout.read_text()}\n{self.stderr.read_text()}"


def write_jobs(folder: Path, steps: int) -> list[str]:
    for train, name in enumerate(("left", "right")):
        (folder / f"{name}.yaml").write_text(JOB.format(name=name, steps=steps, train=train) + DECLARED)
    return ["left.yaml", "right.yaml"]
