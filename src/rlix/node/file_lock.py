"""A lock on a file that lasts as long as the process that took it, however that process ends."""

import fcntl
import os
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rlix.protocol.errors import RlixError

_POLL_S = 0.05


class FileBusyError(RlixError):
    """Another process has the lock. The message says which, and since when."""


def lock_file(path: Path, wait_s: float = 0.0) -> TextIO:
    """Locks `path`, creating it, until the returned file is closed or this process ends; its forks do not keep it.

    Args:
        wait_s: how long to wait for another process to let go. One that was just killed needs a moment to end.

    Raises:
        FileBusyError: another process still has the lock.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                file.truncate(0)
                file.write(f"process {os.getpid()} (since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC)\n")
                file.flush()
                _held.add(file)
                return file
            file.close()
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            if time.monotonic() >= deadline:
                raise FileBusyError(owner) from None
            time.sleep(_POLL_S)
        except OSError:
            file.close()
            raise


def _is_at(path: Path, file: TextIO) -> bool:
    """Not so when the last owner has deleted or moved the file since it was opened here."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


_held: "weakref.WeakSet[TextIO]" = weakref.WeakSet()


def _forget() -> None:
    """In a fork: a lock lasts until every copy of its descriptor is closed, and this one would outlive the owner."""
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_forget)
