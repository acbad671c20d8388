"""Processes of their own that hold device locks, and can be told to, stopped and killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from rlix.protocol.messages import Fence

_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from rlix.node.device_lock import DeviceLocks
from rlix.protocol.messages import Fence

locks = DeviceLocks(json.loads(sys.argv[2]), Path(sys.argv[1]))
for line in sys.stdin:
    verb, *arguments = json.loads(line)
    answer = None
    try:
        if verb == "acquire":
            locks.acquire(Fence(*arguments[0]), arguments[1])
        elif verb == "release":
            locks.release()
        elif verb == "fork":
            answer = os.fork()
            if answer == 0:
                sys.stdin.close()
                os.close(1)
                signal.pause()
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Holder:
    """A child process with one `DeviceLocks`; what it is asked it answers with None or the error."""

    def __init__(self, directory: Path, keys: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(directory), json.dumps(list(keys))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.pid = self._process.pid

    def ask(self, *what: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(what), file=stdin, flush=True)
        return json.loads(stdout.readline())

    def acquire(self, fence: Fence, timeout_s: float = 0.0) -> Any:
        return self.ask("acquire", [fence.pool, fence.epoch, fence.job, fence.phase], timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=300)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it forked, too
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


_WITHOUT_ITS_FIRST_THREAD = """
import ctypes, os, platform, signal, sys, threading
from pathlib import Path
from rlix.node.device_lock import DeviceLocks
from rlix.protocol.messages import Fence

locks = DeviceLocks([sys.argv[2]], Path(sys.argv[1]))
locks.acquire(Fence(*sys.argv[3:4], 1, *sys.argv[4:]), 0.0)

def go_on():
    while Path("/proc/self/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    print("ended", flush=True)
    threading.Event().wait()

threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
"""


@contextlib.contextmanager
def without_its_first_thread(directory: Path, key: str, fence: Fence) -> Iterator[int]:
    """A process that holds a device of epoch 1 and whose first thread has ended: its id."""
    arguments = [str(directory), key, fence.pool, fence.job, fence.phase]
    with subprocess.Popen(
        [sys.executable, "-c", _WITHOUT_ITS_FIRST_THREAD, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ended\n"
            yield child.pid
        finally:
            child.kill()
