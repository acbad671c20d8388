"""Hosts that are drained: nobody's process is ended, gangs go on, and what is free is lent to nobody."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.control.hosts import find, statuses
from rlix.control.status import status_of
from rlix.protocol.errors import PipelineGoneError, RlixError, SpecError
from rlix.protocol.events import Event
from rlix.protocol.messages import LeaseState, NodeState, RolloutAnswer
from rlix.protocol.types import Phase
from rlix.scheduler.image import image
from rlix.scheduler.state import State
from rlix.sim.books import Forgetful
from tests.control.test_discovery import node
from tests.control.world import DEVICES, INFER, World, process, service_of

FAR = frozenset({"far"})
NOBODY = frozenset[str]()
TWO = tuple(device if device.id < 2 else replace(device, node_id="far") for device in DEVICES)
NEAR = tuple(device if device.id >= 2 else replace(device, node_id="far") for device in DEVICES)  # gangs' are far


class Written(Forgetful):
    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []

    def append(self, events: Sequence[Event]) -> None:
        self.events += [(1e9, event) for event in events]


def pool(world: World) -> list[int]:
    return [device.id for device in world.core.state.devices]


def test_a_gang_on_a_host_that_is_drained_goes_on_and_its_devices_leave_when_it_gives_them_back() -> None:
    world = World()
    world.core.found(NEAR)
    lease, waiting = world.gang("ft_1"), world.ask("ft_2")
    world.machine.lock(lease, process(7))
    world.core.found(NEAR, FAR)
    world.run(10_000.0)
    assert world.held("ft_1") == (lease,)
    assert waiting.outcome is None
    assert pool(world) == [0, 1, 2, 3]
    world.machine.unlock(process(7))
    world.release(lease)
    assert pool(world) == [2, 3]
    said = "ft_2/actor_train asks for devices that left the pool because their host is drained: [0, 1]"
    assert str(waiting.outcome) == said
    assert isinstance(world.ask("ft_1").outcome, PipelineGoneError)
    world.core.found(NEAR, NOBODY)
    assert pool(world) == [0, 1, 2, 3]
    assert world.gang("ft_1").devices == (0, 1)
    assert world.machine.killed == []


def test_a_rollout_gives_back_what_it_has_on_a_drained_host_in_its_own_time() -> None:
    world = World()
    world.core.found(TWO)
    bundles = world.roll("ft_1", 99)
    assert len(bundles) == 4
    far = [lease for lease in bundles if lease.devices[0] >= 2]
    for lease in bundles:
        world.machine.lock(lease, process(7 + lease.devices[0]))
    world.core.found(TWO, FAR)
    answer = world.core.poll("ft_1", INFER.name, {lease.epoch for lease in bundles}, set())
    assert list(answer.taken) == far
    world.run(10_000.0)
    assert world.machine.killed == []
    assert world.held("ft_1", LeaseState.DRAINING) == tuple(far)
    for lease in far:
        world.machine.unlock(process(7 + lease.devices[0]))
        world.release(lease)
    assert pool(world) == [0, 1]
    assert [lease.devices for lease in world.held("ft_1")] == [(0,), (1,)]
    world.core.found(TWO)
    world.run(0.0)
    assert len(world.note("ft_1")) == 4
    assert world.machine.killed == []


def test_what_was_promised_on_a_drained_host_goes_back_to_the_queue() -> None:
    world = World()
    world.core.found(NEAR)
    bundles = world.roll("ft_2", 99)
    waiting = world.ask("ft_1")
    assert len(world.held("ft_1", LeaseState.PENDING)) == 1
    world.core.found(NEAR, FAR)
    assert world.held("ft_1", LeaseState.PENDING) == ()
    assert waiting.outcome is None
    world.core.found(NEAR)
    for lease in bundles[:2]:
        world.release(lease)
    assert waiting.outcome == world.held("ft_1")[0]


def test_a_bundle_that_is_asked_back_has_a_time_limit_again_when_its_host_is_back() -> None:
    world = World()
    world.core.found(TWO)
    bundles = world.roll("ft_1", 99)
    for lease in bundles:
        world.machine.lock(lease, process(7 + lease.devices[0]))
    world.core.found(TWO, FAR)
    world.run(1000.0)
    world.core.found(TWO)
    world.run(world.settings.shrink_deadline_s - 1.0)
    assert world.machine.killed == []
    world.run(2.0)
    assert sorted(p.pid for p in world.machine.killed) == [9, 10]


def test_a_rollout_whose_hosts_are_drained_is_told_once_its_job_holds_nothing_where_others_are_in_service() -> None:
    world = World()
    world.core.start()
    far = tuple(replace(device, node_id="far") for device in DEVICES)
    world.core.found((*far, replace(DEVICES[0], id=4)))
    service, gang = service_of(world), world.gang("ft_1")
    world.core.report("ft_1", INFER.name, replace(world.core.state.demand("ft_1", INFER.name), trajectories=9))
    world.core.found((*far, replace(DEVICES[0], id=4)), FAR)

    def poll() -> object:
        held = {lease.epoch for lease in world.held("ft_1", LeaseState.ACTIVE, LeaseState.DRAINING)} - {gang.epoch}
        return asyncio.run(service.poll_rollout("ft_1", INFER.name, None, tuple(held), tuple(held), 0.0))

    poll()
    world.run(5.0)
    world.release(gang)
    for lease in world.held("ft_1", LeaseState.DRAINING):
        world.release(lease)
    with pytest.raises(RlixError, match="the hosts of all devices of its actor_infer are drained") as said:
        poll()
    assert not isinstance(said.value, PipelineGoneError)  # which a rollout takes for its end, and says nothing
    world.run(5.0)
    assert "ft_1" not in world.core.state.ending


def test_who_has_no_host_at_all_waits_until_one_is_back() -> None:
    world = World()
    world.core.start()
    world.core.found(TWO)
    service, bundles, nobody_left = service_of(world), world.roll("ft_1", 99), frozenset({"far", "node"})
    world.core.found(TWO, nobody_left)
    for lease in bundles:
        world.release(lease)
    waiting = world.ask("ft_2")

    def poll() -> RolloutAnswer:
        return asyncio.run(service.poll_rollout("ft_1", INFER.name, None, (), (), 0.0))

    assert poll() == RolloutAnswer()
    world.run(100.0)
    assert (poll(), waiting.outcome, pool(world)) == (RolloutAnswer(), None, [])
    assert status_of(world.core).waiting[0].behind == "every host is drained"
    world.core.found(TWO)
    world.run(0.0)
    assert waiting.outcome == world.held("ft_2")[0]
    assert [lease.devices for lease in poll().granted] == [(2,), (3,)]


def test_who_waits_while_no_host_is_left_is_told_when_another_one_comes_back() -> None:
    world = World()
    world.core.found(NEAR)
    world.core.found(NEAR, frozenset({"far", "node"}))
    waiting = world.ask("ft_1")
    assert waiting.outcome is None
    world.core.found(NEAR, FAR)
    assert isinstance(waiting.outcome, PipelineGoneError)


def test_a_drained_host_survives_a_restart_and_a_compaction_of_the_journal() -> None:
    world = World(journal=(journal := Written()))
    service = service_of(world)
    asyncio.run(service.cordon(("far",)))
    assert asyncio.run(service.cordoned()) == ("far",)
    world.core.found(TWO, FAR)
    gang = world.gang("ft_1")
    compacted = State()
    for event in image(world.core.state, world.core.clock.time()):
        compacted.apply(event, 0.0)
    for state in (compacted, world.core.state):
        assert (state.cordoned, state.draining, state.discovered) == (("far",), FAR, TWO)
        assert [device.id for device in state.devices] == [0, 1]
    world.restart(journal.events)
    assert (world.core.state.cordoned, world.core.state.draining, pool(world)) == (("far",), FAR, [0, 1])
    assert world.held("ft_1") == (gang,)


OPERATIONS = st.lists(
    st.sampled_from(["drain far", "drain near", "drain both", "back", "roll", "gang", "give", "wait", "restart"]),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_draining_ends_nobody_and_takes_nothing_from_a_gang(operations: list[str]) -> None:
    """Rollouts here give back when asked, and gangs when they like; processes lock what they hold."""
    world = World(journal=(journal := Written()))
    world.core.found(TWO)
    drained, gangs, mine = NOBODY, set[Any](), process(7)
    where = {"drain far": FAR, "drain near": frozenset({"node"}), "drain both": frozenset({"far", "node"})}
    for operation in operations:
        match operation:
            case "roll":
                world.roll("ft_1", 9)
            case "gang":
                world.ask("ft_2", phase=Phase.ACTOR_TRAINING, holder=mine)
            case "give":
                for lease in gangs:
                    world.release(lease)
            case "wait":
                world.run(5.0)
            case "restart":
                world.restart(list(journal.events))
                world.run(2.0)
            case _:
                before = world.core.state.snapshot(0.0).leases
                drained = where.get(operation, NOBODY)
                world.core.found(TWO, drained)
                kept = {s.lease for s in world.core.state.leases.values() if s.state is LeaseState.ACTIVE}
                assert {s.lease for s in before if s.lease.bundle is None and s.state is LeaseState.ACTIVE} <= kept
        world.note("ft_1")
        for lease in world.held("ft_1", LeaseState.DRAINING):
            world.release(lease)
        world.run(0.0)
        gangs = set(world.held("ft_2"))
        held = {d for status in world.core.state.leases.values() for d in status.lease.devices}
        assert {d.id for d in world.core.state.devices} == {d.id for d in TWO if d.node_id not in drained} | held
        fresh = [s.lease for s in world.core.state.leases.values() if s.lease.phase is Phase.ROLLOUT]
        on = {d.id for d in TWO if d.node_id in drained}
        assert all(on.isdisjoint(lease.devices) for lease in fresh), "a rollout has devices of a host that is drained"
    assert world.machine.killed == []


NODES: list[Any] = [
    node("aa1", "10.0.0.1", 1, head=True),
    {**node("ab2", "10.0.0.2", 2), "NodeManagerHostname": "second"},
    node("ac3", "10.0.0.3", 2),
    node("ad4", "10.0.0.4", 2),
    node("ae5", "10.0.0.5", 2, alive=False),
    node("af6", "10.0.0.2", 2, alive=False),  # has come back as ab2
]


def test_each_host_has_one_state() -> None:
    found = statuses(NODES, {"ad4": "RLix is not there"}, {"ab2", "ac3"}, {"aa1", "ab2"})
    assert {status.node_id: status.state for status in found} == {
        "aa1": NodeState.READY,
        "ab2": NodeState.DRAINING,
        "ac3": NodeState.CORDONED,
        "ad4": NodeState.MISCONFIGURED,
        "ae5": NodeState.LOST,
    }
    assert str(found[3]) == "host ad4 (10.0.0.4) is misconfigured: it lends no devices: RLix is not there"


@pytest.mark.parametrize("named", ["second", "10.0.0.2", "ab2", "ab"])
def test_a_host_is_found_by_its_name_its_address_or_the_beginning_of_its_id(named: str) -> None:
    assert find(NODES, named)["NodeID"] == "ab2"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("ae5", r"ae5: no such host; there are: aa1 \(10.0.0.1, node aa1\), second \(10.0.0.2, node ab2\), ac3"),
        ("", ": no such host; there are: aa1"),
        ("a", r"a: several hosts are called that; there are: aa1"),
    ],
)
def test_who_is_no_host_or_several_is_said_with_the_names_there_are(named: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        find(NODES, named)
