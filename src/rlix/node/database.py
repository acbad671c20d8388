"""What RLix's SQLite files have in common."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of what the block writes, or nothing if it raises. The connection is in autocommit mode.

    Raises:
        sqlite3.Error: it could not be written.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:  # raised again: whatever it was, all or nothing is written
        if db.in_transaction:  # SQLite has ended it already where the disk was full
            db.execute("ROLLBACK")
        raise
