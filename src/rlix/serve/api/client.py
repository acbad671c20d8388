"""The API from the other side: what the command line, and any program, speaks."""

import contextlib
import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from pydantic import BaseModel, ValidationError

from rlix.protocol.errors import RlixError, SpecError
from rlix.serve.addresses import ADDRESS_FILE, PORT, TOKEN_FILE
from rlix.serve.api.models import JobList, JobView

_TIMEOUT_S = 30.0
_MISTAKES = (401, 403, 404, 409, 422)
T = TypeVar("T", bound=BaseModel)


class UnreachableError(RlixError):
    """Nobody answers. What was asked may have been done: ask again, with the same key."""


class Client:
    """One connection, which is made anew where it was lost. For one thread."""

    def __init__(self, url: str, token: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise SpecError(f"{url!r} is no address of a queue, such as http://127.0.0.1:{PORT}")
        if not (token.isascii() and token.isprintable()):
            raise SpecError("RLIX_TOKEN: holds what no token has; copy the line that `rlix user NAME` has printed")
        self._url, self._token = url, token
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=_context(os.environ.get("RLIX_SERVER_CA"))
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)

    def get(self, path: str, answer: type[T], **query: object) -> T:
        """Raises what `_asked` raises."""
        return self._read(answer, self._asked("GET", f"{path}?{urlencode(query)}" if query else path, None))

    def post(self, path: str, answer: type[T], body: BaseModel | None = None) -> T:
        """Raises what `_asked` raises."""
        text = b"" if body is None else body.model_dump_json().encode()
        return self._read(answer, self._asked("POST", path, text))

    def jobs(self, *, ended: bool = False, mine: bool = False) -> list[JobView]:
        query = {**({"state": "ended"} if ended else {}), **({"mine": 1} if mine else {})}
        return self.get("/v1/jobs", JobList, **query).jobs

    def job(self, id: int) -> JobView:
        return self.get(f"/v1/jobs/{id}", JobView)

    def _read(self, answer: type[T], text: bytes) -> T:
        """Raises RlixError: something else answers there, or another version."""
        try:
            return answer.model_validate_json(text)
        except ValidationError as error:
            raise RlixError(self._no_queue("200")) from error

    def _no_queue(self, status: str) -> str:
        return f"what answers at {self._url} ({status}) is no queue, or one of another version of RLix; see RLIX_SERVER"

    def close(self) -> None:
        self._connection.close()

    def _asked(self, method: str, path: str, body: bytes | None) -> bytes:
        """Raises:
        SpecError: the service refuses it; says why.
        RlixError: it cannot do it now.
        UnreachableError: it does not answer.
        """
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            found = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise UnreachableError(
                f"no queue answers at {self._url} ({error}): start one with `rlix serve`, or set RLIX_SERVER"
            ) from error
        if response.status == 200:
            return found
        text = self._no_queue(str(response.status))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(found)["error"])
        raise (SpecError if response.status in _MISTAKES else RlixError)(text)


def _context(authority: str | None) -> ssl.SSLContext:
    """Raises SpecError: the file of the authority cannot be used."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise SpecError(f"RLIX_SERVER_CA={authority}: cannot be read as certificates: {error}") from error


def connect(home: Path) -> Client:
    """To the service that RLIX_SERVER names, with the token RLIX_TOKEN; without these to that of this RLIX_HOME.

    Raises:
        SpecError: there is none, or no token for it.
    """
    url = os.environ.get("RLIX_SERVER") or _read(home / ADDRESS_FILE).get("url", "")
    if not url:
        raise SpecError(
            f"no queue is known here (RLIX_HOME is {home}): start one with `rlix serve`, or set RLIX_SERVER; "
            "`rlix status` shows jobs that run without one"
        )
    token = os.environ.get("RLIX_TOKEN", "")
    if not token:
        with contextlib.suppress(OSError):
            token = (home / TOKEN_FILE).read_text().strip()
    if not token:
        raise SpecError("no token: set RLIX_TOKEN to the one that an admin's `rlix user NAME` has printed for you")
    return Client(url, token)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
