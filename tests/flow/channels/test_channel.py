"""Channels on real Ray: order, back-pressure, end of stream, failures, and both kinds of callers."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from rlix.flow.channels.actor import Outcome, Reply
from rlix.flow.channels.channel import Channel, EndOfStream
from rlix.flow.channels.codec import Parcel
from rlix.flow.channels.state import Want
from rlix.flow.workers.group import PerRank, WorkerGroup
from rlix.node.process import this_process
from rlix.protocol.errors import ChannelError, WaitTimeoutError
from tests.flow.test_worker_group import devices
from tests.flow.workers import EchoWorker

pytestmark = pytest.mark.ray

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def group(ray_session: Any) -> Iterator[WorkerGroup]:
    with WorkerGroup(EchoWorker, name="streams", placements=devices(2)) as group:
        yield group


def test_one_process_from_first_item_to_end_of_stream(ray_session: Any) -> None:
    channel: Channel[Any] = Channel(2, name="one", timeout_s=5)
    first, second = channel.producer("first"), channel.producer()
    array = np.arange(300_000)
    first.put(array)
    second.put("small")
    assert len(channel) == 2
    with pytest.raises(WaitTimeoutError, match=r"'one': producer 'first' found no room within 0\.1 s: 2/2 items"):
        first.put("too many", timeout_s=0.1)
    np.testing.assert_array_equal(channel.get(), array)
    first.close()
    first.close()
    with pytest.raises(ChannelError, match="producer 'first' has closed and cannot put"):
        first.put("late")
    assert channel.get() == "small"
    with pytest.raises(WaitTimeoutError, match=r"nothing came within 0\.1 s: 0/2 items queued, open producers: produ"):
        channel.get(timeout_s=0.1)
    with second:
        second.put("last")
    assert list(channel) == ["last"]
    with pytest.raises(EndOfStream):
        channel.get()
    with pytest.raises(ChannelError, match="the stream has ended"):
        channel.producer()


def test_producers_wait_for_consumers_and_the_last_one_ends_the_stream(group: WorkerGroup) -> None:
    channel: Channel[tuple[int, int]] = Channel(3, name="many", timeout_s=TIMEOUT_S)
    producers = [channel.producer(f"rank {rank}") for rank in range(2)]
    done = group.call("produce", PerRank(producers), 20)
    ready, _ = ray.wait(done, num_returns=2, timeout=0.5)
    assert ready == []  # 40 items do not fit
    assert len(channel) == 3
    items = list(channel)
    ray.get(done, timeout=TIMEOUT_S)
    assert sorted(items) == [(rank, i) for rank in range(2) for i in range(20)]
    assert [i for rank, i in items if rank == 0] == list(range(20))


def test_a_failing_producer_fails_the_stream_for_everybody(group: WorkerGroup) -> None:
    channel: Channel[int] = Channel(4, name="doomed", timeout_s=TIMEOUT_S)
    other, failing = channel.producer("other"), channel.producer("failing")
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(group.call("produce_and_fail", failing, ranks=[1]), timeout=TIMEOUT_S)
    reason = "'doomed': producer 'failing' failed: LookupError: out of prompts"
    with pytest.raises(ChannelError, match=reason):
        channel.get()
    with pytest.raises(ChannelError, match=reason):
        other.put(1)
    channel.fail("a later reason")
    with pytest.raises(ChannelError, match=reason):
        channel.get()


def test_kills_lose_and_double_nothing_that_was_acknowledged(group: WorkerGroup) -> None:
    """A producer and a consumer are killed; what was put arrives once, and the end is an error that names the dead."""
    channel: Channel[tuple[int, Any]] = Channel(50, name="kills", timeout_s=TIMEOUT_S)
    lasting, dying = channel.producer("lasting"), channel.producer("dying")
    group.run("put_some", dying, 10, 200_000, ranks=[1], timeout_s=TIMEOUT_S)  # and keeps it open
    held = group.call("hold_items", channel, 3, ranks=[1])
    while len(group.run("held", ranks=[1], timeout_s=TIMEOUT_S)[0]) < 3:
        time.sleep(0.02)
    with lasting:
        lasting.put((5, None))
    group.restart(1)
    del held
    got = []
    with pytest.raises(ChannelError, match="'kills': producer 'dying' ended without closing"):
        for item, payload in channel:
            got.append(item)
            assert payload is None or payload.nbytes == 200_000
    assert sorted(got) == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    again = group.call("put_some", dying, 2, 0, ranks=[1])  # it goes on where it was
    ray.get(again, timeout=TIMEOUT_S)
    assert [channel.get()[0] for _ in range(2)] == [0, 1]


def test_async_callers(ray_session: Any) -> None:
    async def produce(channel: Channel[int], count: int) -> None:
        async with channel.producer() as producer:
            for i in range(count):
                await producer.aput(i)

    async def scenario() -> list[int]:
        channel: Channel[int] = Channel(2, timeout_s=TIMEOUT_S)
        first = channel.producer()
        with pytest.raises(WaitTimeoutError, match="nothing came"):
            await channel.aget(timeout_s=0.1)
        waiting = asyncio.create_task(channel.aget())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for n in range(20):  # cancelled before, while or after the item comes: never lost
            async with asyncio.TaskGroup() as both:
                waiting = both.create_task(channel.aget())
                await asyncio.sleep(0.0005 * n)
                both.create_task(first.aput(n))
                waiting.cancel()
            if waiting.cancelled():
                assert await channel.aget() == n
            else:
                assert waiting.result() == n
        await first.aclose()
        channel = Channel(2, timeout_s=TIMEOUT_S)
        producing = asyncio.create_task(produce(channel, 10))
        items = [item async for item in channel]
        await producing
        return items

    assert asyncio.run(scenario()) == list(range(10))


def test_whoever_gave_up_before_his_request_began_takes_nothing(ray_session: Any) -> None:
    channel: Channel[int] = Channel(2, timeout_s=TIMEOUT_S)
    with channel.producer() as producer:
        producer.put(7)
    actor, consumer = channel._actor, "late"
    ray.get(actor.give_back.remote(consumer), timeout=TIMEOUT_S)  # Ray may begin an async actor's calls in any order
    ray.get(actor.take.remote(consumer, this_process(), "", Want(), TIMEOUT_S), timeout=TIMEOUT_S)
    assert channel.get() == 7


def test_a_call_that_ray_makes_again_is_carried_out_once(ray_session: Any) -> None:
    channel: Channel[int] = Channel(1, timeout_s=TIMEOUT_S)
    actor, me, empty = channel._actor, this_process(), Parcel(b"", (), 0)

    def ask(method: str, *args: Any) -> Reply:
        reply: Reply = ray.get(getattr(actor, method).remote(*args), timeout=TIMEOUT_S)
        return reply

    assert [ask("register", "call 1", None, me).value for _ in range(2)] == [("producer 0", 0)] * 2
    assert ask("register", "call 2", None, me).value == ("producer 1", 0)
    assert [ask("put", "producer 0", 0, "", 1.0, empty, 0.0).outcome for _ in range(2)] == [Outcome.DONE] * 2  # is full
    taken = [ask("take", "first", me, "", Want(), 0.0) for _ in range(2)]
    assert taken[0].value == taken[1].value and len(taken[0].value) == 1
    late = [actor.take.remote("second", me, "", Want(), TIMEOUT_S) for _ in range(2)]
    ask("give_back", "first")
    assert ask("take", "first", me, "", Want(), 0.0).outcome is Outcome.TIMEOUT
    got = ray.get(late, timeout=TIMEOUT_S)
    assert got[0].value == got[1].value == taken[0].value
    for _ in range(2):
        ask("acknowledge", "second", [got[0].value[0][0].id], "")
    assert len(channel) == 0


def test_a_lost_connection_is_no_death(ray_session: Any) -> None:
    channel: Channel[int] = Channel(2, name="far", timeout_s=TIMEOUT_S)

    class Lost:
        def future(self) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(ActorUnavailableError("connection reset", None))
            return future

    class Far:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_: Lost())

    near, channel._actor = channel._actor, cast(Any, Far())
    with pytest.raises(WaitTimeoutError, match=r"'far': its actor could not be reached for take\(\)"):
        channel.get()
    with pytest.raises(WaitTimeoutError, match=r"could not be reached for take\(\)"):
        asyncio.run(channel.aget())
    channel._actor = near
    assert len(channel) == 0


def test_what_nobody_took_goes_with_the_channel(ray_session: Any) -> None:
    channel: Channel[Any] = Channel(1, timeout_s=TIMEOUT_S)
    producer = channel.producer()
    producer.put(np.arange(300_000))
    assert channel._home is not None
    folder = Path(channel._home[1])
    assert len(list(folder.iterdir())) == 2
    del channel, producer
    deadline = time.monotonic() + TIMEOUT_S
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} is still there"
        time.sleep(0.02)


def test_the_end_of_the_actor_is_an_error_not_a_hang(ray_session: Any) -> None:
    channel: Channel[int] = Channel(2, name="gone", timeout_s=TIMEOUT_S)
    producer = channel.producer()
    ray.kill(channel._actor)
    with pytest.raises(ChannelError, match="'gone': its actor died"):
        channel.get()
    with pytest.raises(ChannelError, match="'gone': its actor died"):
        producer.close()
