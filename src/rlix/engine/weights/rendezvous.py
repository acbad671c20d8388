"""Where the members of a channel meet: each says something, and learns what all have said as soon as all are there.

Plain sockets, as between the two sides, and not torch's TCPStore: that asks the name server for the name of whoever
connects, at both ends, and waits 5 s for an answer that is lost.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0  # beyond what a member wants to wait: for the answer that nobody else came
_LONGEST_BYTES = 2**20  # of what a member says


@dataclass(slots=True)
class _Meeting:
    """What members have said at it. `left`: somebody has gone again, so that it never takes place."""

    said: dict[int, Mapping[str, str]] = field(default_factory=dict)
    left: bool = False


class Rendezvous:
    """Kept by the process that asks for a channel, until it closes it; members come to `port`."""

    def __init__(self, channel: str, host: str, members: Sequence[str]) -> None:
        self._channel, self._members = channel, members
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._refused: dict[int, str] = {}
        self._changed = threading.Condition()
        self._socket = socket.create_server((host, 0), backlog=len(members))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    def refuse(self, number: int, reason: str) -> None:
        """Tell all who wait for a transfer to begin that it does not, and why; the first reason counts."""
        with self._changed:
            self._refused.setdefault(number, reason)
            self._changed.notify_all()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for members
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Until the member leaves. Who does not know the channel's name is no member."""
        methods: dict[str, Callable[..., object]] = {"meet": self._meet, "refuse": self.refuse}
        try:
            with connection, connection.makefile("rwb") as stream:
                while line := stream.readline(_LONGEST_BYTES):
                    try:
                        channel, method, *given = json.loads(line)
                    except (ValueError, TypeError):
                        return
                    if channel != self._channel:
                        return
                    stream.write(json.dumps(methods[method](*given)).encode() + b"\n")
                    stream.flush()
        except OSError as error:
            logger.debug("%s: a member has left: %s", self._channel, error)

    def _meet(self, what: str, number: int, member: int, said: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        """What all said, why the transfer is refused, or who is late."""
        with self._changed:
            for earlier in [key for key in self._meetings if key[1] < number]:
                del self._meetings[earlier]
            meeting = self._meetings.setdefault((what, number), _Meeting())
            here = meeting.said
            here[member] = said
            if len(here) == len(self._members):
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(here) == len(self._members) or number in self._refused, timeout_s)
            if len(here) == len(self._members) and not meeting.left:
                return {"said": {key: value for each in here.values() for key, value in each.items()}}
            meeting.left = True
            if number in self._refused:
                return {"refused": self._refused[number]}
            late = [name for member, name in enumerate(self._members) if member not in here]
            return {"late": late} if late else {"refused": "others had given up waiting by then"}


class Entrance:
    """A member's way to a rendezvous. Every method raises OSError when the process that keeps it has gone."""

    def __init__(self, channel: str, member: int, address: tuple[str, int], timeout_s: float) -> None:
        self._channel, self._member = channel, member
        self._connection = socket.create_connection(address, timeout_s)
        self._stream = self._connection.makefile("rwb")

    def meet(self, what: str, number: int, said: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        """Wait until all have said theirs at this meeting, for at most so long.

        Returns what all said ("said"), why transfer `number` does not begin ("refused"), or who did not come ("late").
        """
        answer: dict[str, Any] = self._ask(timeout_s, "meet", what, number, self._member, said, timeout_s)
        return answer

    def refuse(self, number: int, reason: str) -> None:
        self._ask(0.0, "refuse", number, reason)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()

    def _ask(self, wait_s: float, *asked: Any) -> Any:
        self._connection.settimeout(wait_s + _ANSWER_S)
        self._stream.write(json.dumps([self._channel, *asked]).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise ConnectionError("the process that asked for the channel has left it")
        return json.loads(line)
