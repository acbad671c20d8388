"""The host memory of this machine, or of the container that this is, and how much of it all its processes may pin."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

from rlix.node.device_lock import DIRECTORY, DIRECTORY_VARIABLE
from rlix.node.file_lock import FileBusyError, lock_file
from rlix.node.memory import memory_groups, read_text

PINNED_SHARE = 0.5
"""Of a node's memory: most that its processes pin between them."""
_WAIT_S = 10.0  # for another process to have counted

_numbers = itertools.count()


def memory_bytes(groups: str | None = None, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the processes of this node have between them: the machine's, or fewer where a control group says so.

    Args:
        groups: what /proc/self/cgroup says; default: just that.
    """
    limits = [limit for limit, _, _ in memory_groups(groups, root)]
    return min([*limits, int(psutil.virtual_memory().total)])


class PinnedMemory:
    """What one user of a node's memory has pinned, counted with all others' whose processes live.

    Args:
        limit_bytes: most that all pin together. directory: where they count; default: that of the devices' locks.
    """

    def __init__(self, limit_bytes: int | None = None, directory: Path | None = None) -> None:
        self._limit = int(memory_bytes() * PINNED_SHARE) if limit_bytes is None else limit_bytes
        self._folder = (directory or Path(os.environ.get(DIRECTORY_VARIABLE, DIRECTORY))) / "pinned"
        self._own: tuple[Path, TextIO] | None = None

    def take(self, size: int) -> bool:
        """Whether so many bytes, instead of those taken before, may be pinned."""
        self.give_back()
        with self._counting():
            if self._taken() + size > self._limit:
                return False
            path = self._folder / f"{os.getpid()}-{next(_numbers)}"
            file = lock_file(path)
            file.write(f"{size}\n")
            file.flush()
            self._own = path, file
            return True

    def give_back(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own[0].unlink(missing_ok=True)
            own[1].close()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with lock_file(self._folder / "counting", _WAIT_S):
            yield

    def _taken(self) -> int:
        """By those that live; of others the file is there and the lock is not."""
        total = 0
        for path in self._folder.glob("*-*"):
            try:
                lock_file(path).close()
                path.unlink(missing_ok=True)
            except FileBusyError:
                said = read_text(path).splitlines()
                total += int(said[-1]) if len(said) > 1 else 0
        return total
