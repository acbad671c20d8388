"""The log of a job in its run folder, and what an error is called at its end."""

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from ray.exceptions import RayActorError, RayTaskError

from rlix.control.rpc import root_cause
from rlix.node import output
from rlix.node.plain import PlainFormatter
from rlix.node.run_folder import command_to_go_on
from rlix.pipeline.spec.named import where_raised
from rlix.protocol.errors import DeviceBusyError, WaitTimeoutError

_LIBRARY = "rlix"
_FULL = ("No space left on device", "Disk quota exceeded", "os error 28")


class _Library:
    """The library's logger, as it is while there is a job's log, or several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: list[logging.Handler] = []
        self._before = logging.NOTSET
        self._screen = logging.StreamHandler()
        self._screen.setLevel(logging.WARNING)

    def add(self, log: logging.Handler) -> None:
        library = logging.getLogger(_LIBRARY)
        with self._lock:
            if not self._logs:
                self._before = library.level
                library.setLevel(logging.INFO)
                if not logging.getLogger().handlers:  # with a handler of its own it would say nothing there any more
                    self._screen.setStream(output.terminal())
                    library.addHandler(self._screen)
            self._logs.append(log)
            library.addHandler(log)

    def remove(self, log: logging.Handler) -> None:
        library = logging.getLogger(_LIBRARY)
        with self._lock:
            if log not in self._logs:
                return
            self._logs.remove(log)
            library.removeHandler(log)
            if not self._logs:
                library.removeHandler(self._screen)
                library.setLevel(self._before)


_library = _Library()


class JobLog(logging.FileHandler):
    """What the library says in this process, from INFO up, in `job.log`; on stderr only what is a warning or worse.

    A log that cannot be written, on a full disk for instance, stops nothing.

    Args:
        thread: the name of the only thread that is listened to; None: all of them.
    """

    def __init__(self, folder: Path, thread: str | None = None) -> None:
        super().__init__(folder / "job.log", encoding="utf-8", delay=True)
        self.setFormatter(PlainFormatter())
        if thread is not None:
            self.addFilter(lambda record: record.threadName == thread)
        _library.add(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it is opened with its first line
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Nothing: whoever logs has something else to do."""

    def close(self) -> None:
        _library.remove(self)
        super().close()


def is_full_disk(error: BaseException) -> bool:
    """Whether a full disk is behind it, in whatever process that was found."""
    return any(
        (isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)) or any(text in str(e) for text in _FULL)
        for e in _chain(error)
    )


def what_ended(error: BaseException, folder: Path, phase: str) -> str:
    """In one line, what ended the job whose run folder this is, in `phase`."""
    if is_full_disk(error):
        return f"the disk of {folder} is full: free some space, then go on with {command_to_go_on(folder)}"
    if any(isinstance(found, RayActorError) for found in _chain(error)):
        how = f"go on from the newest checkpoint with {command_to_go_on(folder)}"
        return f"in {phase.replace('_', ' ')}: {where_raised(error)}; {how}"
    return where_raised(error)


def is_the_pools(error: BaseException) -> bool:
    """Whether a job that had only begun to start failed for what is not its own: a wait that was over, a device that
    somebody else has."""
    return any(
        isinstance(root_cause(found) if isinstance(found, RayTaskError) else found, WaitTimeoutError | DeviceBusyError)
        for found in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
