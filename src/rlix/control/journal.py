"""The control plane's memory: events in an SQLite file for each pool, in order, as JSON by type name."""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args
from urllib.parse import quote

from pydantic import TypeAdapter

from rlix.node.database import transaction
from rlix.node.file_lock import FileBusyError, lock_file
from rlix.protocol.errors import RlixError
from rlix.protocol.events import Event, PipelineRegistered
from rlix.protocol.messages import Registration

logger = logging.getLogger(__name__)

KEPT_SESSIONS = 5
LOCK_WAIT_S = 5.0  # a process that was just killed holds its files until the kernel has cleaned up after it
VERSION = 3  # of the tables and of the events' fields: a journal of any other but `_BEFORE` is put aside
_BEFORE = 2  # which has the devices of a registration in its clusters
_BUSY_TIMEOUT_S = 1.0
_WAL_BYTES = 4 << 20
_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE events (sequence INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, type TEXT NOT NULL, "
    "body TEXT NOT NULL)",
)
_INSERT = "INSERT INTO events (time, type, body) VALUES (?, ?, ?)"
_TYPES: dict[str, type] = {event_type.__name__: event_type for event_type in get_args(Event)}
_Runs = tuple[tuple[int, int], ...]  # (first, how many): consecutive devices


class JournalError(RlixError):
    """The journal cannot be opened or written, or holds something that is not an event."""


class JournalBusyError(JournalError):
    """Another control plane is writing to the journal: two of one pool must never run."""


def encode(event: Event) -> tuple[str, str]:
    """An event's type name and its fields as JSON.

    Raises:
        JournalError: a text of it cannot be written, such as half of a surrogate pair.
    """
    name = type(event).__name__
    stored = _packed(event) if isinstance(event, PipelineRegistered) else event
    try:
        return name, _adapter(name).dump_json(stored).decode()
    except ValueError as error:
        raise JournalError(f"event {name} cannot be written as JSON: {error}") from error


def decode(name: str, body: str) -> Event:
    """The inverse of `encode`.

    Raises:
        JournalError: unknown type name or fields that do not fit it.
    """
    if name not in _TYPES:
        raise JournalError(f"unknown event type {name!r}; was the journal written by a newer version?")
    try:
        stored = _adapter(name).validate_json(body)
    except ValueError as error:
        raise JournalError(f"event {name} does not have the expected fields: {error}") from error
    event: Event = _unpacked(stored) if isinstance(stored, _Registered) else stored
    return event


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_Registered if name == PipelineRegistered.__name__ else _TYPES[name])


@dataclass(frozen=True, slots=True)
class _Registered:
    """How a registration is written: clusters without their devices, which may be the whole pool for each of hundreds
    of jobs, and those as runs."""

    registration: Registration
    devices: tuple[_Runs, ...] = ()


def _packed(event: PipelineRegistered) -> _Registered:
    clusters = event.registration.clusters
    bare = replace(event.registration, clusters=tuple(replace(cluster, devices=()) for cluster in clusters))
    return _Registered(bare, tuple(_runs(cluster.devices) for cluster in clusters))


def _unpacked(stored: _Registered) -> PipelineRegistered:
    if not stored.devices:
        return PipelineRegistered(stored.registration)
    bare = zip(stored.registration.clusters, stored.devices, strict=True)
    clusters = tuple(replace(cluster, devices=_devices(runs)) for cluster, runs in bare)
    return PipelineRegistered(replace(stored.registration, clusters=clusters))


@lru_cache(maxsize=64)
def _runs(devices: tuple[int, ...]) -> _Runs:
    starts = [at for at, device in enumerate(devices) if at == 0 or device != devices[at - 1] + 1]
    return tuple((devices[at], end - at) for at, end in pairwise([*starts, len(devices)]))


@lru_cache(maxsize=64)  # also so that equal ones are one tuple
def _devices(runs: _Runs) -> tuple[int, ...]:
    return tuple(chain.from_iterable(range(first, first + count) for first, count in runs))


class Journal:
    """One pool's events. Each change is a single transaction: after a crash in it, the content is that before it.

    WAL with `synchronous=NORMAL`: a committed event survives the death of this process; the last ones may be lost when
    the machine itself dies, and then the devices' holders are gone as well.
    """

    def __init__(
        self, path: Path, pool: str = "", *, now: Callable[[], float] = time.time, wait_s: float = LOCK_WAIT_S
    ) -> None:
        """Opens the journal at `path`, creating it where there is none.

        Args:
            pool: whose journal it is; for whatever pool's when empty.
            now: gives unix seconds.
            wait_s: how long to wait for another process to let go of the journal.

        Raises:
            JournalBusyError: another process still writes to the journal.
            JournalError: the file is damaged, another pool's, or cannot be written.
        """
        self.path = path
        self._now = now
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(path.with_suffix(".lock"), wait_s)
        except FileBusyError as error:
            raise JournalBusyError(
                f"the journal {path} is in use by another control plane, {error}, and was not free after {wait_s:g} s; "
                "stop that one, or set RLIX_HOME to another folder"
            ) from None
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error}; set RLIX_HOME to another folder") from error
        try:
            with self._as_journal_error("open", "move the file away to start afresh"):
                self._db = self._open(pool)
                self._length = int(self._db.execute("SELECT COUNT(*) FROM events").fetchone()[0])
        except BaseException:  # raised again: the next attempt needs the lock
            self._lock.close()
            raise

    @property
    def pool(self) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE key = 'pool'").fetchone()[0])

    def __len__(self) -> int:
        """The number of events that `replay` yields."""
        return self._length

    def check(self, event: Event) -> None:
        """Raises JournalError when the event could never be written."""
        encode(event)

    def append(self, events: Sequence[Event]) -> None:
        """Writes the events durably, in order, all or none.

        Raises:
            JournalError: the file cannot be written; nothing was appended, and a later call may succeed.
        """
        rows = self._rows(events)
        with self._as_journal_error("write to", "free space on its disk"), transaction(self._db):
            self._db.executemany(_INSERT, rows)
        self._length += len(rows)

    def compact(self, events: Sequence[Event]) -> None:
        """Replaces everything by `events`, which must fold to the same state, and gives the room back.

        Raises:
            JournalError: the file cannot be written; it holds what it held.
        """
        rows = self._rows(events)
        with self._as_journal_error("write to", "free space on its disk"), transaction(self._db):
            self._db.execute("DELETE FROM events")
            self._db.executemany(_INSERT, rows)
        self._length = len(rows)
        try:
            self._db.executescript("PRAGMA incremental_vacuum")  # `execute` would give one page back
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            logger.warning("the journal %s is compacted, but its file did not shrink: %s", self.path, error)

    def replay(self) -> Iterator[tuple[float, Event]]:
        """Every event with the time (unix seconds) at which it was appended, in order.

        Raises:
            JournalError: the file is damaged, or holds an event that this version does not know.
        """
        with self._as_journal_error("read", "move the file away to start afresh"):
            for at, name, body in self._db.execute("SELECT time, type, body FROM events ORDER BY sequence"):
                yield at, decode(name, body)

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows(self, events: Sequence[Event]) -> list[tuple[float, str, str]]:
        now = self._now()
        return [(now, *encode(event)) for event in events]

    @contextlib.contextmanager
    def _as_journal_error(self, verb: str, fix: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"cannot {verb} the journal {self.path}: {error}; {fix}") from error
        except JournalError as error:
            raise type(error)(f"cannot {verb} the journal {self.path}: {error}; {fix}") from error

    def _open(self, pool: str) -> sqlite3.Connection:
        db = _connect(self.path)
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        tables = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if tables and version == _BEFORE:
            db.execute(f"PRAGMA user_version={VERSION}")
        elif tables and version != VERSION:
            db.execute("PRAGMA journal_mode=DELETE")  # so that no part of it stays behind in a file of another name
            db.close()
            self._put_aside(version)
            db, tables = _connect(self.path), 0
        if not tables:
            _create(db, pool)
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise JournalError(f"it is damaged ({' '.join(found.split())})")
        owner = db.execute("SELECT value FROM meta WHERE key = 'pool'").fetchone()[0]
        if pool and owner != pool:
            raise JournalError(f"it is the journal of pool {owner!r}, not of {pool!r}")
        return db

    def _put_aside(self, version: int) -> None:
        stamp = datetime.fromtimestamp(self._now(), UTC).strftime("%Y%m%dT%H%M%S.%f")
        kept = self.path.with_name(f"{self.path.stem}-{stamp}.db")
        self.path.rename(kept)
        logger.warning(
            "the journal %s has version %d and this RLix reads version %d: it is now %s, and a new one begins",
            self.path,
            version,
            VERSION,
            kept,
        )


def open_journal(
    home: Path, pool: str, *, now: Callable[[], float] = time.time, wait_s: float = LOCK_WAIT_S
) -> Journal:
    """The journal in `home` of this pool (an id that no other pool ever has): to be replayed where it holds events.

    Of other pools' journals only the last `KEPT_SESSIONS` are kept, besides those that are in use.

    Raises:
        JournalBusyError: another control plane of this pool runs.
        JournalError: the file is damaged or cannot be written; says what to do.
    """
    journal = Journal(home / f"journal-{quote(pool, safe='')}.db", pool, now=now, wait_s=wait_s)
    others = [path for path in home.glob("journal-*.db") if path != journal.path]
    for old in sorted(others, key=_last_written)[:-KEPT_SESSIONS]:
        _remove(old)
    return journal


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
    db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # takes effect in a new file only, and only before the first page
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")
    return db


def _create(db: sqlite3.Connection, pool: str) -> None:
    with transaction(db):
        for table in _TABLES:
            db.execute(table)
        db.execute("INSERT INTO meta (key, value) VALUES ('pool', ?)", (pool,))
        db.execute(f"PRAGMA user_version={VERSION}")


def _last_written(path: Path) -> float:
    files = (path, path.with_name(f"{path.name}-wal"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _remove(path: Path) -> None:
    """Deletes a journal that nobody uses."""
    try:
        lock = lock_file(path.with_suffix(".lock"))
    except FileBusyError:
        return
    with lock:
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm", f"{path.stem}.lock"):
            path.with_name(name).unlink(missing_ok=True)
