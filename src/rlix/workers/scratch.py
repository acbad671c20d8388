"""Temporary folders that go with the process that made them, however it ends."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

from rlix.node.file_lock import FileBusyError, lock_file

logger = logging.getLogger(__name__)

_PREFIX = "rlix-"
_LOCK = ".owner"


class Scratch:
    """A new folder for temporary files, locked by this process as long as it lives.

    Whoever makes one next removes those of the same user whose owner was killed.
    """

    def __init__(self, name: str) -> None:
        sweep()
        self.name, self._lock = _make(name)

    def cleanup(self) -> None:
        """Removes the folder with all that is in it. Calling it again changes nothing."""
        shutil.rmtree(self.name, ignore_errors=True)
        self._lock.close()


def sweep() -> None:
    """Removes this user's scratch folders that no living process owns."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / _LOCK).is_file():
                continue
            with lock_file(folder / _LOCK):
                logger.info("removing %s: its owner was killed", folder)
                shutil.rmtree(folder, ignore_errors=True)
        except (FileBusyError, OSError):  # in use, or just removed by another process
            continue


def _make(name: str) -> tuple[str, TextIO]:
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{name.replace('/', '_')}-")
        try:
            return folder, lock_file(Path(folder) / _LOCK)
        except (FileBusyError, FileNotFoundError):  # another process swept it before it was locked
            continue
