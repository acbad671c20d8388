"""What Ray runs in place of the interpreter: asks the fork server for a worker, or becomes the plain interpreter.

Run as `python -S -E launcher.py ARGS...`, where ARGS are what Ray would have given to the interpreter. Standard
library only, and as little of it as possible: one of these runs for every worker. The first one on a node starts the
server. Whatever goes wrong, it ends in `exec` of the plain interpreter with the same ARGS, so a worker always starts.
"""

# pathlib would take longer to import than everything else here takes to run.
# ruff: noqa: PTH100, PTH108, PTH109, PTH110, PTH118, PTH120, PTH123

import array
import fcntl
import json
import os
import socket
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

LOCK_TIMEOUT_S = 10.0
TAKEN = b"!"
REPLY_TIMEOUT_S = 40.0  # covers the server's imports; Ray gives up on a worker that has not registered after 60 s

# Settings that libraries read once, at import. Workers that differ in one of these need servers of their own.
IMPORT_TIME_SETTINGS = (
    "PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "HF_",
    "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "XDG_", "HOME", "LANG", "LC_", "TZ", "CUDA_HOME", "CUDA_LAUNCH",
)  # fmt: skip


def main() -> None:
    args = sys.argv[1:]
    try:
        request_fork(args)
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"rlix: no fork server ({error!r}), starting a plain worker\n")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *args])


def request_fork(args: list[str]) -> None:
    """Return once the server has forked a worker for `args`; raise if it has not."""
    if not args or args[0].startswith("-"):
        raise ValueError(f"interpreter flags are not supported: {args[:1]}")
    message = json.dumps({"argv": args, "env": dict(os.environ), "cwd": os.getcwd(), "umask": current_umask()}).encode()
    with connect(session_dir(args), server_name()) as connection:
        connection.settimeout(REPLY_TIMEOUT_S)
        standard_streams = array.array("i", [0, 1, 2])
        connection.sendmsg(
            [len(message).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, standard_streams)]
        )
        connection.sendall(message)
        if not connection.recv(16):
            raise OSError("the fork server ended before it forked")
        connection.sendall(TAKEN)  # from here on this process does not become the worker, and the other one goes on


def session_dir(args: list[str]) -> str:
    options = dict(arg[2:].split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    return os.path.join(options["temp-dir"], options["session-name"])


def server_name() -> str:
    """One server per raylet, interpreter, working directory and set of import-time settings."""
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith(IMPORT_TIME_SETTINGS))
    identity = [os.environ["RAY_RAYLET_PID"], sys.executable, os.getcwd(), settings]
    return f"prefork-{zlib.crc32(json.dumps(identity).encode()):08x}"


def connect(session: str, name: str) -> socket.socket:
    path = os.path.join(session, "sockets", name)
    connection = try_connect(path)
    if connection is not None:
        return connection
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_lock(lock)
        connection = try_connect(path)
        if connection is None:
            start_server(path, os.path.join(session, "logs", f"{name}.log"))
            connection = try_connect(path)
        if connection is None:
            raise OSError("the fork server did not start")
        return connection
    finally:
        os.close(lock)


def try_connect(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(REPLY_TIMEOUT_S)
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def take_lock(lock: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody started the fork server within {LOCK_TIMEOUT_S:.0f} s") from None
            time.sleep(0.01)


def start_server(path: str, log_path: str) -> None:
    """Listen on `path` and hand the listening socket to a new server, so that requests can queue at once.

    The server is nobody's child: this process may yet become a worker, whose end takes along what it started.
    """
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o177)  # the socket is its owner's alone
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    listener.listen(1024)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
    with listener, open(log_path, "ab") as log:
        between = os.fork()
        if between == 0:
            start_and_leave([sys.executable, script, str(listener.fileno())], listener.fileno(), log.fileno())
        os.waitpid(between, 0)


def start_and_leave(command: list[str], listener: int, log: int) -> "NoReturn":
    """In a child: start the command in a session of its own, and end, so that it has no parent any more."""
    try:
        os.setsid()
        if os.fork() == 0:
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, descriptor in enumerate((nothing, log, log)):
                os.dup2(descriptor, target)
            os.set_inheritable(listener, True)
            os.execv(command[0], command)
    finally:
        os._exit(0)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    main()
