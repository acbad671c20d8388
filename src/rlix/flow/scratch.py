"""Temporary folders that go with the process that made them, however it ends."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

from rlix.node.file_lock import FileBusyError, lock_file

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rlix-"
_LOCK = ".owner"


def shared_memory() -> Path | None:
    """Where files are memory that processes share; None: nowhere, and the usual place has to do."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


class Scratch:
    """A new folder for temporary files, in `where` or the usual place, locked by this process as long as it lives.

    Whoever makes one there next removes those of the same user whose owner was killed.
    """

    def __init__(self, name: str, where: Path | None = None) -> None:
        where = where or Path(tempfile.gettempdir())
        sweep(where)
        self.name, self._lock = _make(name, where)

    def cleanup(self) -> None:
        """Removes the folder with all that is in it. Calling it again changes nothing."""
        shutil.rmtree(self.name, ignore_errors=True)
        self._lock.close()


def sweep(where: Path | None = None) -> None:
    """Removes this user's scratch folders that no living process owns."""
    for folder in (where or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / _LOCK).is_file():
                continue
            with lock_file(folder / _LOCK):
                logger.info("removing %s: its owner was killed", folder)
                shutil.rmtree(folder, ignore_errors=True)
        except (FileBusyError, OSError):  # in use, or just removed by another process
            continue


def _make(name: str, where: Path) -> tuple[str, TextIO]:
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{name.replace('/', '_')}-", dir=where)
        try:
            return folder, lock_file(Path(folder) / _LOCK)
        except (FileBusyError, FileNotFoundError):  # another process swept it before it was locked
            continue
