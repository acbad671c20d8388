"""The fork server with real processes; a sleeping one stands in for the raylet, a probe script for Ray's worker."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlix.node import process
from rlix.workers import prefork
from rlix.workers.prefork import launcher, server
from tests.workers.workers import wait_gone

LAUNCHER = Path(prefork.__file__).with_name("launcher.py")

PROBE = """
import json, os, signal, subprocess, sys, time
import numpy, torch
mode = sys.argv[1]
facts = {
    "path": sys.path, "argv": sys.argv, "executable": sys.executable, "prefix": sys.prefix, "cwd": os.getcwd(),
    "main": [__name__, __file__], "env": dict(os.environ),
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "fds": sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "stdin": os.readlink("/proc/self/fd/0"), "ray": "ray" in sys.modules, "cuda": torch.cuda.is_initialized(),
}
mask = os.umask(0); os.umask(mask); facts["umask"] = mask
print(json.dumps({
    "facts": facts, "pid": os.getpid(), "ppid": os.getppid(), "sid": os.getsid(0),
    "random": [int(numpy.random.randint(2**31)), int(torch.randint(2**31, ()))],
    "sleeper": subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid if mode == "leave" else None,
}), flush=True)
if mode == "linger":
    os.close(1)
    time.sleep(600)
"""
IMPATIENT = """
import sys
sys.path.insert(0, {folder!r})
import launcher
launcher.REPLY_TIMEOUT_S = {seconds}
launcher.main()
"""
SLOW = """
import os
if gate := os.environ.get("GATE"):
    open(gate).close()  # waits until somebody opens it to write
"""


@dataclass
class Session:
    """A folder laid out as Ray's session folder, and a process in the raylet's place."""

    folder: Path
    raylet: subprocess.Popen[bytes]

    def start(
        self, mode: str, *, launcher: bool = True, reply_timeout_s: float | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        options = [f"--temp-dir={self.folder.parent}", f"--session-name={self.folder.name}"]
        interpreter = [sys.executable, "-S", "-E", str(LAUNCHER)] if launcher else [sys.executable]
        if reply_timeout_s is not None:
            interpreter[-1:] = ["-c", IMPATIENT.format(folder=str(LAUNCHER.parent), seconds=reply_timeout_s)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "stubs"),
            "RAY_RAYLET_PID": str(self.raylet.pid),
            "CUDA_VISIBLE_DEVICES": "3",
            **env,
        }
        return subprocess.Popen(
            [*interpreter, str(self.folder / "probe.py"), mode, *options],
            env=environment,
            cwd=self.folder,
            umask=0o027,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def run(self, mode: str = "plain", **kwargs: Any) -> dict[str, Any]:
        return read(self.start(mode, **kwargs))

    @property
    def sockets(self) -> list[Path]:
        return [path for path in (self.folder / "sockets").iterdir() if path.is_socket()]


def read(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the worker printed: its end of the pipe closes when it ends, whoever started it."""
    output, _ = process.communicate(timeout=300)
    result: dict[str, Any] = json.loads(output)
    return result


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("s")
    for name in ("sockets", "logs"):
        (folder / name).mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "stubs").mkdir()
    # Half of the server's start-up time, and nothing here needs it.
    (folder / "stubs" / "transformers.py").write_text(SLOW)
    raylet = subprocess.Popen(["sleep", "600"])
    yield Session(folder, raylet)
    raylet.kill()
    raylet.wait()


def test_simultaneous_workers_share_one_server_and_draw_different_numbers(session: Session) -> None:
    workers = [read(process) for process in [session.start("plain") for _ in range(4)]]
    assert len({worker["ppid"] for worker in workers}) == 1
    assert "server.py" in " ".join(psutil.Process(workers[0]["ppid"]).cmdline())
    assert len({worker["random"][0] for worker in workers}) == 4
    assert len({worker["random"][1] for worker in workers}) == 4
    (path,) = session.sockets
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_forked_worker_finds_what_a_plain_one_finds(session: Session) -> None:
    forked, plain = session.run(FOO="1 2"), session.run(launcher=False, FOO="1 2")
    assert forked["ppid"] != os.getpid()
    assert plain["ppid"] == os.getpid()
    assert forked["facts"] == plain["facts"]
    assert forked["facts"]["env"]["FOO"] == "1 2"
    assert forked["sid"] == forked["pid"]


def test_import_time_settings_get_a_server_of_their_own(session: Session) -> None:
    names = set()
    for settings in ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2", "FOO": "x"}):
        environment = {"RAY_RAYLET_PID": "1", **settings}
        code = (
            f"import sys; sys.path.insert(0, {str(LAUNCHER.parent)!r}); import launcher; print(launcher.server_name())"
        )
        names.add(subprocess.check_output([sys.executable, "-S", "-c", code], env=environment))
    assert len(names) == 2


def test_what_a_worker_leaves_running_ends_with_it(session: Session) -> None:
    wait_gone(session.run("leave")["sleeper"])


def test_a_killed_server_is_replaced(session: Session) -> None:
    first = session.run()["ppid"]
    os.kill(first, signal.SIGKILL)
    wait_gone(first)
    second = session.run()["ppid"]
    assert second not in (first, os.getpid())


def test_a_worker_that_did_not_wait_for_a_slow_server_is_not_its_parent(session: Session, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    environment = {"GATE": str(gate), "HF_GATED": "1"}  # the second: a server of their own
    plain = session.start("linger", reply_timeout_s=0.5, **environment)
    assert plain.stdout is not None
    found = json.loads(plain.stdout.readline())  # its streams are open in the request, too, which nobody has read
    assert found["ppid"] == os.getpid()
    group = process.describe(found["pid"])
    assert group is not None and process.descendants(group) == ()
    gate.open("w").close()
    forked = session.start("linger", **environment)
    other = read(forked)
    assert "server.py" in " ".join(psutil.Process(other["ppid"]).cmdline())
    process.kill([group, *process.descendants(group)], 10.0)
    plain.communicate(timeout=300)
    assert psutil.pid_exists(other["ppid"]) and psutil.pid_exists(other["pid"])
    os.kill(other["pid"], signal.SIGKILL)


def test_without_a_server_the_plain_interpreter_starts(session: Session) -> None:
    (session.folder / "sockets").rename(session.folder / "moved")
    try:
        assert session.run()["ppid"] == os.getpid()
    finally:
        (session.folder / "moved").rename(session.folder / "sockets")


def test_everything_ends_with_the_raylet(session: Session) -> None:
    worker = session.run("linger")
    session.raylet.kill()
    session.raylet.wait()
    wait_gone(worker["pid"])
    wait_gone(worker["ppid"])
    assert session.sockets == []


def request_over(connection: socket.socket) -> None:
    body = json.dumps({"argv": ["a.py"], "env": {}, "cwd": "/", "umask": 0}).encode()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(body)


@pytest.mark.parametrize("gives_up", ["not at all", "before its turn", "after the fork"])
def test_there_is_one_worker_whenever_the_launcher_gives_up(gives_up: str) -> None:
    """It becomes one itself then, and the forked one ends before it is one."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as child:
        request_over(theirs)
        if gives_up == "before its turn":
            theirs.close()
        request = server.receive(ours)
        for fd in request.streams:
            os.close(fd)
        assert request.argv == ["a.py"]
        taken = child.submit(server.offered, ours)
        if gives_up != "before its turn":
            assert theirs.recv(16) == str(os.getpid()).encode()  # and not a moment before
            theirs.sendall(launcher.TAKEN) if gives_up == "not at all" else theirs.close()
        assert taken.result(300) is (gives_up == "not at all")


def test_interpreter_flags_are_left_to_the_plain_interpreter() -> None:
    with pytest.raises(ValueError, match="flags"):
        launcher.request_fork(["-X", "dev", "worker.py"])
