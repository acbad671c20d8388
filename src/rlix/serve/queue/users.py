"""Who may speak to the queue: users and their tokens, of which only digests are kept."""

import getpass
import os
import secrets
from pathlib import Path

from rlix.scheduler.queue.jobs import QueueError
from rlix.serve.addresses import TOKEN_FILE
from rlix.serve.queue.store import Store, User, digest

DEFAULT_TEAM = "default"
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
        """A new user, or one anew; the token, which nobody can ask for later.

        Raises:
            QueueError: it is the last admin, and would be none.
        """
        if not user.admin:
            self._check_admins(user.name)
        token = f"rlix_{secrets.token_urlsafe(24)}"
        self._store.set_user(user, token)
        self._by_digest = self._store.users()
        return token

    def all(self) -> list[User]:
        return sorted(self._by_digest.values(), key=lambda user: user.name)

    def remove(self, name: str) -> None:
        """The token is not taken any more; jobs stay, and go on.

        Raises:
            QueueError: it is the last admin.
        """
        self._check_admins(name)
        self._store.remove_user(name)
        self._by_digest = self._store.users()

    def _check_admins(self, name: str) -> None:
        if [user.name for user in self._by_digest.values() if user.admin] == [name]:
            raise QueueError(f"{name} is the last admin: make somebody else one first (`rlix user NAME --admin`)")

    def first(self, home: Path) -> None:
        """Whoever runs the service is an admin, and finds a token in `home`."""
        path = home / TOKEN_FILE
        if path.exists() and self.of(f"{_SCHEME}{path.read_text().strip()}") is not None:
            return
        path.unlink(missing_ok=True)
        token = self.add(User(getpass.getuser(), DEFAULT_TEAM, admin=True))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
