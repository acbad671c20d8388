"""`Channel`: a bounded stream of items between workers, with an explicit end.

    channel = Channel(capacity=16, name="trajectories")
    producers = [channel.producer(f"rollout:{rank}") for rank in range(4)]  # register all before any closes
    group.call("rollout", PerRank(producers))                               # each: with producer: producer.put(item)
    for item in channel: ...                                                # ends when the last producer has closed

Channels and producers can be passed to other actors. The channel's process holds cards and credits; payloads lie in
shared memory that producers write and consumers map, so an item that `put` accepted outlives its producer. From and to
other nodes they travel as messages. Users of the channel's node that die are noticed within a second: what they
took and had not acknowledged goes to others; the stream of a dead producer is an error once what it had put is taken.
Every method has an async twin (`aput`, `aget`, `async for`, `async with`).
"""

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from rlix.flow.channels.actor import ChannelActor, Outcome, Reply
from rlix.flow.channels.codec import Parcel, pack, unpack
from rlix.flow.channels.state import ChannelState, Item, Rule, Want, check_card, oldest_first
from rlix.node.process import this_process
from rlix.protocol.errors import ChannelError, SpecError, WaitTimeoutError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 300.0
_REPLY_MARGIN_S = 30.0  # beyond the wait that the channel's actor bounds itself: it must have died or be unreachable


class EndOfStream(Exception):  # noqa: N818 (an outcome, not an error; as StopIteration)
    """Every producer has closed and every item has been taken and acknowledged."""


class _NoAnswerError(WaitTimeoutError):
    """Nobody knows what the channel's actor has done, or will do."""


class Channel(Generic[T]):
    """A queue of at most `capacity` items; lives as long as somebody holds it, at most as long as its creator.

    Args:
        capacity, capacity_bytes: items, and bytes of them, that producers may be ahead of the slowest group.
        groups: of consumers; each item goes to one consumer of each group.
        rule: chooses what a consumer gets, in place of the oldest first.
        timeout_s: bounds each wait of `put` and `get` that is not given its own.
    """

    def __init__(
        self,
        capacity: int,
        *,
        capacity_bytes: int | None = None,
        groups: Sequence[str] = ("",),
        rule: Rule = oldest_first,
        name: str = "channel",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if isinstance(groups, str) or not isinstance(groups, Sequence):
            raise SpecError(f"channel {name!r}: groups={groups!r} is not a list of names: write groups=({groups!r},)")
        ChannelState(capacity, capacity_bytes, tuple(groups), rule)  # what makes no sense is said here, not by an actor
        self.name = name
        self._timeout_s = timeout_s
        self._home: tuple[str, str] | None = None
        # A lost connection is no death: Ray then makes the call again, as long as it counts the actor.
        actor = ray.remote(ChannelActor).options(num_cpus=0, max_task_retries=-1)
        self._actor: ActorHandle[Any] = actor.remote(capacity, capacity_bytes, tuple(groups), rule)

    def producer(self, name: str | None = None) -> "Producer[T]":
        """Register a producer: the stream does not end before it closes. It may join late, but not after the end."""
        registered, _ = self._call("register", uuid.uuid4().hex, name, _me())
        return Producer(self, registered)

    def get(self, timeout_s: float | None = None, *, group: str = "", key: str | None = None) -> T:
        """Take an item, the oldest (of this key), and acknowledge it.

        Raises:
            EndOfStream: nothing will ever come again.
            ChannelError: somebody called `fail`, a producer was lost, or the channel's actor died.
            WaitTimeoutError: nothing came within `timeout_s`.
        """
        with self.take(Want(key=key), group=group, timeout_s=timeout_s) as (item,):
            return item

    @contextlib.contextmanager
    def take(self, want: Want | None = None, *, group: str = "", timeout_s: float | None = None) -> Iterator[list[T]]:
        """Items for a block, acknowledged at its end. If it raises, or its process dies, others get them.

        Raises what `get` raises. At least one item; fewer than wanted when no more are there.
        """
        if want is not None and not isinstance(want, Want):
            raise SpecError(f"channel {self.name!r}: take() takes a `Want`, such as Want(count=3), not {want!r}")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        consumer = _consumer()
        arguments = consumer, _me(), group, want or Want(), timeout_s
        try:
            taken: list[tuple[Item, Parcel]] = self._call("take", *arguments, wait_s=timeout_s)
            yield [self._unpack(parcel) for _, parcel in taken]
            self._call("acknowledge", consumer, [item.id for item, _ in taken], group)
        except BaseException:  # raised again; what comes for this consumer after all goes to others
            self._actor.give_back.remote(consumer)
            raise

    async def aget(self, timeout_s: float | None = None, *, group: str = "", key: str | None = None) -> T:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        consumer = _consumer()
        arguments = consumer, _me(), group, Want(key=key), timeout_s
        try:
            ((item, parcel),) = await self._acall("take", *arguments, wait_s=timeout_s)
            value: T = self._unpack(parcel)
        except BaseException as error:  # raised again, as above
            given_back = self._actor.give_back.remote(consumer)
            if isinstance(error, asyncio.CancelledError):  # then the item is there for others already
                with contextlib.suppress(ChannelError, WaitTimeoutError):
                    await self._answer("give_back", given_back)
            raise
        # Not awaited: who is cancelled here would lose an item that is acknowledged.
        self._actor.acknowledge.remote(consumer, [item.id], group)
        return value

    def fail(self, reason: str) -> None:
        """End the stream for everybody with a `ChannelError` that gives `reason`; items not yet taken are dropped."""
        self._call("fail", reason)

    def __len__(self) -> int:
        """Items that are not yet acknowledged by every group."""
        return int(self._call("size"))

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

    def _pack(self, item: T) -> Parcel:
        if self._home is None:
            self._home = self._call("home")
        node, folder = self._home
        near = node == ray.get_runtime_context().get_node_id()
        return pack(item, Path(folder) if near else None, uuid.uuid4().hex)

    def _unpack(self, parcel: Parcel) -> T:
        try:
            value: T = unpack(parcel)
        except FileNotFoundError as error:
            raise ChannelError(
                f"channel {self.name!r}: an item's memory is not on this node, or went with the channel"
            ) from error
        return value

    def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        future = getattr(self._actor, method).remote(*args).future()
        try:
            reply = future.result(wait_s + _REPLY_MARGIN_S)
        except RayActorError as error:
            raise self._lost(method, error) from error
        except TimeoutError as error:
            raise self._unreachable(method, wait_s) from error
        return self._check(reply)

    async def _acall(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        return await self._answer(method, getattr(self._actor, method).remote(*args), wait_s)

    async def _answer(self, method: str, ref: "ray.ObjectRef[Any]", wait_s: float = 0.0) -> Any:
        try:
            async with asyncio.timeout(wait_s + _REPLY_MARGIN_S):
                reply = await asyncio.wrap_future(ref.future())
        except RayActorError as error:
            raise self._lost(method, error) from error
        except TimeoutError as error:
            raise self._unreachable(method, wait_s) from error
        return self._check(reply)

    def _check(self, reply: Reply) -> Any:
        if reply.outcome is Outcome.ENDED:
            raise EndOfStream(f"channel {self.name!r} has ended")
        if reply.outcome is Outcome.FAILED:
            raise ChannelError(f"channel {self.name!r}: {reply.detail}")
        if reply.outcome is Outcome.TIMEOUT:
            raise WaitTimeoutError(f"channel {self.name!r}: {reply.detail}")
        return reply.value

    def _lost(self, method: str, error: RayActorError) -> ChannelError | WaitTimeoutError:
        if isinstance(error, ActorUnavailableError):
            return _NoAnswerError(f"channel {self.name!r}: its actor could not be reached for {method}()")
        return ChannelError(f"channel {self.name!r}: its actor died")

    def _unreachable(self, method: str, wait_s: float) -> "_NoAnswerError":
        return _NoAnswerError(
            f"channel {self.name!r}: its actor did not answer {method}() within {wait_s + _REPLY_MARGIN_S:g} s"
        )


class Producer(Generic[T]):
    """One registered writer of a channel, used by one thread of one process at a time.

    As a context manager it closes, or on an error fails the channel. Sent to another process, it goes on there.
    """

    def __init__(self, channel: Channel[T], name: str) -> None:
        self.channel = channel
        self.name = name
        self._pid = -1
        self._sequence = 0
        self._unknown: Parcel | None = None  # of the put with this number: whether it is in

    def put(self, item: T, timeout_s: float | None = None, *, key: str = "", weight: float = 1.0) -> None:
        """Append `item`, waiting for room.

        Raises:
            SpecError: the key is no text, or the weight no number.
            ChannelError: this producer has closed, somebody called `fail`, or the channel's actor died.
            WaitTimeoutError: no room came within `timeout_s`.
        """
        check_card(key, weight)
        if self._pid != os.getpid():
            self._sequence, self._pid = self.channel._call("adopt", self.name, _me()), os.getpid()
        self._settle()
        timeout_s, parcel = self._timeout(timeout_s), self.channel._pack(item)
        arguments = self.name, self._sequence, key, weight, parcel, timeout_s
        try:
            self.channel._call("put", *arguments, wait_s=timeout_s)
        except BaseException as error:  # raised again
            if self._unsure(parcel, error):
                with contextlib.suppress(ChannelError, WaitTimeoutError):  # or the next put settles it
                    self._settle()
            raise
        self._sequence += 1

    async def aput(self, item: T, timeout_s: float | None = None, *, key: str = "", weight: float = 1.0) -> None:
        """`put` for async code. Cancelled, it may have gone in or not, and does not go in later."""
        check_card(key, weight)
        if self._pid != os.getpid():
            self._sequence, self._pid = await self.channel._acall("adopt", self.name, _me()), os.getpid()
        await self._asettle()
        timeout_s, parcel = self._timeout(timeout_s), await asyncio.to_thread(self.channel._pack, item)
        arguments = self.name, self._sequence, key, weight, parcel, timeout_s
        try:
            await self.channel._acall("put", *arguments, wait_s=timeout_s)
        except BaseException as error:  # raised again
            if self._unsure(parcel, error):
                with contextlib.suppress(ChannelError, WaitTimeoutError):
                    await self._asettle()
            raise
        self._sequence += 1

    def _unsure(self, parcel: Parcel, error: BaseException) -> bool:
        """Whether nobody knows if a put that ended in `error` is in; one that was refused needs its payload no more."""
        if isinstance(error, ChannelError | WaitTimeoutError) and not isinstance(error, _NoAnswerError):
            _remove(parcel)
            return False
        self._unknown = parcel
        return True

    def _settle(self) -> None:
        """Have the number of a put that nobody knows of used up, or the next item would be taken for it."""
        if self._unknown is not None:
            self._settled(self._unknown, self.channel._call("withdraw", self.name, self._sequence))

    async def _asettle(self) -> None:
        if self._unknown is not None:
            self._settled(self._unknown, await self.channel._acall("withdraw", self.name, self._sequence))

    def _settled(self, parcel: Parcel, accepted: bool) -> None:
        if not accepted:
            _remove(parcel)
        self._sequence, self._unknown = self._sequence + 1, None

    def close(self) -> None:
        """No more items from this producer. May be called again."""
        self.channel._call("close", self.name)

    async def aclose(self) -> None:
        await self.channel._acall("close", self.name)

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
            await self.channel._acall("fail", reason)

    def _timeout(self, timeout_s: float | None) -> float:
        return self.channel._timeout_s if timeout_s is None else timeout_s


def _remove(parcel: Parcel) -> None:
    if parcel.path:
        Path(parcel.path).unlink(missing_ok=True)


def _me() -> Any:
    return this_process(ray.get_runtime_context().get_node_id())


def _consumer() -> str:
    return f"pid {os.getpid()}/{uuid.uuid4().hex[:12]}"
