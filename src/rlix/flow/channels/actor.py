"""The process that a channel lives in: its state machine, who waits for it, and what becomes of dead users."""

import asyncio
import atexit
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import ray

from rlix.flow.channels.codec import Parcel
from rlix.flow.channels.state import ChannelState, Item, Rule, Want
from rlix.flow.scratch import Scratch, shared_memory
from rlix.node import process
from rlix.protocol.errors import ChannelError
from rlix.protocol.messages import Process

_GIVEN_UP = 256  # how many are remembered: a `take` that comes after its end is a moment late
_LOOK_S = 0.5  # how often those who wait look whether somebody has died


class Outcome(Enum):
    DONE = "done"
    ENDED = "ended"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Reply:
    outcome: Outcome
    detail: str = ""
    value: Any = None


class ChannelActor:
    """One event loop: what lies between two awaits is atomic. Payloads are files of shared memory, or small.

    Ray makes a call again when the connection was lost on the way: each may come twice, and is carried out once.
    """

    def __init__(self, capacity: int, capacity_bytes: int | None, groups: Sequence[str], rule: Rule) -> None:
        self._state = ChannelState(capacity, capacity_bytes, groups, rule)
        self._scratch = Scratch("channel", shared_memory())
        atexit.register(self._scratch.cleanup)  # with what nobody took; of a process that is killed, the next sweep's
        self._node = ray.get_runtime_context().get_node_id()
        self._parcels: dict[int, Parcel] = {}
        self._producers: dict[str, Process] = {}
        self._consumers: dict[str, Process] = {}
        self._takes: dict[str, asyncio.Task[Reply]] = {}  # by consumer, until what it has is acknowledged or given back
        self._withdrawn: set[str] = set()  # consumers that wait
        self._given_up: deque[str] = deque(maxlen=_GIVEN_UP)  # consumers whose request may come later
        self._names = itertools.count()
        self._registered: dict[str, Reply] = {}  # by call
        self._changed = asyncio.Condition()

    async def home(self) -> Reply:
        """The node, and the folder for payloads that are written there."""
        return Reply(Outcome.DONE, value=(self._node, self._scratch.name))

    async def register(self, call: str, name: str | None, user: Process) -> Reply:
        def register() -> Reply:
            if call not in self._registered:
                self._registered[call] = self._now(
                    lambda: self._register(name or f"producer {next(self._names)}", user)
                )
            return self._registered[call]

        known: Reply = (await self._change(register)).value
        return known

    async def adopt(self, name: str, user: Process) -> Reply:
        """A producer goes on in this process; one that was lost with its own is open again."""

        def adopt() -> int:
            self._look()
            sequence = self._state.adopt(name)
            self._producers[name] = user
            return sequence

        return await self._change(adopt)

    async def put(
        self, producer: str, sequence: int, key: str, weight: float, parcel: Parcel, timeout_s: float
    ) -> Reply:
        def decided() -> bool:
            """Whether it needs no room: it is in already, or is refused."""
            if self._state.failure is not None or producer not in self._state.producers:
                return True
            return self._state.accepted(producer, sequence)

        async with self._changed:
            await self._until(lambda: decided() or self._state.has_room(parcel.nbytes), timeout_s)
            if not decided() and not self._state.has_room(parcel.nbytes):
                detail = f"producer {producer!r} found no room within {timeout_s:g} s: {self._state.describe()}"
                return Reply(Outcome.TIMEOUT, detail)
            return self._now(lambda: self._accept(producer, sequence, key, weight, parcel))

    async def withdraw(self, producer: str, sequence: int) -> Reply:
        """The number of a put whose answer nobody knows is used up; says whether the item is in."""
        return await self._change(lambda: self._state.withdraw(producer, sequence))

    async def take(self, consumer: str, user: Process, group: str, want: Want, timeout_s: float) -> Reply:
        if consumer in self._given_up:
            return Reply(Outcome.TIMEOUT, f"{consumer} has given up")
        if consumer not in self._takes:
            self._takes[consumer] = asyncio.create_task(self._take(consumer, user, group, want, timeout_s))
        return await asyncio.shield(self._takes[consumer])

    async def _take(self, consumer: str, user: Process, group: str, want: Want, timeout_s: float) -> Reply:
        found: list[Item] = []
        self._consumers[consumer] = user

        def look() -> bool:
            if consumer in self._withdrawn:
                return True
            found.extend(self._state.take(consumer, want, group))
            return bool(found) or self._state.ended(group)

        async with self._changed:
            try:
                await self._until(look, timeout_s)
                if found:
                    near = user.node_id == self._node
                    return Reply(Outcome.DONE, value=[(item, self._sent(item, near)) for item in found])
                if self._state.ended(group):
                    return Reply(Outcome.ENDED)
            except ChannelError as error:
                return Reply(Outcome.FAILED, str(error))
            finally:
                self._withdrawn.discard(consumer)
                if not found:
                    self._forget(consumer)
            return Reply(Outcome.TIMEOUT, f"nothing came within {timeout_s:g} s: {self._state.describe(group)}")

    async def acknowledge(self, consumer: str, ids: list[int], group: str) -> Reply:
        def acknowledge() -> None:
            self._drop(self._state.acknowledge(consumer, ids, group))
            self._forget(consumer)

        return await self._change(acknowledge)

    async def give_back(self, consumer: str) -> Reply:
        """What it has goes back; if it waits, or Ray begins its `take` after this, it gets nothing any more."""
        self._given_up.append(consumer)
        if self._waits(consumer):
            self._withdrawn.add(consumer)
        return await self._change(lambda: self._give_back(consumer))

    async def close(self, producer: str) -> Reply:
        return await self._change(lambda: self._state.close(producer))

    async def fail(self, reason: str) -> Reply:
        return await self._change(lambda: self._drop(self._state.fail(reason)))

    async def size(self) -> Reply:
        return Reply(Outcome.DONE, value=len(self._state.items))

    def _give_back(self, consumer: str) -> None:
        self._state.give_back(consumer)
        if not self._waits(consumer):
            self._forget(consumer)

    def _waits(self, consumer: str) -> bool:
        return consumer in self._takes and not self._takes[consumer].done()

    def _forget(self, consumer: str) -> None:
        self._consumers.pop(consumer, None)
        self._takes.pop(consumer, None)

    def _register(self, name: str, user: Process) -> tuple[str, int]:
        sequence = self._state.register(name)
        self._producers[name] = user
        return name, sequence

    def _accept(self, producer: str, sequence: int, key: str, weight: float, parcel: Parcel) -> None:
        item = self._state.put(producer, sequence, key, weight, parcel.nbytes)
        if item is not None:
            self._parcels[item.id] = parcel
            self._changed.notify_all()

    def _sent(self, item: Item, near: bool) -> Parcel:
        """What a consumer is given: on another node the file is not there, so its bytes go along."""
        parcel = self._parcels[item.id]
        return parcel if near or not parcel.path else replace(parcel, data=Path(parcel.path).read_bytes(), path="")

    def _drop(self, items: Sequence[Item]) -> None:
        for item in items:
            if path := self._parcels.pop(item.id).path:
                with contextlib.suppress(FileNotFoundError):
                    Path(path).unlink()

    def _look(self) -> None:
        """Whoever of this node has died has let go of what it had."""
        for name in self._state.producers:
            if self._gone(self._producers[name]):
                self._state.lose_producer(name)
        for consumer in self._state.consumers():
            if self._gone(self._consumers[consumer]):
                self._give_back(consumer)

    def _gone(self, user: Process) -> bool:
        return user.node_id == self._node and not process.alive(user)

    async def _change(self, change: Callable[[], object]) -> Reply:
        async with self._changed:
            reply = self._now(change)
            self._changed.notify_all()
            return reply

    def _now(self, change: Callable[[], object]) -> Reply:
        try:
            return Reply(Outcome.DONE, value=change())
        except ChannelError as error:
            return Reply(Outcome.FAILED, str(error))

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait, holding the lock as conditions do, until `condition` or the timeout; the caller looks which."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition() and (left := deadline - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await self._changed.wait()
            self._look()
