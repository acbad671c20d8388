"""Copies of the queue's file, taken while the service runs, and put in its place while none does."""

import json
import os
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rlix.node.file_lock import FileBusyError, lock_file
from rlix.protocol.errors import SpecError
from rlix.scheduler.queue.jobs import State
from rlix.serve.queue.starter import attempts
from rlix.serve.queue.store import DRAINED, FILE, VERSION, open_file

_LOCK_WAIT_S = 5.0
_PARTS = ("", "-wal", "-shm")


@dataclass(frozen=True, slots=True)
class Restored:
    """`aside`: where the queue is kept that was there; None: there was none. `drained`: who wants nothing to start."""

    aside: Path | None
    drained: str


def backup(home: Path, target: Path) -> None:
    """Write the queue of `home` as it is now into one new file, which only its owner can read.

    Raises:
        SpecError: there is no queue, or the file cannot be written or is there already.
    """
    source = home / FILE
    if not source.is_file():
        raise SpecError(f"{source}: there is no queue")
    if target.exists():
        raise SpecError(f"{target}: is there already; name a new file")
    partial = target.with_name(f"{target.name}.partial")
    try:
        _copy(source, partial)
        partial.rename(target)
    except (sqlite3.Error, OSError) as error:
        partial.unlink(missing_ok=True)
        raise SpecError(f"{target}: cannot be written: {error}") from error


def restore(home: Path, source: Path) -> Restored:
    """Put a backup in the place of the queue of `home`.

    Numbers that jobs have had since are not given again: their folders are still there. What was started since is known
    by these folders, and a drain that is in force stays so.

    Raises:
        SpecError: a service has the queue, or the file is no backup.
    """
    path = home / FILE
    _check(source)
    home.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_file(path.with_suffix(".lock"), _LOCK_WAIT_S)
    except FileBusyError as error:
        raise SpecError(f"{path} is in use by `rlix serve`, {error}: end it first") from None
    with closing(lock):
        partial = path.with_name(f"{FILE}.partial")
        try:
            _copy(source, partial)
            last = max(_last(partial), _last(path), *_numbers(home / "queue"), 0)
            drained = _drained(path)
            with closing(open_file(partial)) as db:
                db.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
                db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', ?)", (last,))
                _count_attempts(db, home / "queue")
                if drained:
                    db.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", (DRAINED, drained))
                db.execute("PRAGMA journal_mode=DELETE")
            drained = _drained(partial)
            aside = path.with_name(f"{FILE}.before-{time.strftime('%Y%m%d-%H%M%S')}") if path.exists() else None
            for part in _PARTS if aside is not None else ():
                with suppress(FileNotFoundError):
                    path.with_name(path.name + part).rename(f"{aside}{part}")
            partial.rename(path)
        except (sqlite3.Error, OSError) as error:
            raise SpecError(f"{path}: cannot be written: {error}") from error
    return Restored(aside, drained)


def _count_attempts(db: sqlite3.Connection, folder: Path) -> None:
    """A job goes on after the last attempt that was made with it, also after the backup was."""
    for id, state, body in db.execute("SELECT id, state, body FROM jobs").fetchall():
        if not (made := attempts(folder / str(id))):
            continue
        job, last = json.loads(body), max(made)
        job["requeues"] = max(job["requeues"], last + (state in (State.SUBMITTED, State.HELD)))
        db.execute("UPDATE jobs SET body = ? WHERE id = ?", (json.dumps(job), id))


def _copy(source: Path, target: Path) -> None:
    """One whole file, which nobody but its owner can read at any time."""
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)
        other.execute("PRAGMA journal_mode=DELETE")


def _check(source: Path) -> None:
    """Raises SpecError: it is no whole queue of a version that this RLix knows."""
    if not source.is_file():
        raise SpecError(f"{source}: no such file")
    try:
        with closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as db:
            found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            db.execute("SELECT COUNT(*) FROM jobs, users").fetchone()
    except sqlite3.Error as error:
        raise SpecError(f"{source}: is no backup of a queue: {error}") from error
    if found != "ok":
        raise SpecError(f"{source}: is damaged: {' '.join(found.split())}")
    if version > VERSION:
        raise SpecError(f"{source}: has version {version}, and this RLix knows versions up to {VERSION}")


def _last(path: Path) -> int:
    """The last number that a job was given there; 0 where that cannot be read."""
    if path.exists():
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as db:
            row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
            return int(row[0]) if row else 0
    return 0


def _drained(path: Path) -> str:
    """Who has drained the queue of that file; "": nobody, or it cannot be read."""
    if path.exists():
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as db:
            row = db.execute("SELECT value FROM settings WHERE name = ?", (DRAINED,)).fetchone()
            return str(row[0]) if row else ""
    return ""


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
