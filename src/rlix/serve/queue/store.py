"""What outlives every process of a queue: one SQLite file with jobs, their files, accounts and users.

A pool's journal goes with its pool. The queue is there before the first pool and after the last one, so it has a file
of its own beside them, `RLIX_HOME/queue.db`. Each change is one transaction that is on disk when the call returns.
"""

import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlix.node.database import transaction
from rlix.node.file_lock import FileBusyError, lock_file
from rlix.protocol.errors import RlixError
from rlix.scheduler.queue.jobs import Job, State

logger = logging.getLogger(__name__)

FILE = "queue.db"
DRAINED = "drained"
"""The setting: who wants nothing to start; "": nobody."""
_LOCK_WAIT_S = 5.0  # a process that was just killed holds its files until the kernel has cleaned up after it
_BUSY_TIMEOUT_MS = 1000
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, state TEXT NOT NULL, key TEXT UNIQUE, "
        "body TEXT NOT NULL)",
        "CREATE INDEX jobs_by_state ON jobs (state)",
        "CREATE TABLE files (job INTEGER NOT NULL, path TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (job, path))",
        "CREATE TABLE changes (sequence INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, job INTEGER NOT NULL, "
        "by TEXT NOT NULL, what TEXT NOT NULL)",
        "CREATE INDEX changes_by_job ON changes (job)",
        "CREATE TABLE usage (job INTEGER NOT NULL, hour INTEGER NOT NULL, phase TEXT NOT NULL, given_s REAL NOT NULL, "
        "busy_s REAL NOT NULL, switching_s REAL NOT NULL, PRIMARY KEY (job, hour, phase))",
        "CREATE TABLE users (name TEXT PRIMARY KEY, team TEXT NOT NULL, admin INTEGER NOT NULL, digest TEXT NOT NULL)",
    ),
    (
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE hooks (owner TEXT PRIMARY KEY, body TEXT NOT NULL)",
    ),
    (
        "ALTER TABLE jobs ADD COLUMN since REAL NOT NULL DEFAULT 0",
        """UPDATE jobs SET since = CAST(substr(body, instr(body, '"since": ') + 9) AS REAL)""",
        "DROP INDEX jobs_by_state",
        "CREATE INDEX jobs_by_state ON jobs (state, since)",
    ),
)
"""What makes the tables of each version out of those of the one before."""
VERSION = len(_MIGRATIONS)
_JOB = TypeAdapter(Job)


class StoreError(RlixError):
    """The queue's file cannot be read or written."""


@dataclass(frozen=True, slots=True)
class User:
    """Who a token is. An admin may do with every job what its owner may, and add users."""

    name: str
    team: str
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to a job, at a unix time. `by`: a user, or "" for the queue itself."""

    time: float
    job: int
    by: str
    what: str


@dataclass(frozen=True, slots=True)
class Used:
    """Device-seconds of one job in one phase, of an hour (counted from 1970): under a lease, and of these at work, and
    moving weights. The rest of what was given was idle."""

    job: int
    hour: int
    phase: str
    given_s: float
    busy_s: float
    switching_s: float


class Store:
    """Belongs to one thread. Another process that opens the file while this one has it is refused."""

    def __init__(self, path: Path, *, wait_s: float = _LOCK_WAIT_S) -> None:
        """Opens the file, making it where there is none.

        Raises:
            StoreError: another service has it, it is damaged, cannot be written, or a newer version made it.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(path.with_suffix(".lock"), wait_s)
        except FileBusyError as error:
            raise StoreError(f"{path} is in use by another `rlix serve`, {error}: end that one first") from None
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error}; set RLIX_HOME to another folder") from error
        try:
            with self._in_words("open"):
                self._db = open_file(path)
        except BaseException:  # raised again: the next attempt needs the lock
            self._lock.close()
            raise

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        with self._in_words("read"):
            row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        return 1 + (int(row[0]) if row else 0)

    def add(self, job: Job, key: str | None, files: Mapping[str, bytes], change: Change) -> None:
        """A new job, with its files by their paths. `key`: see `by_key`."""
        with self._change():
            self._db.execute(
                "INSERT INTO jobs (id, state, since, key, body) VALUES (?, ?, ?, ?, ?)",
                (job.id, job.state, job.since, key, _text(job)),
            )
            self._db.executemany(
                "INSERT INTO files (job, path, content) VALUES (?, ?, ?)",
                [(job.id, path, content) for path, content in files.items()],
            )
            self._note([change])

    def put(self, jobs: Sequence[Job], changes: Sequence[Change]) -> None:
        """What these jobs are from now on, all or none, and what happened to them."""
        with self._change():
            self._db.executemany(
                "UPDATE jobs SET state = ?, since = ?, body = ? WHERE id = ?",
                [(job.state, job.since, _text(job), job.id) for job in jobs],
            )
            self._note(changes)

    def jobs(self) -> list[Job]:
        """Those that have not ended, in order."""
        with self._in_words("read"):
            rows = self._db.execute("SELECT body FROM jobs WHERE state != ? ORDER BY id", (State.ENDED,))
            return [_job(body) for (body,) in rows]

    def ended(self, most: int, *, since: float = 0.0, owner: str | None = None) -> list[Job]:
        """Those that ended last, from this unix time on, the latest first; of one owner, or all."""
        whose = "" if owner is None else f'"owner": {json.dumps(owner)}'  # so in a body, and nowhere else in it
        with self._in_words("read"):
            rows = self._db.execute(
                "SELECT body FROM jobs WHERE state = ? AND since >= ? AND instr(body, ?) "
                "ORDER BY since DESC, id DESC LIMIT ?",
                (State.ENDED, since, whose, most),
            )
            return [_job(body) for (body,) in rows]

    def job(self, id: int) -> Job | None:
        with self._in_words("read"):
            row = self._db.execute("SELECT body FROM jobs WHERE id = ?", (id,)).fetchone()
            return None if row is None else _job(row[0])

    def by_key(self, key: str) -> Job | None:
        """The job that a client has submitted under this key, which it may not know: the answer was lost."""
        with self._in_words("read"):
            row = self._db.execute("SELECT body FROM jobs WHERE key = ?", (key,)).fetchone()
            return None if row is None else _job(row[0])

    def files(self, id: int) -> dict[str, bytes]:
        with self._in_words("read"):
            return dict(self._db.execute("SELECT path, content FROM files WHERE job = ?", (id,)))

    def with_files(self, before: float) -> list[int]:
        """The jobs that ended before this unix time and whose files are here."""
        with self._in_words("read"):
            sql = "SELECT id FROM jobs WHERE state = ? AND since < ? AND id IN (SELECT job FROM files)"
            return [id for (id,) in self._db.execute(sql, (State.ENDED, before))]

    def drop_files(self, ids: Sequence[int]) -> None:
        with self._change():
            self._db.executemany("DELETE FROM files WHERE job = ?", [(id,) for id in ids])

    def changes(self, id: int) -> list[Change]:
        with self._in_words("read"):
            rows = self._db.execute("SELECT time, job, by, what FROM changes WHERE job = ? ORDER BY sequence", (id,))
            return [Change(*row) for row in rows]

    # -- accounts ----------------------------------------------------------------------------------------------------

    def account(self, used: Sequence[Used]) -> None:
        """Of each job and hour, what is known now in place of what was known."""
        with self._change():
            self._db.executemany(
                "INSERT OR REPLACE INTO usage (job, hour, phase, given_s, busy_s, switching_s) "
                "VALUES (:job, :hour, :phase, :given_s, :busy_s, :switching_s)",
                [asdict(row) for row in used],
            )

    def used(self, since: float = 0.0) -> list[Used]:
        """From the hour on in which this unix time is."""
        with self._in_words("read"):
            rows = self._db.execute(
                "SELECT job, hour, phase, given_s, busy_s, switching_s FROM usage WHERE hour >= ? ORDER BY job, hour",
                (int(since // 3600),),
            )
            return [Used(*row) for row in rows]

    def used_by_job(self, since: float) -> dict[int, tuple[float, float, float]]:
        """What each job was given, of it at work, and moving weights, from the hour on in which this unix time is."""
        with self._in_words("read"):
            rows = self._db.execute(
                "SELECT job, SUM(given_s), SUM(busy_s), SUM(switching_s) FROM usage WHERE hour >= ? GROUP BY job",
                (int(since // 3600),),
            )
            return {job: (given, busy, switching) for job, given, busy, switching in rows}

    # -- users -------------------------------------------------------------------------------------------------------

    def set_user(self, user: User, token: str) -> None:
        """A new user, or one with a new token; the old one is not taken any more."""
        row = (user.name, user.team, user.admin, digest(token))
        with self._change():
            self._db.execute("INSERT OR REPLACE INTO users (name, team, admin, digest) VALUES (?, ?, ?, ?)", row)

    def remove_user(self, name: str) -> None:
        with self._change():
            self._db.execute("DELETE FROM users WHERE name = ?", (name,))

    def users(self) -> dict[str, User]:
        """By the digest of their tokens."""
        with self._in_words("read"):
            rows = self._db.execute("SELECT digest, name, team, admin FROM users")
            return {found: User(name, team, bool(admin)) for found, name, team, admin in rows}

    # -- settings ----------------------------------------------------------------------------------------------------

    def setting(self, name: str) -> str:
        """ "" where nobody has set it."""
        with self._in_words("read"):
            row = self._db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
            return "" if row is None else str(row[0])

    def set(self, name: str, value: str) -> None:
        with self._change():
            self._db.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", (name, value))

    def hooks(self) -> dict[str, str]:
        """By owner, as it was put."""
        with self._in_words("read"):
            return dict(self._db.execute("SELECT owner, body FROM hooks"))

    def put_hook(self, owner: str, body: str | None) -> None:
        with self._change():
            self._db.execute("DELETE FROM hooks WHERE owner = ?", (owner,))
            if body is not None:
                self._db.execute("INSERT INTO hooks (owner, body) VALUES (?, ?)", (owner, body))

    # -- below -------------------------------------------------------------------------------------------------------

    def _note(self, changes: Sequence[Change]) -> None:
        self._db.executemany(
            "INSERT INTO changes (time, job, by, what) VALUES (:time, :job, :by, :what)", map(asdict, changes)
        )

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._in_words("write to"), transaction(self._db):
            yield

    @contextmanager
    def _in_words(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"cannot {verb} {self.path}: {error}") from error


def digest(token: str) -> str:
    """What is kept of a token. Tokens are random and long, so that a plain hash does."""
    return hashlib.sha256(token.encode()).hexdigest()


def open_file(path: Path) -> sqlite3.Connection:
    """Of this version, whatever version it had. Raises StoreError or sqlite3.Error."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for part in ("", "-wal", "-shm"):  # SQLite gives what it makes beside the file the file's mode
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).chmod(0o600)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")  # who was told an id finds the job again, also after a power cut
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise StoreError(f"{path} has version {version}, and this RLix knows versions up to {VERSION}")
    if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise StoreError(f"{path} is damaged ({' '.join(found.split())}); put a backup in its place")
    for number, statements in list(enumerate(_MIGRATIONS, 1))[version:]:
        with transaction(db):
            for statement in statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version={number}")
    return db


def _text(job: Job) -> str:
    return json.dumps(asdict(job))


def _job(body: str) -> Job:
    try:
        return _JOB.validate_python(json.loads(body))
    except ValidationError as error:
        raise StoreError(f"a job in the queue's file cannot be read: {error}") from error
