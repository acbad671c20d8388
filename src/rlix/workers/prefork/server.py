"""Forks Ray workers from a process that has already imported what they need.

Started by the launcher as `python server.py LISTENING_FD`, once per Ray node and set of import-time settings. It never
imports Ray, whose configuration freezes at import what differs from worker to worker; it never initialises CUDA and
runs no thread, since neither survives a fork. It ends when the raylet does, and takes the workers left behind with it.
"""

import array
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("rlix.prefork")

PRELOAD = (
    # what Ray's worker imports besides Ray itself
    "argparse", "asyncio", "attr", "certifi", "click", "concurrent.futures", "ctypes", "email.message", "filelock",
    "google.protobuf.descriptor_pb2", "google.protobuf.json_format", "http.client", "inspect", "ipaddress",
    "jsonschema", "logging.config", "logging.handlers", "msgpack", "multiprocessing", "packaging.version", "pickle",
    "psutil", "requests", "ssl", "tempfile", "typing_extensions", "uuid", "yaml",
    # what our workers import
    "numpy", "pydantic", "safetensors.torch", "torch", "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.utils.data", "transformers",
    "transformers.models.auto.tokenization_auto", "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip

# In force only while modules are imported: no BLAS thread pool, and no CUDA driver to find a device with.
IMPORT_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
REQUEST_TIMEOUT_S = 10.0
RAYLET_POLL_S = 0.2
NICENESS = 10  # workers compute on every core; the control plane must be heard all the same
ORPHAN_GRACE_S = 5.0  # workers end on their own when their raylet is gone; after this long they are killed
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid


@dataclass(frozen=True, slots=True)
class Request:
    argv: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    streams: tuple[int, int, int]


def main() -> None:
    """Serve until the raylet ends. In a forked child: run what was asked for, then end as any interpreter does."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    if not sys.flags.safe_path:
        sys.path.pop(0)  # this script's own folder: a worker has its own script's there
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    with ending_with(raylet):
        preload()
    set_oom_score(0)
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    request = Server(listener, raylet).serve()
    if request is None:
        logging.shutdown()
        os._exit(0)  # nothing to finalize, and tearing down every preloaded module takes seconds
    become(request)
    runpy.run_path(request.argv[0], run_name="__main__")


@contextlib.contextmanager
def ending_with(raylet: int) -> Iterator[None]:
    """End this process when the raylet has ended; imports take seconds. By a timer: there must be no thread."""

    def look(_number: int, _frame: object) -> None:
        if select.select([raylet], [], [], 0)[0]:
            os._exit(0)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, RAYLET_POLL_S, RAYLET_POLL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def preload() -> None:
    started = time.monotonic()
    os.environ.update(IMPORT_ENVIRONMENT)
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError as error:
            logger.warning("not preloaded: %s (%s)", name, error)
    assert "ray" not in sys.modules, "the fork server must not import ray"
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every preloaded page in each worker
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        logger.warning("%d threads run in the fork server: workers may hang", threads)
    logger.info("ready after %.1f s", time.monotonic() - started)


class Server:
    """Accepts requests, forks, and reaps; all in one thread."""

    def __init__(self, listener: socket.socket, raylet: int) -> None:
        self._listener = listener
        self._raylet = raylet
        self._path = Path(listener.getsockname())
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._poll = select.poll()
        for fd in (listener.fileno(), raylet):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> Request | None:
        """Return None when the raylet has ended, and in every forked child the request it is to carry out."""
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            for fd in ready:
                if fd in self._children:
                    self._reap(fd)
            if self._raylet in ready:
                self._stop()
                return None
            if self._listener.fileno() in ready:
                request = self._accept()
                if request is not None:
                    return request

    def _accept(self) -> Request | None:
        connection, _ = self._listener.accept()
        with connection:
            try:
                connection.settimeout(REQUEST_TIMEOUT_S)
                request = receive(connection)
            except (OSError, ValueError, KeyError) as error:
                logger.error("refused a request: %r", error)
                return None
            pid = os.fork()
            if pid == 0:
                self._close_in_child()
                if not offered(connection):
                    os._exit(0)
                return request
            for fd in request.streams:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = pid
            self._poll.register(pidfd, select.POLLIN)
        return None

    def _close_in_child(self) -> None:
        os.setsid()
        self._listener.close()
        for fd in (self._raylet, *self._children):
            os.close(fd)

    def _reap(self, pidfd: int) -> None:
        """Each worker leads a process group: what it started and left running ends with it."""
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # safe: the group's id is not reused before the leader is reaped
        os.waitpid(pid, 0)

    def _stop(self) -> None:
        self._listener.close()
        self._poll.unregister(self._raylet)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        deadline = time.monotonic() + ORPHAN_GRACE_S
        while self._children and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                if fd in self._children:
                    self._reap(fd)
        for pidfd, pid in list(self._children.items()):
            logger.warning("worker %d outlived its raylet, killing it", pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._reap(pidfd)


def receive(connection: socket.socket) -> Request:
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.getuid():
        raise ValueError(f"request by user {uid}, this server is user {os.getuid()}'s")
    streams = array.array("i")
    header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            streams.frombytes(data)
    try:
        message = json.loads(receive_body(connection, header, streams))
    except (OSError, ValueError):
        for descriptor in streams:  # or whoever reads the worker's output would wait for this process, too
            os.close(descriptor)
        raise
    stdin, stdout, stderr = streams
    return Request(message["argv"], message["env"], message["cwd"], message["umask"], (stdin, stdout, stderr))


def receive_body(connection: socket.socket, header: bytes, streams: Sequence[int]) -> bytes:
    if len(header) != 8 or len(streams) != 3:
        raise ValueError("request cut short")
    length, body = int.from_bytes(header, "big"), b""
    while len(body) < length:
        chunk = connection.recv(length - len(body))
        if not chunk:
            raise ValueError("request cut short")
        body += chunk
    return body


def offered(connection: socket.socket) -> bool:
    """In a forked child: whether the launcher takes it as the worker, or has given up, and is the worker itself.

    One of the two it always says, by its word or by its end; there is never a second worker of the same request.
    """
    try:
        connection.settimeout(None)
        connection.sendall(str(os.getpid()).encode())
        return bool(connection.recv(1))
    except OSError:
        return False


def become(request: Request) -> None:
    """Take on everything a freshly started interpreter would have got from the launcher."""
    for target, fd in enumerate(request.streams):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.env)
    os.umask(request.umask)
    os.chdir(request.cwd)
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    sys.argv = request.argv
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(request.argv[0]).parent))
    set_oom_score(1000)  # as Ray does with what it starts itself
    reseed()
    forget_what_was_found()


def forget_what_was_found() -> None:
    """Transformers remembers which devices and packages it found, and this process had hidden its GPUs."""
    if (found := sys.modules.get("transformers.utils.import_utils")) is not None:
        for value in vars(found).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def set_oom_score(score: int) -> None:
    """How soon the kernel ends this process when memory is short; 1000 is first."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def reseed() -> None:
    """Every worker would otherwise draw the numbers its siblings draw. (`random` reseeds itself after a fork.)"""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


if __name__ == "__main__":
    main()
