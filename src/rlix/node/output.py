"""What the code of a job prints: in a file of the job that stays small, not on the terminal of whoever started it."""

import contextlib
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FILE = "output.log"
LIMIT_BYTES = 16 * 2**20
KEPT_BYTES = 8 * 2**20
"""Of a file that has grown beyond the limit the beginning stays, and the newest that comes after that."""
_LOOK_S = 0.5
_STDOUT, _STDERR = 1, 2


@dataclass(slots=True)
class _This:
    """Of this process."""

    file: Path | None = None
    terminal: TextIO | None = None
    bounded: int | None = None  # the descriptor of the file that is kept small


_this = _This()


def file() -> Path | None:
    """Where this process's output goes; None where it is as it was."""
    return _this.file


def terminal() -> TextIO:
    """What was stderr before the output went to a file: for what a person who follows the job must see."""
    return _this.terminal or sys.stderr


def early_file(run_dir: Path) -> Path:
    """Where the output of a job goes that is starting: its run folder may still be an earlier run's."""
    return run_dir.with_name(f"{run_dir.name}.{FILE}")


def has_more(file: Path) -> bool:
    """Whether anything was printed there but lines of our own, as the one that says why a process is ended."""
    try:
        with file.open("rb") as lines:
            return any(not line.startswith(b"rlix: ") for line in lines if line.strip())
    except OSError:
        return False


def to_file(path: Path, *, bounded: bool, after: Path | None = None) -> None:
    """From here on let what this process and its children print, in Python or not, be appended to `path`.

    Args:
        bounded: keep the file small while this process lives, whoever else writes to it: one process of a job does.
        after: an earlier such file; if it is there, what it has comes first, and it is removed.

    Raises:
        OSError: the file cannot be opened; everything is as it was.
    """
    opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    if _this.terminal is None:
        _this.terminal = os.fdopen(os.dup(_STDERR), "w", buffering=1, errors="backslashreplace")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if after is not None:
        with (
            contextlib.suppress(FileNotFoundError),
            after.open("rb") as before,
            open(opened, "ab", closefd=False) as file,
        ):
            shutil.copyfileobj(before, file)
            after.unlink()
    for number in (_STDOUT, _STDERR):
        os.dup2(opened, number)
    _this.file = path
    if not bounded:
        os.close(opened)
    elif _this.bounded is None:
        _this.bounded = opened
        threading.Thread(target=_keep_small, args=(opened,), name="output", daemon=True).start()
    else:
        os.dup2(opened, _this.bounded)
        os.close(opened)


def _keep_small(descriptor: int) -> None:
    over = threading.Event()
    while not over.wait(_LOOK_S):
        with contextlib.suppress(OSError):
            cut(descriptor)


def cut(descriptor: int, limit: int = LIMIT_BYTES, kept: int = KEPT_BYTES) -> bool:
    """Shorten the file, which is open for appending, to `kept` bytes if it has more than `limit`; whether it had."""
    if os.fstat(descriptor).st_size <= limit:
        return False
    os.ftruncate(descriptor, kept)
    os.write(
        descriptor, f"\n[rlix: more than {limit:,} bytes were printed; of what comes next some is left out]\n".encode()
    )
    return True
