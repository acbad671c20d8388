"""Connections between the two sides of a channel: short messages in order, and the bytes of those that share no memory.

Plain sockets, because a wait in them ends in time and at once when the other side has gone, which torch's process
groups on the CPU do not promise of a send or a receive.
"""

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence

_HELLO_BYTES = 36
_TAG_BYTES = 8
_HELLO_S = 10.0  # longest that whoever connects may take to say who it is: members do at once


class Listener:
    """Where a source waits for the targets. `address` is what they connect to."""

    def __init__(self, channel: str, towards: tuple[str, int]) -> None:
        self._secret = _secret(channel)
        self._socket = socket.create_server((_own_address(towards), 0))
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"

    def accept(self, members: Sequence[int], deadline: float) -> "Links":
        """A connection to each of these members.

        Raises:
            TimeoutError: not all of them came by `deadline` (`time.monotonic()`).
        """
        found: dict[int, socket.socket] = {}
        with self._socket:
            while missing := set(members) - found.keys():
                self._socket.settimeout(_left(deadline))
                connection, _ = self._socket.accept()
                connection.settimeout(min(_HELLO_S, _left(deadline)))
                try:
                    hello = bytes(_received(connection, memoryview(bytearray(_HELLO_BYTES))))
                except OSError:  # a stranger, or a member whose own error says more
                    connection.close()
                    continue
                member = int.from_bytes(hello[:4], "big")
                if hello[4:] == self._secret and member in missing:
                    found[member] = connection
                else:
                    connection.close()
        return Links(found)

    def close(self) -> None:
        self._socket.close()


def connect(channel: str, member: int, addresses: Mapping[int, str], deadline: float) -> "Links":
    """A target's connections to sources.

    Raises:
        OSError: one cannot be reached.
    """
    found: dict[int, socket.socket] = {}
    for source, address in addresses.items():
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
        connection.sendall(member.to_bytes(4, "big") + _secret(channel))
        found[source] = connection
    return Links(found)


class Links:
    """One member's connections, by the member at the other end. Every method raises OSError when that one has gone."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = dict(connections)
        for connection in self._connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, peer: int, tag: int, timeout_s: float) -> None:
        self.send(peer, memoryview(tag.to_bytes(_TAG_BYTES, "big")), timeout_s)

    def hear(self, peer: int, tag: int, timeout_s: float) -> None:
        """Wait for this message, which is the next one.

        Raises:
            TimeoutError: it did not come within `timeout_s`.
        """
        found = int.from_bytes(self.receive(peer, memoryview(bytearray(_TAG_BYTES)), timeout_s), "big")
        if found != tag:
            raise ConnectionError(f"message {found} came in place of {tag}")

    def send(self, peer: int, data: memoryview, timeout_s: float) -> None:
        connection = self._connection(peer)
        connection.settimeout(timeout_s)
        connection.sendall(data)

    def receive(self, peer: int, into: memoryview, timeout_s: float) -> memoryview:
        connection = self._connection(peer)
        connection.settimeout(timeout_s)
        return _received(connection, into)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _connection(self, peer: int) -> socket.socket:
        if peer not in self._connections:
            raise ConnectionError("the channel is closed")
        return self._connections[peer]


def _received(connection: socket.socket, into: memoryview) -> memoryview:
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            raise ConnectionError("the other side has left")
        done += count
    return into


def _secret(channel: str) -> bytes:
    return hashlib.sha256(channel.encode()).digest()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _own_address(towards: tuple[str, int]) -> str:
    """Of this node's addresses the one by which it reaches the others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(towards)
        return str(probe.getsockname()[0])
