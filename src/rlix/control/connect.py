"""Joining a Ray cluster that runs already: bounded, with one message when it cannot be.

Ray itself tries for minutes, in C++, where no signal is heard. So nothing is asked of it before a plain socket has
found somebody at the address, and a process of its own has found that this is a Ray that takes our token.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import RayError

from rlix.control.announcement import Announcement, python_path
from rlix.protocol.errors import RlixError, SpecError

CONNECT_TIMEOUT_S = 5.0
_SIGACTION_BYTES = 512  # more than struct sigaction has anywhere
PROBE_TIMEOUT_S = 20.0  # most of it to import Ray while other processes have the cores
IMPORT_FROM: list[str] = []
"""Folders that what this program starts imports from, too, if they are here before it joins."""

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_AUTH = (_MODE, _TOKEN, _TOKEN_PATH)
_PROBE = """
import json, sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10).values()
except AuthenticationError:
    print(json.dumps({"refused": True}))
else:
    print(json.dumps({"head": next((node.node_manager_address for node in nodes if node.is_head_node), None)}))
"""


class Authentication:
    """This process's way to authenticate with Ray, which `restore` makes what it was."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] | None = None

    def use(self, settings: Mapping[str, str]) -> None:
        """Authenticate by these environment variables of Ray, and by no others."""
        if self._before is None:
            self._before = {name: os.environ.get(name) for name in _AUTH}
        _set_auth({name: settings.get(name) for name in _AUTH})

    def restore(self) -> None:
        if self._before is not None:
            _set_auth(self._before)
            self._before = None


authentication = Authentication()


def connect_to_daemon(found: Announcement) -> None:
    """Connects to the Ray of a daemon of this machine.

    Raises:
        RlixError: it is not there any more, or was stopped.
    """
    where = f"the control plane of process {found.pid} at {found.address}"
    _knock(found.address, where)
    _check_not_stopped(found.pid, where)
    authentication.use(daemon_authentication(found.token_path))
    _connect(found.address, where, loopback=True)


def daemon_authentication(token_path: str | None) -> dict[str, str]:
    """Ray's environment variables for the token in this file; None: without a token."""
    return {_MODE: "disabled"} if token_path is None else {_MODE: "token", _TOKEN_PATH: token_path}


def connect_to_cluster(address: str) -> None:
    """Connects to the Ray cluster at `address`, or with "auto" to the one that was started last on this machine.

    A token is used when Ray finds one (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token), unless RAY_AUTH_MODE
    says not to.

    Raises:
        RlixError: nobody is there, it is no Ray cluster, or it does not take the token.
    """
    where = f"the Ray cluster at {address}"
    if address == "auto":
        address = _local_address()
        where = f"the Ray cluster at {address}, which this machine knows of"
    _knock(address, where)
    settings = {name: os.environ[name] for name in _AUTH if name in os.environ}
    settings.setdefault(_MODE, "token" if _has_token() else "disabled")
    if "://" in address:  # Ray's client has a server of its own there
        authentication.use(settings)
        _connect(address, where, loopback=False)
        return
    host, port = _split(address)
    head = _probe(f"{host}:{port}", where, settings)
    authentication.use(settings)
    _connect(f"{host}:{port}", where, loopback=_is_loopback(head))


@contextlib.contextmanager
def loopback_kept() -> Iterator[None]:
    """Lets Ray use 127.0.0.1, which it otherwise replaces by an address that other machines can reach."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Around `ray.init`, after which SIGTERM would print a stack and end the program with exit code 15."""
    theirs, said = ray_utils.set_sigterm_handler, logging.getLogger("ray._private.worker")
    ray_utils.set_sigterm_handler = lambda _: None
    said.addFilter(_not_of_sigterm)
    # Ray's C++ has a handler of its own beneath Python's, which `signal.signal` would undo in the main thread only.
    before, libc = ctypes.create_string_buffer(_SIGACTION_BYTES), ctypes.CDLL(None)
    libc.sigaction(int(signal.SIGTERM), None, before)
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGTERM), before, None)
        said.removeFilter(_not_of_sigterm)
        ray_utils.set_sigterm_handler = theirs


def _not_of_sigterm(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")


def _connect(address: str, where: str, *, loopback: bool) -> None:
    with loopback_kept() if loopback else contextlib.nullcontext(), sigterm_kept():
        try:
            ray.init(address=address, logging_level=logging.WARNING, job_config=_job_config())
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise RlixError(f"cannot join {where}: {_last_line(str(error))}") from error


def _job_config() -> Any:
    """Lets this program's jobs import what it can: their processes have the environment of whoever started Ray."""
    config = ray.job_config.JobConfig()
    # A worker puts one after the other before all that it has: the last one is looked into first.
    config._py_driver_sys_path.extend([*reversed(python_path()), *IMPORT_FROM])
    return config


def _knock(address: str, where: str) -> None:
    try:
        with socket.create_connection(_split(address), timeout=CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        reason = f"no answer within {CONNECT_TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror
        raise RlixError(f"cannot reach {where}: {reason or error}; check RAY_ADDRESS, or unset it") from error


def _check_not_stopped(daemon: int, where: str) -> None:
    """The kernel takes connections for a process that does not run, and Ray would wait for it for minutes."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(daemon).children():
            if process.status() == psutil.STATUS_STOPPED:
                raise RlixError(
                    f"cannot join {where}: its process {process.pid} ({process.name()}) was stopped; let it go on with "
                    f"`kill -CONT {process.pid}`, or end that control plane and its jobs with `kill -KILL {daemon}`"
                )


def _probe(address: str, where: str, settings: Mapping[str, str]) -> str | None:
    """The address of the cluster's head node, as its other nodes know it."""
    environment = {name: value for name, value in os.environ.items() if name not in _AUTH} | dict(settings)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RlixError(
            f"cannot join {where}: somebody listens there, but does not speak as Ray does within "
            f"{PROBE_TIMEOUT_S:.0f} s; RAY_ADDRESS is the address of Ray's head (its port is often 6379)"
        ) from None
    if done.returncode or not done.stdout.strip():
        raise RlixError(f"cannot join {where}: {_last_line(done.stderr)}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer.get("refused"):
        raise RlixError(
            f"cannot join {where}: it wants a token, and {_token_text(settings)}; put the cluster's token into "
            f"{_TOKEN} or ~/.ray/auth_token, or name its file in {_TOKEN_PATH}"
        )
    head: str | None = answer["head"]
    return head


def _token_text(settings: Mapping[str, str]) -> str:
    if settings[_MODE].lower() != "token":
        return f"{_MODE} is {settings[_MODE]!r}" if _MODE in os.environ else "there is none here"
    given = next((name for name in (_TOKEN, _TOKEN_PATH) if settings.get(name)), "~/.ray/auth_token")
    return f"does not take that of {given}" if _has_token() else "there is none here"


def _has_token() -> bool:
    named = os.environ.get(_TOKEN_PATH)
    return bool(os.environ.get(_TOKEN)) or Path(named or "~/.ray/auth_token").expanduser().is_file()


def _set_auth(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")  # Ray has read the mode when it was imported
    AuthenticationTokenLoader.instance().reset_cache()


def _local_address() -> str:
    address = ray_utils.read_ray_address() or next(iter(services.find_gcs_addresses()), None)
    if not address:
        raise RlixError("RAY_ADDRESS is 'auto', but no Ray runs on this machine; start one, or unset RAY_ADDRESS")
    return str(address)


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not colon or not port.isdecimal():
        raise SpecError(f"RAY_ADDRESS={address!r} must be host:port, 'auto' or 'local'")
    return host.strip("[]"), int(port)


def _is_loopback(host: str | None) -> bool:
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason was given"
