"""Processes of this machine: who they are, whether they live, and how they end."""

import contextlib
import logging
import os
import select
import signal
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from rlix.protocol.messages import Process

logger = logging.getLogger(__name__)

_NAME_LENGTH = 200

State = Literal["running", "stopped", "dead"]


@dataclass(frozen=True, slots=True)
class _Stat:
    folder: Path  # of a thread that lives, if any does
    state: str
    started: int


def this_process(node_id: str = "", name: str = "") -> Process:
    return Process(node_id, os.getpid(), start_time(os.getpid()) or 0, name)


def describe(pid: int, node_id: str = "") -> Process | None:
    """The process that has this number now, named by its command line; None when there is none."""
    stat = _stat(pid)
    return None if stat is None else Process(node_id, pid, stat.started, _command(stat.folder))


def start_time(pid: int) -> int | None:
    """When the process that has this number now began, in clock ticks since boot; None when there is none."""
    stat = _stat(pid)
    return None if stat is None else stat.started


def folder(pid: int) -> Path:
    """Where the kernel shows what the process that has this number now has open: that of its first thread, or of
    another one where that has ended."""
    stat = _stat(pid)
    return Path(f"/proc/{pid}") if stat is None else stat.folder


def state(process: Process) -> State:
    """ "stopped" by a signal (SIGSTOP, a debugger). A zombie is dead, and so is one whose number another has by now."""
    stat = _stat(process.pid)
    if stat is None or stat.started != process.started:
        return "dead"
    if stat.state in "ZX":
        return "dead"
    return "stopped" if stat.state in "Tt" else "running"


def alive(process: Process) -> bool:
    return state(process) != "dead"


def is_ours(process: Process) -> bool:
    """Whether it lives and belongs to the user that this process runs as."""
    try:
        return alive(process) and Path(f"/proc/{process.pid}").stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def descendants(process: Process) -> tuple[Process, ...]:
    """Every process that `process` started, and those started by these, that still lives below it."""
    if not alive(process):
        return ()
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ()
    found = (describe(child.pid, process.node_id) for child in children)
    return tuple(child for child in found if child is not None and alive(child))


def kill(processes: Iterable[Process], timeout_s: float, why: str = "") -> tuple[Process, ...]:
    """End processes with SIGKILL, also stopped ones, and return those that still live after `timeout_s`.

    One that leads a process group takes the whole group with it, unless that is the caller's own. `why` is written to
    each one's standard error before, for whoever looks there.
    """
    watched: dict[int, Process] = {}
    survivors = []
    try:
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            watched[descriptor] = process
            if not alive(process):  # asked after opening: from here on the descriptor cannot mean another process
                continue
            if why:
                _tell(process, f"rlix: process {process.pid} is ended: {why}")
            try:
                _kill(descriptor, process.pid)
            except ProcessLookupError:
                continue
            except PermissionError:
                logger.warning("may not kill process %d (%s): it belongs to another user", process.pid, process.name)
                survivors.append(process)
        waiting = {fd: p for fd, p in watched.items() if p not in survivors and alive(p)}
        return (*survivors, *_wait(waiting, time.monotonic() + timeout_s))
    finally:
        for descriptor in watched:
            os.close(descriptor)


def _tell(process: Process, text: str) -> None:
    """Where that can be done at once: on a terminal, in a pipe with room, at the end of a file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # another user's, a socket, closed, full
        descriptor = os.open(f"/proc/{process.pid}/fd/2", flags)
        try:
            if alive(process):  # so that it was this one's
                os.write(descriptor, f"{text}\n".encode(errors="replace"))
        finally:
            os.close(descriptor)


def _kill(descriptor: int, pid: int) -> None:
    if os.getpgid(pid) == pid != os.getpgrp():
        os.killpg(pid, signal.SIGKILL)
    else:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _wait(waiting: dict[int, Process], deadline: float) -> tuple[Process, ...]:
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting:
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            break
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            del waiting[descriptor]
    return tuple(waiting.values())


def _stat(pid: int) -> _Stat | None:
    folder = Path(f"/proc/{pid}")
    fields = _fields(folder)
    if not fields:
        return None
    state, threads, started = fields[0].decode(), int(fields[17]), int(fields[19])
    if state in "ZX" and threads > 1:  # the first thread may end before the process does
        for task in folder.glob("task/*"):
            if (theirs := _fields(task)) and theirs[0] not in (b"Z", b"X"):
                return _Stat(task, theirs[0].decode(), started)
    return _Stat(folder, state, started)


def _fields(folder: Path) -> list[bytes]:
    """Of a process or thread, from its state on; none where there is none."""
    try:
        text = (folder / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(b")") + 2 :].split()  # the command's name before may hold anything


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes()[:_NAME_LENGTH].replace(b"\0", b" ").strip()
        return (words or (folder / "comm").read_bytes().strip()).decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


class WatchedProcess:
    """A process on this node, watched by a descriptor: its number may be reused, the descriptor is not."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except OSError:  # gone already, or in another container
            self._fd = None
        else:
            weakref.finalize(self, os.close, self._fd)  # and not when it has ended: two may wait for that

    def wait(self, deadline: float) -> bool:
        """True when it has ended; False at the deadline (`time.monotonic()`)."""
        if self._fd is None:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
