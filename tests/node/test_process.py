"""Processes are named for ever, told apart when stopped or dead, and ended whatever they do."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rlix.node import process

SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    started = subprocess.Popen(SLEEP)
    yield started
    started.kill()
    started.wait()


def test_this_process() -> None:
    me = process.this_process("node", "tests")
    assert (me.node_id, me.pid, me.name) == ("node", os.getpid(), "tests")
    assert process.alive(me)
    assert process.state(me) == "running"
    described = process.describe(os.getpid(), "node")
    assert described is not None
    assert (described.pid, described.started) == (me.pid, me.started)
    assert described.name


def test_running_stopped_and_dead(child: "subprocess.Popen[bytes]") -> None:
    known = process.describe(child.pid)
    assert known is not None
    assert process.state(known) == "running"
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.state(known) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.state(known) == "dead"  # a zombie
    child.wait()
    assert process.state(known) == "dead"
    assert process.describe(child.pid) is None


def test_a_number_that_another_process_has_by_now_is_dead(child: "subprocess.Popen[bytes]") -> None:
    known = process.describe(child.pid)
    assert known is not None
    earlier = replace(known, started=known.started - 1)
    assert process.state(earlier) == "dead"
    assert process.kill([earlier], 1.0) == ()
    assert process.state(known) == "running"  # and is not killed


def test_a_stopped_process_is_killed(child: "subprocess.Popen[bytes]") -> None:
    known = process.describe(child.pid)
    assert known is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert process.kill([known], 30.0) == ()
    assert not process.alive(known)


@pytest.mark.parametrize("stream", ["pipe", "file"])
def test_who_is_killed_is_told_why_on_its_own_terminal(tmp_path: Path, stream: str) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(SLEEP, stderr=subprocess.PIPE if stream == "pipe" else file) as child,
    ):
        file.write("what it said before")
        file.flush()
        known = process.describe(child.pid)
        assert known is not None
        os.kill(child.pid, signal.SIGSTOP)
        assert process.kill([known], 30.0, "it was late") == ()
        said = child.stderr.read().decode() if child.stderr else log.read_text()
    before = "" if stream == "pipe" else "what it said before"
    assert said == f"{before}rlix: process {known.pid} is ended: it was late\n"


def test_a_group_ends_with_its_leader_but_never_the_callers_own(child: "subprocess.Popen[bytes]") -> None:
    program = f"import subprocess; p = subprocess.Popen({SLEEP!r}); print(p.pid, flush=True); p.wait()"
    leader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    grandchild = process.describe(int(leader.stdout.readline()))
    known, beside = process.describe(leader.pid), process.describe(child.pid)
    assert known is not None
    assert beside is not None
    assert grandchild is not None
    assert [p.pid for p in process.descendants(known)] == [grandchild.pid]
    assert process.kill([known, grandchild], 30.0) == ()
    assert not process.alive(grandchild)
    assert process.descendants(known) == ()
    assert process.kill([beside], 30.0) == ()  # of our own group
    leader.wait()
    leader.stdout.close()


def test_nothing_is_left_to_kill(child: "subprocess.Popen[bytes]") -> None:
    known = process.describe(child.pid)
    assert known is not None
    child.kill()
    child.wait()
    assert process.kill([known, known], 1.0) == ()


def test_a_process_that_did_not_end_in_time_is_not_taken_for_one_that_has(child: "subprocess.Popen[bytes]") -> None:
    watched = process.WatchedProcess(child.pid)
    assert not watched.wait(0.0)
    assert not watched.wait(0.0)
    child.kill()
    assert watched.wait(time.monotonic() + 300.0)
    assert watched.wait(0.0)


def test_two_may_wait_for_the_end_of_one(child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    watched, both = process.WatchedProcess(child.pid), threading.Barrier(2)

    class Poll:
        def __init__(self) -> None:
            self.register, self._poll = (poll := real()).register, poll.poll

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            found = self._poll(timeout)
            both.wait(300)
            return found

    real = select.poll
    monkeypatch.setattr(select, "poll", Poll)
    child.kill()
    with ThreadPoolExecutor(2) as threads:
        ended = [threads.submit(watched.wait, time.monotonic() + 300.0) for _ in range(2)]
        assert [each.result() for each in ended] == [True, True]
