"""The processes of a Ray that a program of ours has started, and their end, whatever state they are in."""

import contextlib
import logging
import time
from importlib.util import find_spec
from pathlib import Path

import psutil

from rlix.node.process import alive, describe

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class RayProcesses:
    """What runs now of the Ray that `starter` has started; what its raylets start later belongs to it, too."""

    def __init__(self, starter: psutil.Process) -> None:
        heads = [child for child in starter.children() if is_ray(child)]
        self._processes = {process for head in heads for process in (head, *head.children(recursive=True))}
        self._raylets = {str(head.pid) for head in heads}

    def end(self, grace_s: float) -> None:
        """Returns when all are gone: those that are not after `grace_s` seconds are killed."""
        left = self._outlive(grace_s)
        if left and grace_s:
            pids = ", ".join(str(process.pid) for process in left)
            logger.warning("processes %s outlived Ray by %.0f s: killing them", pids, grace_s)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._outlive(grace_s)
        psutil.wait_procs(self._processes, timeout=0)  # collects this process's own children, which Ray may not have

    def _outlive(self, grace_s: float) -> list[psutil.Process]:
        """Those that still live after a while. Ray's children may have left children of their own to init, and a last
        one may be starting right now."""
        deadline = time.monotonic() + grace_s
        while True:
            alive = [process for process in {*self._processes, *self._started_later()} if _lives(process)]
            if not alive or time.monotonic() > deadline:
                return alive
            psutil.wait_procs(alive, timeout=_POLL_S)

    def _started_later(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _raylet_of(process) in self._raylets]


def is_ray(process: psutil.Process) -> bool:
    """Whether it is an executable or a script of the installed Ray."""
    found = find_spec("ray")
    assert found is not None
    folder = f"{Path(found.origin or '').parent}/"
    try:
        return any(part.startswith(folder) for part in process.cmdline()[:3])
    except psutil.NoSuchProcess:
        return False


def _lives(process: psutil.Process) -> bool:
    """An ended process that nobody has collected (in a container without init, nobody may) does not live."""
    known = describe(process.pid)
    return known is not None and process.is_running() and alive(known)


def _raylet_of(process: psutil.Process) -> str | None:
    """The raylet that started a process, or one of its ancestors: its process id."""
    try:
        return process.environ().get("RAY_RAYLET_PID")
    except psutil.Error:  # gone, or somebody else's
        return None
