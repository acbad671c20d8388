"""The control plane's memory: events in an SQLite file, in order, as JSON by type name."""

import fcntl
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from pydantic import TypeAdapter

from rlix.protocol.errors import RlixError
from rlix.protocol.events import Event

logger = logging.getLogger(__name__)

KEPT_SESSIONS = 5
_MAX_JOURNALS = 16
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, type TEXT NOT NULL, body TEXT NOT NULL
)
"""
_TYPES: dict[str, type] = {event_type.__name__: event_type for event_type in get_args(Event)}


class JournalError(RlixError):
    """The journal cannot be opened or holds something that is not an event."""


class JournalBusyError(JournalError):
    """Another control plane of this machine is writing to the journal."""


def encode(event: Event) -> tuple[str, str]:
    """An event's type name and its fields as JSON."""
    name = type(event).__name__
    return name, _adapter(name).dump_json(event).decode()


def decode(name: str, body: str) -> Event:
    """The inverse of `encode`.

    Raises:
        JournalError: unknown type name or fields that do not fit it.
    """
    if name not in _TYPES:
        raise JournalError(f"unknown event type {name!r}; was the journal written by a newer version?")
    try:
        return _adapter(name).validate_json(body)
    except ValueError as error:
        raise JournalError(f"event {name} does not have the expected fields: {error}") from error


@cache
def _adapter(name: str) -> TypeAdapter[Event]:
    return TypeAdapter(_TYPES[name])


class Journal:
    """One control-plane session's events. Appending is a single transaction, whatever the number of events.

    WAL with `synchronous=NORMAL`: a committed event survives the death of this process; the last ones may be lost when
    the machine itself dies, and then the devices' holders are gone as well.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Opens the journal at `path`, creating it where there is none; `now` gives unix seconds."""
        self.path = path
        self._now = now
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise JournalBusyError(
                f"{path} is in use by another control plane; set RLIX_HOME to another folder"
            ) from None
        self._db = _open(path)
        self._length = int(self._db.execute("SELECT COALESCE(MAX(sequence), 0) FROM events").fetchone()[0])

    def append(self, events: Sequence[Event]) -> None:
        """Writes the events durably, in order, all or none.

        Raises:
            JournalError: the file cannot be written.
        """
        now = self._now()
        rows = [(now, *encode(event)) for event in events]
        try:
            with self._db:
                self._db.execute("BEGIN")
                self._db.executemany("INSERT INTO events (time, type, body) VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise JournalError(f"cannot write to the journal {self.path}: {error}") from error
        self._length += len(rows)

    def replay(self) -> Iterator[Event]:
        """Every event, in the order in which they were appended."""
        for name, body in self._db.execute("SELECT type, body FROM events ORDER BY sequence"):
            yield decode(name, body)

    def __len__(self) -> int:
        return self._length

    def start_session(self) -> None:
        """Puts an earlier session's events aside, as `journal-<time>.db`, and starts empty; the last few are kept."""
        if not self._length:
            return
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()
        stamp = datetime.fromtimestamp(self._now(), UTC).strftime("%Y%m%dT%H%M%S.%f")
        kept = self.path.with_name(f"{self.path.stem}-{stamp}.db")
        self.path.rename(kept)
        logger.info("the earlier journal is now %s", kept)
        for old in sorted(self.path.parent.glob(f"{self.path.stem}-*.db"))[:-KEPT_SESSIONS]:
            old.unlink()
        self._db = _open(self.path)
        self._length = 0

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_journal(home: Path) -> Journal:
    """The first journal in `home` that no other control plane of this machine is writing to."""
    for number in range(_MAX_JOURNALS):
        path = home / ("journal.db" if number == 0 else f"journal{number}.db")
        try:
            return Journal(path)
        except JournalBusyError as error:
            logger.info("%s", error)
    raise JournalError(f"all {_MAX_JOURNALS} journals in {home} are in use; set RLIX_HOME to another folder")


def _open(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(_SCHEMA)
    except sqlite3.Error as error:
        raise JournalError(f"cannot open the journal {path}: {error}; move the file away to start afresh") from error
    return db
