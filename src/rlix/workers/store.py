"""Where the ranks of a group over several hosts meet: a store of torch's own kind that lets no stranger in.

Rank 0 keeps it, at the one address by which Ray knows its host. Torch's TCPStore listens at every address of a host,
and whoever connects may read and write. What is in it are addresses and ids, a few hundred bytes for each rank.
"""

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlix.protocol.errors import RlixError

_HELLO_S = 10.0  # longest that whoever connects may take to say the secret
_ANSWER_S = 10.0  # beyond what is waited for
_LONGEST_BYTES = 2**22
_TRY_S, _PAUSE_S = 5.0, 0.2  # to connect, between two tries


class StoreServer:
    """Keys and values, for those who know the secret. Ends with its process, or when it is closed."""

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret.encode()
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for others
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), name="store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        methods: dict[str, Callable[..., object]] = {
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "check": self._check,
        }
        with suppress(OSError, ValueError), connection, connection.makefile("rwb") as stream:
            connection.settimeout(_HELLO_S)
            if not hmac.compare_digest(stream.readline(len(self._secret) + 1).rstrip(b"\n"), self._secret):
                return
            connection.settimeout(None)
            while line := stream.readline(_LONGEST_BYTES):
                method, *given = json.loads(line)
                stream.write(json.dumps(methods[method](*given)).encode() + b"\n")
                stream.flush()

    def _set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[str] | None:
        """The values of all keys; None when they were not all there in time."""
        with self._changed:
            there = self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
            return [self._values[key] for key in keys] if there else None

    def _add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, "0")) + amount
            self._values[key] = str(total)
            self._changed.notify_all()
            return total

    def _check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


class GroupStore(dist.Store):  # type: ignore[name-defined]
    """A rank's way to the store. Threads do not wait for each other: each has a connection.

    Args:
        timeout_s: longest that what nobody has set is waited for.
        reach_s: longest that the server is.

    Raises:
        RlixError: the server cannot be reached.
    """

    def __init__(self, address: tuple[str, int], secret: str, timeout_s: float, reach_s: float) -> None:
        super().__init__()
        self._address, self._secret, self._timeout_s = address, secret, timeout_s
        self._own = threading.local()
        self._stream(reach_s)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", key, value if isinstance(value, str) else value.decode("latin-1"))

    def get(self, key: str) -> bytes:
        return self._values([key], self._timeout_s)[0].encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Also asked by threads of NCCL's, which take an error for the end of the process."""
        with suppress(dist.DistStoreError):
            return bool(self._ask("check", list(keys)))
        return False

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def _values(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        found: list[str] | None = self._ask("get", list(keys), timeout_s, wait_s=timeout_s)
        if found is None:
            raise dist.DistStoreError(f"nobody has set {', '.join(keys)} within {timeout_s:g} s")
        return found

    def _ask(self, *asked: Any, wait_s: float = 0.0) -> Any:
        try:
            stream = self._stream(_ANSWER_S)
            self._own.connection.settimeout(wait_s + _ANSWER_S)
            stream.write(json.dumps(asked).encode() + b"\n")
            stream.flush()
            if line := stream.readline():
                return json.loads(line)
        except (OSError, RlixError) as error:
            self._own.__dict__.clear()
            raise dist.DistStoreError(f"rank 0's store at {self._address[0]} does not answer: {error}") from error
        self._own.__dict__.clear()
        raise dist.DistStoreError(f"rank 0's store at {self._address[0]} is gone")

    def _stream(self, timeout_s: float) -> Any:
        if not hasattr(self._own, "stream"):
            self._own.connection = reach(self._address, timeout_s)
            self._own.stream = self._own.connection.makefile("rwb")
            self._own.stream.write(self._secret.encode() + b"\n")
        return self._own.stream


def reach(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A connection, tried for again while a network is mended.

    Raises:
        RlixError: there was none within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(address, timeout=max(min(left, _TRY_S), 0.001))
        except OSError as error:
            if time.monotonic() + _PAUSE_S > deadline:
                why = error.strerror or "no answer"
                raise RlixError(f"{address[0]} cannot be reached within {timeout_s:g} s: {why}") from None
        time.sleep(_PAUSE_S)


def check_reachable(store: dist.Store, member: int, members: int, host: str, address: str, timeout_s: float) -> None:  # type: ignore[name-defined]
    """Each host of a group is reached from each other one, or every member is told from where which one is not.

    Torch would wait for as long as a collective may take, and say nothing. All members call this; `member` counts them.

    Raises:
        RlixError: one host cannot reach another, or a member has not come within `timeout_s`; names them.
    """
    store.set(f"host/{member}", address)
    found = _texts(store, [f"host/{each}" for each in range(members)], timeout_s)
    firsts = {where: each for each, where in reversed(list(enumerate(found)))}  # of each host, one member
    reached, trying_s = [f"reached/{each}" for each in firsts.values()], 2 * len(firsts) * timeout_s
    if firsts[address] == member:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=len(firsts)) as listening:
            store.set(f"port/{member}", f"{host} {listening.getsockname()[1]}")
            store.set(f"reached/{member}", _unreached(store, host, address, firsts, timeout_s))
            _texts(store, reached, trying_s)  # others may be trying until then
    if wrong := [text for text in _texts(store, reached, trying_s) if text]:
        raise RlixError("; ".join(wrong))


def _unreached(store: dist.Store, host: str, address: str, firsts: dict[str, int], timeout_s: float) -> str:  # type: ignore[name-defined]
    """What there is to say of the hosts that this one cannot reach; "" when it reaches all."""
    wrong = []
    for where, each in firsts.items():
        if where == address:
            continue
        name, port = _texts(store, [f"port/{each}"], timeout_s)[0].split()
        try:
            reach((where, int(port)), timeout_s).close()
        except RlixError as error:
            wrong.append(f"host {host} ({address}) waits for host {name}: {error}")
    return "; ".join(wrong)


def _texts(store: dist.Store, keys: Sequence[str], timeout_s: float) -> list[str]:  # type: ignore[name-defined]
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = ", ".join(key.partition("/")[2] for key in keys if not store.check([key]))
        raise RlixError(f"of the group's members {missing} did not come within {timeout_s:g} s ({error})") from None
    return [store.get(key).decode() for key in keys]
