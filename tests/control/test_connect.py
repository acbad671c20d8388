"""Joining a Ray cluster by its address: what is wrong is said at once, and its token is taken."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlix.control import connect
from rlix.control.announcement import Announcement
from rlix.control.connect import connect_to_cluster, connect_to_daemon
from rlix.protocol.errors import RlixError, SpecError

CONNECT = """
import json, ray, rlix
from rlix.control.connect import connect_to_cluster
try:
    connect_to_cluster({address!r})
    print(json.dumps({answer}))
except rlix.protocol.errors.RlixError as error:
    print(json.dumps(str(error)))
"""
NODES = '[n["NodeManagerAddress"] for n in ray.nodes()]'
REFUSED = """[
    __import__("pytest").raises(rlix.protocol.errors.RlixError, rlix.init).match("the Ray cluster has no GPUs; start "),
    ray.util.list_named_actors(all_namespaces=True),
]"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_where_nobody_listens_is_said_at_once(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    with pytest.raises(RlixError, match=f"cannot reach the Ray cluster at {address}: Connection refused"):
        connect_to_cluster(address)


def test_who_does_not_answer_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_address: object, timeout: float) -> None:
        assert timeout == connect.CONNECT_TIMEOUT_S
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(RlixError, match=r"cannot reach the Ray cluster at 192\.0\.2\.1:6379: no answer within 5 s"):
        connect_to_cluster("192.0.2.1:6379")


def test_a_stopped_process_of_a_daemon_is_named(listener: socket.socket) -> None:
    """The kernel takes connections for it."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            found = Announcement(address_of(listener), os.getpid(), 0.0, 2, "cpu", 60.0, None)
            with pytest.raises(RlixError, match=rf"{child.pid} \(sleep\) was stopped; .* -CONT {child.pid}"):
                connect_to_daemon(found)
        finally:
            child.kill()


def test_who_listens_but_is_no_ray_is_given_up_on(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "PROBE_TIMEOUT_S", 2.0)
    with pytest.raises(RlixError, match="does not speak as Ray does within 2 s"):
        connect_to_cluster(address_of(listener))


@pytest.mark.parametrize("address", ["nonsense", "host:port", ":", "host:"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(SpecError, match="must be host:port, 'auto' or 'local'"):
        connect_to_cluster(address)


@pytest.fixture(scope="module")
def guarded_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A Ray on loopback that wants a token and has no GPUs: its address, and the home with the token in it."""
    home = tmp_path_factory.mktemp("guarded") / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("a" * 32)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mark = str(home)
    environment = {
        **os.environ, "HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RLIX_TEST_RAY": mark,
    }  # fmt: skip
    try:
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-gpus=0",
             "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--object-store-memory=100000000"],
            env=environment, check=True, capture_output=True, timeout=300,
        )  # fmt: skip
        yield f"127.0.0.1:{port}", home
    finally:
        for process in psutil.process_iter():
            try:
                if process.environ().get("RLIX_TEST_RAY") == mark:
                    process.kill()
            except psutil.Error:
                continue


def attached(address: str, home: Path, answer: str = NODES, **variables: str) -> Any:
    """What a program says that has joined: the value of `answer`, or why it could not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "PYTHONPATH": ":".join(p for p in sys.path if p), **variables}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT.format(address=address, answer=answer)],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_that_wants_a_token_is_joined_with_it_and_only_with_it(
    guarded_ray: tuple[str, Path], tmp_path: Path
) -> None:
    address, home = guarded_ray
    where = f"cannot join the Ray cluster at {address}: it wants a token, and "
    with ThreadPoolExecutor() as pool:
        of_home, named, none, wrong = [
            pool.submit(attached, address, folder, **variables)
            for folder, variables in (
                (home, {}),
                (tmp_path, {"RAY_AUTH_TOKEN_PATH": str(home / ".ray" / "auth_token")}),
                (tmp_path, {}),
                (home, {"RAY_AUTH_TOKEN": "b" * 32}),
            )
        ]
    assert of_home.result() == named.result() == ["127.0.0.1"]
    assert none.result().startswith(f"{where}there is none here")
    assert wrong.result().startswith(f"{where}does not take that of RAY_AUTH_TOKEN;")


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_without_gpus_is_refused_before_anything_is_started_there(guarded_ray: tuple[str, Path]) -> None:
    assert attached(*guarded_ray, REFUSED) == [True, []]


@pytest.mark.ray
@pytest.mark.slow
def test_workers_look_into_the_folders_of_python_path_in_their_order(
    guarded_ray: tuple[str, Path], tmp_path: Path
) -> None:
    address, home = guarded_ray
    folders = [tmp_path / "left", tmp_path / "right"]
    for folder in folders:
        folder.mkdir()
        (folder / "twice.py").write_text("")
    found = '__import__("twice").__file__'
    answer = f"[{found}, ray.get(ray.remote(lambda: {found}).remote(), timeout=300)]"
    path = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
    assert attached(address, home, answer, PYTHONPATH=path) == [str(folders[0] / "twice.py")] * 2


def test_sigterm_ends_as_before_although_another_thread_has_joined() -> None:
    """Ray's C++ takes the signal for itself, beneath Python, and only the main thread may call `signal.signal`."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def join() -> None:
        with connect.sigterm_kept():
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # SIG_IGN

    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(join).result()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
