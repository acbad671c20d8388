"""Who may speak to the queue: users and their tokens, of which only digests are kept."""

import getpass
import os
import secrets
from pathlib import Path

from rlix.serve.queue.store import Store, User, digest

TOKEN_FILE = "queue.token"
"""In RLIX_HOME: the token of the user who runs the service; only that user can read it."""
_SCHEME = "bearer "


class Users:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_digest = store.users()

    def of(self, authorization: str) -> User | None:
        """Whose token a request carries; None: nobody's."""
        if not authorization.lower().startswith(_SCHEME):
            return None
        return self._by_digest.get(digest(authorization[len(_SCHEME) :].strip()))

    def add(self, user: User) -> str:
        """A new user, or one anew; the token, which nobody can ask for later."""
        token = f"rlix_{secrets.token_urlsafe(24)}"
        self._store.set_user(user, token)
        self._by_digest = self._store.users()
        return token

    def first(self, home: Path) -> None:
        """Whoever runs the service is an admin, and finds a token in `home`."""
        path = home / TOKEN_FILE
        if path.exists() and self.of(f"{_SCHEME}{path.read_text().strip()}") is not None:
            return
        path.unlink(missing_ok=True)
        token = self.add(User(getpass.getuser(), "default", admin=True))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
