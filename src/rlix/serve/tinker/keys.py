"""Who asks: keys of users, and the short-lived tokens and signed addresses that are made of them."""

import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlix.serve.tinker.settings import KEY_PREFIX

_TOKEN_S = 3600
_LINK_S = 3600
DEFAULT_USER = "default"


class Keys:
    """Args:
    secret: signs what is given out. now: gives unix seconds.
    """

    def __init__(self, users: Mapping[str, str], secret: bytes, *, now: Callable[[], float] = time.time) -> None:
        self._users, self._secret, self._now = dict(users), secret, now

    def user_of(self, given: str) -> str | None:
        """Whose key or token it is; None: nobody's."""
        if given.startswith(KEY_PREFIX):
            found = [user for user, key in self._users.items() if hmac.compare_digest(key.encode(), given.encode())]
            return found[0] if found else None
        head, _, signature = given.rpartition(".")
        if not head or not hmac.compare_digest(_text(self._sign(head)).encode(), signature.encode()):
            return None
        try:
            claims = json.loads(_bytes(head.partition(".")[2]))
        except ValueError:
            return None
        user = str(claims["sub"])
        return user if claims["exp"] > self._now() and user in self._users else None

    def token(self, user: str) -> str:
        """A JSON web token (RFC 7519, HS256) that stands for the user's key for an hour."""
        now = int(self._now())
        claims = {"sub": user, "org_id": "rlix", "iat": now, "exp": now + _TOKEN_S}
        head = ".".join(_text(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
        return f"{head}.{_text(self._sign(head))}"

    def link(self, path: str) -> tuple[str, int]:
        """What makes an address good without a key, and until when in unix seconds."""
        until = int(self._now()) + _LINK_S
        return f"until={until}&signature={_text(self._sign(f'{path} {until}'))}", until

    def is_linked(self, path: str, until: str, signature: str) -> bool:
        right = hmac.compare_digest(_text(self._sign(f"{path} {until}")).encode(), signature.encode())
        return right and until.isdigit() and int(until) > self._now()

    def _sign(self, text: str) -> bytes:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).digest()


def kept(path: Path, make: Callable[[], str]) -> str:
    """What is in a file that only this user reads; it is made the first time."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(make())
    except FileExistsError:
        pass
    return path.read_text().strip()


def new_key() -> str:
    return f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
