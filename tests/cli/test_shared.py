"""Several programs and one control plane: joined, watched, stopped and left, as from several terminals."""

import re
import signal
import uuid
from pathlib import Path

import psutil
import pytest

from rlix.control.announcement import await_end
from tests.cli.commands import Command, write_jobs

pytestmark = [pytest.mark.ray, pytest.mark.slow]


CONTROL_PLANE = ("Scheduler", "Orchestrator", "ResourceManager")


def named(command: Command, *names: str) -> list[psutil.Process]:
    """Of what the command started, Ray's processes of these names."""
    found = [process for process in command.marked() if any(f"ray::{n}" in process.cmdline()[0] for n in names)]
    assert len(found) == len(names), found
    return found


class Terminals:
    """Runs commands in one folder with one RLIX_HOME; everything they start bears one mark."""

    def __init__(self, folder: Path, commands: list[Command]) -> None:
        self.folder = folder
        self.commands = commands
        self.mark = uuid.uuid4().hex

    def start(self, *arguments: str, **variables: str) -> Command:
        variables = {"RLIX_IDLE_S": "2", **variables}
        self.commands.append(Command(self.folder, *arguments, mark=self.mark, **variables))
        return self.commands[-1]

    def run(self, *arguments: str, code: int = 0) -> str:
        return self.said(self.start(*arguments), code)

    @staticmethod
    def said(command: Command, code: int = 0) -> str:
        """What a command prints until its end, on both streams."""
        assert command.wait() == code, command.output()
        assert "Traceback" not in command.output()
        return re.sub(r"\s+", " ", command.output())

    def left(self) -> list[str]:
        """What a daemon has left in its home."""
        return sorted(path.name for path in (self.folder / "home").glob("daemon.*"))


@pytest.fixture
def terminals(tmp_path: Path, commands: list[Command]) -> Terminals:
    return Terminals(tmp_path, commands)


def test_jobs_outlive_their_driver_and_are_watched_and_stopped_by_others(terminals: Terminals) -> None:
    write_jobs(terminals.folder, steps=100_000)
    first = terminals.start("run", "left.yaml", RLIX_IDLE_S="60")
    first.wait_for(r"left: running, step [1-9]")
    started = re.search(r"started a control plane \(process (\d+)\); it ends 60 s after its last job", first.output())
    assert started, first.output()
    second = terminals.start("run", "right.yaml", "--no-live")
    second.wait_for(r"right: running, step [1-9]")
    joined = f"joined the control plane of process {started[1]} (2 virtual GPUs, 1 job runs there)"
    assert joined in second.output()

    first.send(signal.SIGHUP)  # the terminal is gone, which ends nothing
    step = int(re.findall(r"left: running, step (\d+)", first.output())[-1])
    first.wait_for(rf"left: running, step (?!{step}/)\d")
    first.send(signal.SIGKILL)
    first.process.wait()

    asked = (("run", "left.yaml"), ("status",), ("free", "0", "--yes"), ("watch", "left"))
    again, status, free, watcher = [terminals.start(*arguments) for arguments in asked]
    assert "runs already, as ft_1, in" in terminals.said(again, code=2)
    for shown in ("left (ft_1): running", "right (ft_2): running"):
        assert shown in terminals.said(status)
    assert "that device is not in quarantine; none is" in terminals.said(free, code=2)
    watcher.wait_for(r"left: running, step [1-9]")
    watcher.interrupt()
    assert watcher.wait() == 0, watcher.output()
    assert "left; still running: left" in watcher.output()

    assert "left (ft_1): stopped at step" in terminals.run("stop", "left")
    assert list((terminals.folder / "runs" / "left" / "checkpoints").glob("step_*"))
    assert second.process.poll() is None

    assert f"ended the control plane of process {started[1]}" in terminals.run("down")
    assert second.wait() == 1, second.output()  # its job was stopped by somebody else
    assert "right: stopped" in second.output()
    assert "rlix: right was stopped by `rlix down`; `rlix run --resume` goes on from its newest" in second.output()
    assert (terminals.folder / "runs" / "report.html").exists()
    assert "no control plane runs here" in terminals.run("status")
    assert second.marked() == []
    assert terminals.left() == ["daemon.lock"]


def test_a_signal_to_the_group_ends_its_own_jobs_and_the_control_plane_ends_idle(terminals: Terminals) -> None:
    """Ctrl-C, and as `timeout` sends it to a private run."""
    write_jobs(terminals.folder, steps=100_000)
    private = terminals.start("run", "right.yaml", "--private", "--runs-dir", "apart")
    shared = terminals.start("run", "left.yaml")
    private.wait_for(r"right: running, step [1-9]")
    shared.wait_for(r"left: running, step [1-9]")
    status = terminals.run("status")
    assert "right" not in status
    assert "on average" not in status  # it has looked once
    shared.interrupt()
    assert shared.wait() == 130, shared.output()
    assert "left: stopped" in shared.output()
    private.send(signal.SIGTERM)
    assert private.wait() == 128 + signal.SIGTERM, private.output()
    assert "Traceback" not in private.stderr.read_text()
    assert "right: stopped" in private.stdout.read_text()
    assert list((terminals.folder / "apart" / "right" / "checkpoints").glob("step_*")), private.output()
    assert (terminals.folder / "apart" / "report.html").exists()
    await_end(terminals.folder / "home", 300.0)
    assert private.marked() == []
    assert terminals.left() == ["daemon.lock"]


def test_whatever_is_dead_or_stopped_commands_say_it_in_a_sentence_and_down_ends_it(terminals: Terminals) -> None:
    write_jobs(terminals.folder, steps=100_000)
    left = terminals.start("run", "left.yaml", "--no-live", RLIX_IDLE_S="600")
    right = terminals.start("run", "right.yaml", "--no-live")
    for command, name in ((left, "left"), (right, "right")):
        command.wait_for(rf"{name}: running, step [1-9]")

    first, _ = sorted(named(left, "JobCoordinator", "JobCoordinator"), key=lambda process: process.create_time())
    first.suspend()
    said = terminals.run("status")
    # By its name; on a busy machine it has been given up by the time that the command has started.
    stopped = re.search(r"(left|right) \(ft_[12]\): (unknown|ending: |its coordinator, process \d+, was stopped)", said)
    assert stopped, said
    ends, stays, running = (left, right, "right") if stopped[1] == "left" else (right, left, "left")
    ends.wait()
    why = r"failed: its coordinator, process \d+, was stopped \(SIGSTOP\) and did not go on; it has no checkpoint"
    assert re.search(why, ends.output()), ends.output()
    assert "Traceback" not in ends.output() and stays.process.poll() is None

    for process in named(left, *CONTROL_PLANE):
        process.kill()
    assert re.search(rf"{running} \(ft_[12]\): running", terminals.run("status"))

    (raylet,) = [process for process in left.marked() if process.name() == "raylet"]
    raylet.suspend()
    assert "was stopped; let it go on with" in terminals.run("status", code=1)
    assert "ended the control plane of process" in terminals.run("down")
    assert stays.wait() == 1
    assert "Traceback" not in stays.output()
    assert re.search(r"the control plane \(process \d+\) was ended by `rlix down`, and its jobs", stays.output())
    assert left.marked() == []


def test_jobs_for_which_there_is_no_memory_wait_and_say_so(terminals: Terminals) -> None:
    """As on a machine with 1.2 GB, which is enough for one of them at a time before anything is measured."""
    left, right = write_jobs(terminals.folder, steps=3)
    run = terminals.start("run", left, right, "--no-live", "--private", RLIX_HOST_MEMORY_GB="1.2")
    assert run.wait() == 0, run.output()
    said = re.sub(r"\s+", " ", run.stdout.read_text())
    wanted = r"(left|right): starting, step 0/3, waits to start: needs about 1\.0 GB of memory, 0\."
    assert re.search(wanted, said), said  # both ask at about the same time
    assert "left: finished" in said and "right: finished" in said
