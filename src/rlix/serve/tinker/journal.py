"""What the server knows that outlives it: sessions, models, operations, checkpoints and samplers, in an SQLite file.

An operation is written before it is acknowledged, and its result before anybody is told. After a restart whatever is
`queued` is done, once, on the state that the operations before it have made.
"""

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlix.node.database import transaction
from rlix.node.file_lock import FileBusyError, lock_file
from rlix.protocol.errors import RlixError, SpecError
from rlix.serve.tinker.answers import failure
from rlix.serve.tinker.records import (
    Checkpoint,
    Model,
    Operation,
    Sampler,
    Session,
    State,
    checkpoint_of,
    model_of,
    operation_of,
    session_of,
)

VERSION = 1
_BODILESS = "SELECT id, target, seq, kind, x'', digest, state, media, result, created, ended FROM operations"
_LOCK_WAIT_S = 5.0
_TABLES = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, owner TEXT, created REAL, ended TEXT, body TEXT);
CREATE TABLE models (id TEXT PRIMARY KEY, session TEXT, owner TEXT, base TEXT, rank INTEGER, config TEXT, created REAL,
    used REAL, applied INTEGER, saved INTEGER, folder TEXT, unloaded TEXT, metadata TEXT);
CREATE TABLE operations (id TEXT PRIMARY KEY, target TEXT, seq INTEGER, kind TEXT, body BLOB, digest TEXT, state TEXT,
    media TEXT, result BLOB, created REAL, ended REAL, UNIQUE (target, seq));
CREATE INDEX open_operations ON operations (target, state, seq);
CREATE TABLE checkpoints (path TEXT PRIMARY KEY, model TEXT, owner TEXT, kind TEXT, folder TEXT, created REAL,
    expires REAL, bytes INTEGER, about TEXT);
CREATE TABLE samplers (id TEXT PRIMARY KEY, session TEXT, owner TEXT, base TEXT, path TEXT, model TEXT, folder TEXT,
    clones INTEGER);
"""


class OutOfOrderError(RlixError):
    """A sequence number was used before, for something else."""


class Journal:
    """For any thread. Each change is a transaction that is on the disk when the method returns.

    Args:
        now: gives unix seconds.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Raises RlixError: another server writes there, or it is another version's."""
        self._now, self._lock, self._reading = now, threading.RLock(), threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = lock_file(path.with_suffix(".lock"), _LOCK_WAIT_S)
        except FileBusyError as error:
            raise RlixError(
                f"another server uses {path}, {error}: stop it, or set RLIX_HOME to another folder"
            ) from None
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")  # what was acknowledged outlives the machine's power, too
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")
        elif version != VERSION:
            raise RlixError(f"{path} was written by another version of RLix ({version}): move it away")
        self._db.execute("CREATE INDEX IF NOT EXISTS held ON operations (target) WHERE body != x''")
        # Who reads does not wait until what others have changed is on the disk.
        self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def close(self) -> None:
        with self._lock, self._reading:
            self._reader.close()
            self._db.close()
            self._file.close()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _in_words(), transaction(self._db):
            yield self._db

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with self._reading, _in_words():
            return self._reader.execute(sql, values).fetchall()

    # ---- sessions --------------------------------------------------------------------------------------------

    def add_session(self, session: Session) -> None:
        with self._change() as db:
            values = (session.id, session.owner, session.created, session.ended, json.dumps(session.body))
            db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", values)

    def session(self, id: str) -> Session | None:
        rows = self._rows("SELECT * FROM sessions WHERE id = ?", id)
        return session_of(rows[0]) if rows else None

    def sessions(self, owner: str | None = None, *, alive: bool = False) -> list[Session]:
        """The newest first."""
        rows = self._rows("SELECT * FROM sessions ORDER BY created DESC, id")
        found = [session_of(row) for row in rows]
        return [each for each in found if owner in (None, each.owner) and not (alive and each.ended)]

    def end_session(self, id: str, why: str) -> None:
        """Nothing can be asked of its models any more; what they waited with is dropped, what they saved stays."""
        with self._change() as db:
            db.execute("UPDATE sessions SET ended = ? WHERE id = ? AND ended = ''", (why, id))
            db.execute("UPDATE models SET unloaded = ? WHERE session = ? AND unloaded = ''", (why, id))
            self._drop_queued(db, why, "SELECT id FROM models WHERE session = ?", id)
            self._drop_queued(db, why, "SELECT id FROM samplers WHERE session = ?", id)
            db.execute(
                "UPDATE operations SET body = x'' WHERE target IN (SELECT id FROM models WHERE session = ?)", (id,)
            )

    def note_session(self, id: str, body: Mapping[str, Any]) -> None:
        with self._change() as db:
            db.execute("UPDATE sessions SET body = ? WHERE id = ?", (json.dumps(body), id))

    # ---- models and what is asked of them --------------------------------------------------------------------

    def add_model(self, model: Model, first: Operation) -> None:
        """With the operation that makes it."""
        with self._change() as db:
            db.execute(
                "INSERT INTO models VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(model.id, model.session, model.owner, model.base, model.rank, json.dumps(model.config)),
                    *(model.created, model.used, model.applied, model.saved, model.folder, model.unloaded),
                    json.dumps(model.metadata),
                ),
            )
            self._insert(db, first)

    def unload(self, id: str, why: str) -> None:
        """Nothing can be asked of a model any more."""
        with self._change() as db:
            db.execute("UPDATE models SET unloaded = ? WHERE id = ? AND unloaded = ''", (why, id))
            self._drop_queued(db, why, "?", id)
            db.execute("UPDATE operations SET body = x'' WHERE target = ?", (id,))

    def _drop_queued(self, db: sqlite3.Connection, why: str, targets: str, value: str) -> None:
        """Whoever waits for what nobody will do is told."""
        sql = "UPDATE operations SET state = ?, media = ?, result = ?, ended = ? WHERE state = ? AND target IN"
        db.execute(f"{sql} ({targets})", (State.FAILED, *failure(why, "user"), self._now(), State.QUEUED, value))

    def model(self, id: str) -> Model | None:
        rows = self._rows("SELECT * FROM models WHERE id = ?", id)
        return model_of(rows[0]) if rows else None

    def models(self, owner: str | None = None, session: str | None = None) -> list[Model]:
        """The newest first."""
        found = [model_of(row) for row in self._rows("SELECT * FROM models ORDER BY created DESC, id")]
        return [each for each in found if owner in (None, each.owner) and session in (None, each.session)]

    def ask(self, operation: Operation) -> Operation:
        """Write an operation down, if it is not there: asked twice, it is one.

        Raises OutOfOrderError: something else was asked under this number. SpecError: its model was unloaded meanwhile.
        """
        with self._change() as db:
            sql = "SELECT * FROM operations WHERE target = ? AND seq = ?"
            rows = db.execute(sql, (operation.target, operation.seq)).fetchall()
            if rows:
                found = operation_of(rows[0])
                if found.kind != operation.kind or rows[0][5] != _digest(operation.body):
                    raise OutOfOrderError(
                        f"request {operation.seq} of {operation.target} was a {found.kind} and cannot be another "
                        f"{operation.kind}: each request has a number of its own"
                    )
                return found
            unloaded = db.execute("SELECT unloaded FROM models WHERE id = ?", (operation.target,)).fetchone()
            if unloaded and unloaded[0]:
                raise SpecError(f"model {operation.target} cannot be trained any more: {unloaded[0]}")
            self._insert(db, operation)
            db.execute("UPDATE models SET used = ? WHERE id = ?", (self._now(), operation.target))
        return operation

    def _insert(self, db: sqlite3.Connection, operation: Operation) -> None:
        db.execute(
            "INSERT INTO operations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(operation.id, operation.target, operation.seq, operation.kind, operation.body),
                *(_digest(operation.body), operation.state, operation.media, operation.result, self._now(), None),
            ),
        )

    def operation(self, id: str) -> Operation | None:
        rows = self._rows("SELECT * FROM operations WHERE id = ?", id)
        return operation_of(rows[0]) if rows else None

    def outcome(self, id: str) -> Operation | None:
        """An operation with what came of it, and without its body, which may be large."""
        rows = self._rows(f"{_BODILESS} WHERE id = ?", id)
        return operation_of(rows[0]) if rows else None

    def waiting(self) -> set[str]:
        """The models and samplers of which something was asked that is not through."""
        return {target for (target,) in self._rows("SELECT DISTINCT target FROM operations WHERE state = 'queued'")}

    def queued(self, target: str) -> list[Operation]:
        """In order."""
        sql = "SELECT * FROM operations WHERE target = ? AND state = 'queued' ORDER BY seq"
        return [operation_of(row) for row in self._rows(sql, target)]

    def first_queued(self, target: str) -> Operation | None:
        """Without its body."""
        rows = self._rows(f"{_BODILESS} WHERE target = ? AND state = 'queued' ORDER BY seq LIMIT 1", target)
        return operation_of(rows[0]) if rows else None

    def held(self, owner: str) -> tuple[int, bool]:
        """Bytes of a user's requests that may have to be done, again perhaps; whether any has yet to be done at all."""
        sql = (
            "SELECT coalesce(sum(length(body)), 0), coalesce(max(state = 'queued'), 0) FROM operations "
            "LEFT JOIN models ON models.id = target LEFT JOIN samplers ON samplers.id = target "
            "WHERE body != x'' AND coalesce(models.owner, samplers.owner) = ?"
        )
        ((size, open_),) = self._rows(sql, owner)
        return int(size), bool(open_)

    def again(self, model: Model) -> list[Operation]:
        """What was done to a model since its state was saved, in order."""
        sql = "SELECT * FROM operations WHERE target = ? AND seq > ? AND seq <= ? AND state = 'done' ORDER BY seq"
        return [operation_of(row) for row in self._rows(sql, model.id, model.saved, model.applied)]

    def finish(self, id: str, state: State, media: str, result: bytes) -> None:
        """Note what came of an operation, before anybody is told."""
        with self._change() as db:
            values = (state, media, result, self._now(), id)
            changed = db.execute(
                "UPDATE operations SET state = ?, media = ?, result = ?, ended = ?, "
                "body = iif(kind = 'sample', x'', body) WHERE id = ? AND state = 'queued'",  # no other is done again
                values,
            ).rowcount
            if changed:  # else its session has ended meanwhile, which is what its client was told
                db.execute(
                    "UPDATE models SET applied = (SELECT seq FROM operations WHERE id = ?) WHERE id = "
                    "(SELECT target FROM operations WHERE id = ?)",
                    (id, id),
                )

    def saved(self, model: str, seq: int, folder: Path) -> None:
        """`folder` holds the model's state after operation `seq`: none before it is needed again."""
        with self._change() as db:
            db.execute("UPDATE models SET saved = ?, folder = ? WHERE id = ?", (seq, str(folder), model))
            db.execute("UPDATE operations SET body = x'' WHERE target = ? AND seq <= ?", (model, seq))

    def drop_results(self, before: float) -> int:
        """Forget what came of operations that ended before a time."""
        with self._change() as db:
            sql = "DELETE FROM operations WHERE ended < ? AND target NOT IN (SELECT id FROM models WHERE unloaded = '')"
            gone = db.execute(sql, (before,)).rowcount
            db.execute("UPDATE operations SET result = x'', media = '' WHERE ended < ? AND media != ''", (before,))
        return gone

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Samplers of its path find its weights here."""
        with self._change() as db:
            values = (
                *(checkpoint.path, checkpoint.model, checkpoint.owner, checkpoint.kind, checkpoint.folder),
                *(checkpoint.created, checkpoint.expires, checkpoint.bytes, json.dumps(checkpoint.about)),
            )
            db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            db.execute("UPDATE samplers SET folder = ? WHERE path = ?", (checkpoint.folder, checkpoint.path))

    def checkpoint(self, path: str) -> Checkpoint | None:
        rows = self._rows("SELECT * FROM checkpoints WHERE path = ?", path)
        return checkpoint_of(rows[0]) if rows else None

    def checkpoints(self, owner: str | None = None, model: str | None = None) -> list[Checkpoint]:
        """The newest first."""
        found = [checkpoint_of(row) for row in self._rows("SELECT * FROM checkpoints ORDER BY created DESC, path")]
        return [each for each in found if owner in (None, each.owner) and model in (None, each.model)]

    def drop_checkpoint(self, path: str) -> None:
        with self._change() as db:
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    # ---- samplers --------------------------------------------------------------------------------------------

    def put_sampler(self, sampler: Sampler) -> None:
        with self._change() as db:
            values = (
                *(sampler.id, sampler.session, sampler.owner, sampler.base, sampler.path, sampler.model),
                *(sampler.folder, sampler.id),
            )
            clones = "coalesce((SELECT clones FROM samplers WHERE id = ?), 0)"  # asked again, it has as many
            db.execute(f"INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?, ?, ?, {clones})", values)

    def follow(self, model: str, folder: str) -> None:
        """Have those that follow a model's newest weights find them here."""
        with self._change() as db:
            db.execute("UPDATE samplers SET folder = ? WHERE model = ?", (folder, model))

    def sampler(self, id: str) -> Sampler | None:
        rows = self._rows("SELECT * FROM samplers WHERE id = ?", id)
        return Sampler(*rows[0]) if rows else None

    def samplers(self, session: str | None = None) -> list[Sampler]:
        found = [Sampler(*row) for row in self._rows("SELECT * FROM samplers ORDER BY id")]
        return [each for each in found if session in (None, each.session)]

    def clone(self, id: str) -> int:
        """A number that no other copy of the sampler has; the first is 1."""
        with self._change() as db:
            db.execute("UPDATE samplers SET clones = clones + 1 WHERE id = ?", (id,))
            (count,) = db.execute("SELECT clones FROM samplers WHERE id = ?", (id,)).fetchone()
        return int(count)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RlixError(f"the server's journal cannot be used: {error}") from error


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
