"""`Channel`: a bounded stream of items between workers, with an explicit end.

    channel = Channel(capacity=16, name="trajectories")
    producers = [channel.producer(f"rollout:{rank}") for rank in range(4)]  # register all before any starts
    group.call("rollout", PerRank(producers))                               # each: with producer: producer.put(item)
    for item in channel: ...                                                # ends when the last producer has closed

Channels and producers can be passed to other actors. Items travel through Ray's object store: the channel's actor sees
only references. An item lives as long as the process that put it: let producers live until the stream has been
drained, or consumers get a `ChannelError`. Every method has an async twin (`aput`, `aget`, `async for`, `async with`).
"""

import asyncio
import contextlib
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Self, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError

from rlix.protocol.errors import ChannelError, WaitTimeoutError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 300.0
_REPLY_MARGIN_S = 30.0  # beyond the wait that the channel's actor bounds itself: it must have died or be unreachable


class EndOfStream(Exception):  # noqa: N818 (an outcome, not an error; as StopIteration)
    """Every producer has closed and every item has been taken."""


class _Outcome(Enum):
    DONE = "done"
    ENDED = "ended"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class _Reply:
    outcome: _Outcome
    detail: str = ""
    box: "tuple[ray.ObjectRef[Any], ...]" = ()


class Channel(Generic[T]):
    """A queue of at most `capacity` items; lives as long as somebody holds it, at most as long as its creator."""

    def __init__(self, capacity: int, *, name: str = "channel", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`timeout_s` bounds each wait of `put` and `get` that is not given its own."""
        if capacity < 1:
            raise ValueError(f"channel {name!r}: capacity must be at least 1, got {capacity}")
        self.name = name
        self._timeout_s = timeout_s
        self._actor: ActorHandle[Any] = ray.remote(_ChannelActor).options(num_cpus=0).remote(capacity)

    def producer(self, name: str | None = None) -> "Producer[T]":
        """Register a producer: the stream does not end before it closes. Register all before the first one closes."""
        reply = self._call("register", self._timeout_s, name)
        return Producer(self, reply.detail)

    def get(self, timeout_s: float | None = None) -> T:
        """Take the oldest item.

        Raises:
            EndOfStream: nothing will ever come again.
            ChannelError: somebody called `fail`, or the channel's actor died.
            WaitTimeoutError: nothing came within `timeout_s`.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        reply = self._call("get", timeout_s, uuid.uuid4().hex)
        with self._naming_lost_items():
            item: T = reply.box[0].future().result()
        return item

    async def aget(self, timeout_s: float | None = None) -> T:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        token = uuid.uuid4().hex
        taking = asyncio.ensure_future(self._acall("get", timeout_s, token))
        try:
            reply = await asyncio.shield(taking)
            with self._naming_lost_items():
                item: T = await reply.box[0]
        except asyncio.CancelledError:
            await self._give_back(token, taking)
            raise
        return item

    def fail(self, reason: str) -> None:
        """End the stream for everybody with a `ChannelError` that gives `reason`; items not yet taken are dropped."""
        self._call("fail", self._timeout_s, reason)

    def __len__(self) -> int:
        return int(self._call("size", self._timeout_s).detail)

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                yield self.get()
            except EndOfStream:
                return

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                yield await self.aget()
            except EndOfStream:
                return

    def _call(self, method: str, timeout_s: float, *args: Any) -> _Reply:
        future = getattr(self._actor, method).remote(*args, timeout_s).future()
        try:
            reply = future.result(timeout_s + _REPLY_MARGIN_S)
        except RayActorError as error:
            raise ChannelError(f"channel {self.name!r}: its actor died") from error
        except TimeoutError as error:
            raise self._unreachable(method, timeout_s) from error
        return self._check(reply)

    async def _acall(self, method: str, timeout_s: float, *args: Any) -> _Reply:
        ref = getattr(self._actor, method).remote(*args, timeout_s)
        try:
            async with asyncio.timeout(timeout_s + _REPLY_MARGIN_S):
                reply = await ref
        except RayActorError as error:
            raise ChannelError(f"channel {self.name!r}: its actor died") from error
        except TimeoutError as error:
            raise self._unreachable(method, timeout_s) from error
        return self._check(reply)

    async def _give_back(self, token: str, taking: "asyncio.Future[_Reply]") -> None:
        """An item that a cancelled get took, or is about to take, goes back to where it was."""
        with contextlib.suppress(EndOfStream, ChannelError, WaitTimeoutError):  # a cancellation stays one
            await self._acall("withdraw", _REPLY_MARGIN_S, token)
            await self._acall("untake", _REPLY_MARGIN_S, list((await taking).box))

    def _check(self, reply: _Reply) -> _Reply:
        if reply.outcome is _Outcome.ENDED:
            raise EndOfStream(f"channel {self.name!r} has ended")
        if reply.outcome is _Outcome.FAILED:
            raise ChannelError(f"channel {self.name!r}: {reply.detail}")
        if reply.outcome is _Outcome.TIMEOUT:
            raise WaitTimeoutError(f"channel {self.name!r}: {reply.detail}")
        return reply

    @contextlib.contextmanager
    def _naming_lost_items(self) -> Iterator[None]:
        try:
            yield
        except ObjectLostError as error:
            raise ChannelError(f"channel {self.name!r}: the item's producer ended before the item was taken") from error

    def _unreachable(self, method: str, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"channel {self.name!r}: its actor did not answer {method}() within {timeout_s + _REPLY_MARGIN_S:g} s"
        )


class Producer(Generic[T]):
    """One registered writer of a channel. As a context manager it closes, or on an error fails the channel."""

    def __init__(self, channel: Channel[T], name: str) -> None:
        self.channel = channel
        self.name = name

    def put(self, item: T, timeout_s: float | None = None) -> None:
        """Append `item`, waiting for room.

        Raises:
            ChannelError: this producer has closed, somebody called `fail`, or the channel's actor died.
            WaitTimeoutError: no room came within `timeout_s`.
        """
        self.channel._call("put", self._timeout(timeout_s), *self._parcel(item))

    async def aput(self, item: T, timeout_s: float | None = None) -> None:
        await self.channel._acall("put", self._timeout(timeout_s), *self._parcel(item))

    def close(self) -> None:
        """No more items from this producer. May be called again."""
        self.channel._call("close", self._timeout(None), self.name)

    async def aclose(self) -> None:
        await self.channel._acall("close", self._timeout(None), self.name)

    def fail(self, reason: str) -> None:
        """As `Channel.fail`, naming this producer."""
        self.channel.fail(f"producer {self.name!r} failed: {reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        else:
            self.fail(f"{type(error).__name__}: {error}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            await self.aclose()
        else:
            reason = f"producer {self.name!r} failed: {type(error).__name__}: {error}"
            await self.channel._acall("fail", self._timeout(None), reason)

    def _timeout(self, timeout_s: float | None) -> float:
        return self.channel._timeout_s if timeout_s is None else timeout_s

    def _parcel(self, item: T) -> tuple[str, "list[ray.ObjectRef[T]]"]:
        """The item goes to the object store; in a list, its reference is passed on as a reference."""
        return self.name, [ray.put(item)]


class _ChannelActor:
    """The queue itself. One event loop: what lies between two awaits is atomic."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[ray.ObjectRef[Any]] = deque()
        self._open: set[str] = set()
        self._registered = False
        self._names = itertools.count()
        self._failure: str | None = None
        self._waiting: set[str] = set()  # tokens of gets that may be withdrawn
        self._changed = asyncio.Condition()

    async def register(self, name: str | None, timeout_s: float) -> _Reply:
        if self._failure is not None:
            return _Reply(_Outcome.FAILED, self._failure)
        if self._registered and not self._open:
            return _Reply(_Outcome.FAILED, "cannot register a producer: the stream has ended")
        if name is None:
            name = f"producer {next(self._names)}"
        if name in self._open:
            return _Reply(_Outcome.FAILED, f"a producer named {name!r} is open already")
        self._registered = True
        self._open.add(name)
        return _Reply(_Outcome.DONE, name)

    async def put(self, producer: str, box: "list[ray.ObjectRef[Any]]", timeout_s: float) -> _Reply:
        async with self._changed:
            await self._until(
                lambda: self._failure is not None or producer not in self._open or self._has_room, timeout_s
            )
            if self._failure is not None:
                return _Reply(_Outcome.FAILED, self._failure)
            if producer not in self._open:
                return _Reply(_Outcome.FAILED, f"producer {producer!r} has closed and cannot put")
            if not self._has_room:
                detail = f"producer {producer!r} found no room within {timeout_s:g} s: {self._describe()}"
                return _Reply(_Outcome.TIMEOUT, detail)
            self._items.append(box[0])
            self._changed.notify_all()
            return _Reply(_Outcome.DONE)

    async def get(self, token: str, timeout_s: float) -> _Reply:
        self._waiting.add(token)
        async with self._changed:
            await self._until(
                lambda: bool(self._failure is not None or self._items or self._ended or token not in self._waiting),
                timeout_s,
            )
            if token not in self._waiting:
                return _Reply(_Outcome.TIMEOUT, "the get was cancelled")
            self._waiting.discard(token)
            if self._failure is not None:
                return _Reply(_Outcome.FAILED, self._failure)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return _Reply(_Outcome.DONE, box=(item,))
            if self._ended:
                return _Reply(_Outcome.ENDED)
            return _Reply(_Outcome.TIMEOUT, f"nothing came within {timeout_s:g} s: {self._describe()}")

    async def withdraw(self, token: str, timeout_s: float) -> _Reply:
        """End a get that still waits. One that does not has answered, or is about to."""
        async with self._changed:
            self._waiting.discard(token)
            self._changed.notify_all()
        return _Reply(_Outcome.DONE)

    async def untake(self, box: "list[ray.ObjectRef[Any]]", timeout_s: float) -> _Reply:
        """Put back what a cancelled get took: it was the oldest item."""
        async with self._changed:
            self._items.extendleft(box)
            self._changed.notify_all()
        return _Reply(_Outcome.DONE)

    async def close(self, producer: str, timeout_s: float) -> _Reply:
        async with self._changed:
            self._open.discard(producer)
            self._changed.notify_all()
        return _Reply(_Outcome.DONE)

    async def fail(self, reason: str, timeout_s: float) -> _Reply:
        async with self._changed:
            if self._failure is None:  # the first failure is the cause of the others
                self._failure = reason
            self._items.clear()
            self._changed.notify_all()
        return _Reply(_Outcome.DONE)

    async def size(self, timeout_s: float) -> _Reply:
        return _Reply(_Outcome.DONE, str(len(self._items)))

    @property
    def _has_room(self) -> bool:
        return len(self._items) < self._capacity

    @property
    def _ended(self) -> bool:
        return self._registered and not self._open

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait, holding the lock as conditions do, until `condition` or the timeout; the caller looks which."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(condition)

    def _describe(self) -> str:
        producers = ", ".join(sorted(self._open)) or "none"
        return f"{len(self._items)}/{self._capacity} items queued, open producers: {producers}"
