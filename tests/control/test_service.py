"""The scheduler service without Ray: calls that make no sense are refused before anything is kept of them."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control import client
from rlix.control.gang_queue import Asked
from rlix.control.journal import decode, encode
from rlix.control.rpc import Patient
from rlix.control.scheduler_service import Scheduler
from rlix.control.status import status_of, unpacked
from rlix.protocol.errors import RlixError, SpecError, StaleEpochError
from rlix.protocol.events import Event
from rlix.protocol.messages import Demand, Lease, Process, Progress
from rlix.protocol.types import Phase
from rlix.sim.books import Forgetful
from tests.control.world import DEVICES, INFER, TRAIN, World, process, service_of

GANG = Phase.ACTOR_TRAINING
Call = Callable[[Scheduler], Coroutine[Any, Any, object]]


class Kept(Forgetful):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, events: Any) -> None:
        self.events += events


class Timed(Forgetful):
    """Can be read again."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.now: Callable[[], float] = lambda: 1e9

    def append(self, events: Any) -> None:
        self.events += [(self.now(), event) for event in events]


def asking(**asked: Any) -> Call:
    return lambda service: service.poll_gang("ft_1", TRAIN.name, GANG, Asked(**asked), 0.0)


def rolling(process_: Any = None, held: Any = (), draining: Any = (), wait_s: Any = 0.0) -> Call:
    return lambda service: service.poll_rollout("ft_1", INFER.name, process_, held, draining, wait_s)


@pytest.mark.parametrize(
    "call",
    [
        lambda service: service.poll_gang("ft_1", TRAIN.name, GANG, "please", 0.0),
        lambda service: service.poll_gang("ft_1", TRAIN.name, GANG, Asked(), "long"),
        asking(key=7),
        asking(holder="me"),
        asking(holder=Process("node", True, 1)),
        asking(holder=Process("node", 7, "then")),  # type: ignore[arg-type]
        asking(holding=("x",)),
        asking(holding=7),
        asking(giving=("x",)),
        asking(devices=[0]),
        asking(devices=(7,)),
        asking(home=[0]),
        asking(home=("x",)),
        asking(move_s=-1.0),
        asking(move_s=float("nan")),
        asking(timeout_s="soon"),
        asking(timeout_s=float("nan")),
        asking(longest_s=-1.0),
        rolling("me"),
        rolling(held=("x",)),
        rolling(draining=7),
        rolling(wait_s=float("nan")),
        rolling(wait_s=1e9),
        lambda service: service.report_progress("ft_1", Progress(1, 0, {"\x1b[31mred": 1.0})),
        lambda service: service.beat("ft_1", "me", ()),
        lambda service: service.beat("ft_1", process(7), "all"),
        lambda service: service.name_holders("ft_1", "", {0: "me"}),
        lambda service: service.name_holders("ft_1", "", {"x": process(7)}),
        lambda service: service.name_holders("ft_1", "", [process(7)]),
        lambda service: service.report_demand("ft_1", INFER.name, Demand("3")),
        lambda service: service.report_demand("ft_1", INFER.name, "lots"),
        lambda service: service.unregister_pipeline("ft_1", 3),
        lambda service: service.unregister_pipeline("ft_1", "", "me"),
        lambda service: service.register_pipeline("ft_1", "ns", {}, {}, name=3),
        lambda service: service.register_pipeline("ft_1", "ns", {}, {}, program="me"),  # type: ignore[arg-type]
        lambda service: service.register_pipeline("ft_1", "ns", {}, {}, launcher="me"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_and_leaves_nothing(call: Call) -> None:
    journal = Kept()
    world = World(journal=journal)
    before = len(journal.events)
    with pytest.raises(SpecError):
        asyncio.run(call(service_of(world)))
    world.run(5.0)
    assert journal.events[before:] == []
    assert [decode(*encode(event)) for event in journal.events] == journal.events
    assert world.core.state.requests == {}
    assert not any(job.callers for job in world.core.known.jobs.values())


@pytest.mark.parametrize("call", [asking(longest_s=-1.0), rolling(held=("x",)), asking(key=7)])
def test_what_a_client_says_for_its_user_is_refused_in_the_jobs_name(call: Call) -> None:
    with pytest.raises(SpecError, match=r"^job 'ft_1': "):
        asyncio.run(call(service_of(World())))


@pytest.mark.parametrize("devices", [7, ("x",), (0, 1), (True,)])
def test_a_part_that_is_none_is_refused(devices: Any) -> None:
    world = World()
    lease, service = world.gang("ft_1"), service_of(world)
    with pytest.raises(SpecError):
        asyncio.run(service.give_back("ft_1", lease.epoch, devices))
    (bundle, *_) = world.roll("ft_2", 9)
    with pytest.raises(SpecError, match=r"job 'ft_2': lease \d+ is a rollout's"):
        asyncio.run(service.give_back("ft_2", bundle.epoch, ()))
    assert world.held("ft_1") == (lease,)


def test_nobody_gives_back_what_another_job_holds() -> None:
    world = World()
    lease = world.gang("ft_1")
    world.machine.lock(lease, process(7))
    with pytest.raises(StaleEpochError, match=f"lease {lease.epoch} is not held by 'ft_2'"):
        asyncio.run(service_of(world).release("ft_2", [lease.epoch]))
    with pytest.raises(StaleEpochError, match=f"lease {lease.epoch} is not held by 'ft_2'"):
        asyncio.run(service_of(world).give_back("ft_2", lease.epoch, (0,)))
    world.run(5.0)
    assert world.held("ft_1") == (lease,)
    assert world.machine.killed == []


def test_what_was_given_back_may_be_given_back_again_also_after_a_restart_and_what_was_taken_may_not() -> None:
    """The answer may have been lost with the scheduler, and then the question is asked again."""
    journal = Timed()
    world = World(journal=journal)
    journal.now = lambda: 1e9 + world.clock.time()
    gang, (bundle, *_) = world.gang("ft_1"), world.roll("ft_2", 9)
    for _ in range(2):
        asyncio.run(service_of(world).release("ft_1", [gang.epoch]))
        asyncio.run(service_of(world).release("ft_2", [bundle.epoch]))
        world.restart(list(journal.events))
    with pytest.raises(StaleEpochError, match=f"lease {gang.epoch} is not held by 'ft_2'"):
        asyncio.run(service_of(world).release("ft_2", [gang.epoch]))
    world.run(2.0)
    taken = world.gang("ft_1")
    world.core.take(taken, "because")
    with pytest.raises(StaleEpochError, match="because"):
        asyncio.run(service_of(world).release("ft_1", [taken.epoch]))


def test_what_is_given_back_with_a_question_goes_to_whoever_waits_and_to_no_rollout_in_between() -> None:
    world = World()
    (mine, theirs), service = (world.gang("ft_1"), world.ask("ft_2")), service_of(world)
    world.roll("ft_2", 50)  # beside it, on devices 2 and 3

    def change(devices: tuple[int, ...], *giving: int) -> None:
        again = Asked(f"for {devices}", process(7), devices=devices, giving=giving)
        asyncio.run(service.poll_gang("ft_1", TRAIN.name, GANG, again, 0.0))
        world.run(1.0)

    change((0, 1), mine.epoch)
    (first,) = [lease for lease in world.held("ft_2") if lease == theirs.outcome]
    assert world.held("ft_1") == ()
    world.release(first)
    (mine,) = world.held("ft_1")
    assert mine.devices == (0, 1)
    change((1,), mine.epoch)
    (mine,) = world.held("ft_1")
    assert mine.devices == (1,)
    assert sorted(lease.devices for lease in world.note("ft_2")) == [(0,), (2,), (3,)]  # what is not used any more
    assert "shrinking" not in [record.event for record in world.core.known.log.since("ft_2", 0)]
    with pytest.raises(StaleEpochError, match=f"lease {first.epoch} is not held by 'ft_1'"):
        change((0,), mine.epoch, first.epoch)
    assert world.held("ft_1") == (mine,)
    assert world.core.state.requests == {}


def test_what_is_given_back_with_a_question_is_given_back_once_however_often_it_is_asked() -> None:
    """Also by a scheduler that was ended in between, whose journal has the request and not the end of the lease."""
    world = World()
    mine = world.gang("ft_1", holder=process(7))
    asked = Asked("next", process(7), devices=(1,), giving=(mine.epoch,))
    world.ask("ft_1", key=asked.key, holder=asked.holder, devices=asked.devices)
    service = service_of(world)

    def again() -> Lease | None:
        answer = asyncio.run(service.poll_gang("ft_1", TRAIN.name, GANG, asked, 0.0))
        world.run(0.0)
        return answer

    assert again() is None
    got = again()
    assert got is not None and got.devices == (1,)
    assert again() == got
    assert world.held("ft_1") == (got,)


def test_a_client_gives_back_with_its_first_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was dropped meanwhile is asked for anew by the next, and what it gave is not held any more."""
    asked: list[Asked] = []
    got = Lease(2, "ft_1", TRAIN.name, GANG, (1,))

    class Answers:
        def ask(self, method: str, *args: Any, timeout_s: float) -> object:
            asked.extend(arg for arg in args if isinstance(arg, Asked))
            return got if len(asked) == 3 else None

    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(client, "Patient", lambda *_, **__: Answers())
    mine = Lease(1, "ft_1", TRAIN.name, GANG, (0, 1))
    assert client.JobClient("ft_1").acquire(TRAIN.name, GANG, devices=[1], giving=[mine]) == got
    assert [question.giving for question in asked] == [(1,), (), ()]
    assert len({question.key for question in asked}) == 1


def test_who_has_left_ray_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call would start a Ray of its own, behind the program's back."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(RlixError, match="this process has left Ray"):
        Patient(object, "the scheduler").ask("beat", timeout_s=1.0)


def test_a_status_is_sent_as_it_is_and_a_pools_devices_are_packed_once() -> None:
    world = World()
    service = service_of(world)
    empty = asyncio.run(service.status())
    world.gang("ft_1", holder=process(7))
    world.roll("ft_2", 9)
    world.ask("ft_2")
    sent = asyncio.run(service.status())
    assert unpacked(*sent) == status_of(world.core)
    assert len(unpacked(*sent).waiting) == 1
    assert sent[0] is empty[0]
    world.core.found(DEVICES[:3])
    assert unpacked(*asyncio.run(service.status())).devices == DEVICES[:3]
