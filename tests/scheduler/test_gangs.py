"""Hand-made cases for the gang part of the planner."""

from dataclasses import replace

import pytest

from rlix.protocol.events import (
    DevicesDiscovered,
    GangRequested,
    GrantRevoked,
    LeaseReleased,
    PipelineAdmitted,
    PipelineRegistered,
)
from rlix.protocol.messages import Cluster, LeaseState, Registration, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.image import image
from rlix.scheduler.plan import Expand, GangGrant, Plan, Shrink
from rlix.scheduler.state import State
from tests.scheduler.world import INFER, TRAIN, World, devices


def test_a_gang_takes_free_devices_at_once() -> None:
    world = World(4)
    world.register("a", [0, 1, 2, 3], train=[1, 2])
    request = world.request("a")
    assert world.cycle() == Plan(grants=(GangGrant(request, (1, 2)),))
    assert [status.state for status in world.state.leases.values()] == [LeaseState.ACTIVE]


def test_a_gang_preempts_rollouts_only_where_it_needs_devices() -> None:
    world = World(4)
    world.register("a", [0, 1, 2, 3], train=[1, 2])
    world.demand("a", 4)
    world.cycle()
    epochs = {status.lease.devices: status.lease.epoch for status in world.state.leases.values()}
    request = world.request("a")
    changes = world.cycle()
    assert changes.shrinks == (Shrink(epochs[(1,)]), Shrink(epochs[(2,)]))
    assert changes.grants == (GangGrant(request, (1, 2)),)
    assert changes.expands == ()
    gang = max(world.state.leases)
    assert world.state.leases[gang].state is LeaseState.PENDING
    assert world.apply(LeaseReleased(epochs[(1,)], ReleaseReason.SHRUNK)) == ()
    assert world.apply(LeaseReleased(epochs[(2,)], ReleaseReason.KILLED)) == (world.state.leases[gang].lease,)


def test_no_rollout_stops_for_a_gang_that_does_not_fit_yet() -> None:
    world = World(4)
    world.register("a", [2, 3], train=[0, 1])
    world.register("b", [2, 3], train=[1, 2])
    world.request("a")
    world.cycle()
    world.demand("b", 8)
    world.cycle()
    world.request("b")
    assert not world.cycle(), "device 1 trains, so device 2 goes on with its rollout"
    world.release_gangs()
    changes = world.cycle()
    assert len(changes.grants) == 1 and len(changes.shrinks) == 1


def test_strict_priority_then_arrival() -> None:
    world = World(2)
    for name in ("a", "b", "c"):
        world.register(name, [0, 1], train=[0, 1])
    late = world.request("a", Phase.REFERENCE_LOG_PROBS)
    first = world.request("b", Phase.ACTOR_TRAINING)
    second = world.request("c", Phase.ACTOR_TRAINING)
    order = []
    for _ in range(3):
        order += [grant.request_id for grant in world.cycle().grants]
        world.release_gangs()
    assert order == [first, second, late]


def test_a_waiting_gang_keeps_its_devices_from_later_ones_but_not_from_rollouts() -> None:
    world = World(3)
    world.register("a", [0], train=[0, 1])
    world.register("b", [0], train=[1, 2])
    world.register("c", [2], train=[2])
    world.register("d", [2])
    world.request("a")
    world.cycle()
    blocked = world.request("b")
    world.request("c", Phase.VALUE_COMPUTE)
    world.demand("d", 3)
    changes = world.cycle()
    assert changes.grants == (), "c must not overtake b on device 2"
    assert changes.expands == (Expand("d", INFER, 0),)
    world.release_gangs()
    changes = world.cycle()
    assert [grant.request_id for grant in changes.grants] == [blocked]


def test_a_rollout_that_gave_way_is_placed_elsewhere_in_the_same_plan() -> None:
    world = World(4)
    world.register("a", [0, 1, 2, 3], size=2, train=[0, 1])
    world.demand("a", 1)
    world.cycle()
    assert world.held() == {"a": [0, 1]}
    world.request("a")
    changes = world.cycle()
    assert len(changes.shrinks) == 1 and len(changes.grants) == 1
    assert changes.expands == (Expand("a", INFER, 1),)


def test_what_a_wide_bundle_leaves_over_is_used_in_the_same_plan() -> None:
    world = World(4)
    world.register("wide", [0, 1, 2, 3], size=4)
    world.register("b", [2, 3], train=[0])
    world.demand("wide", 1)
    world.cycle()
    world.request("b")
    world.demand("b", 5)
    changes = world.cycle()
    assert len(changes.shrinks) == 1 and len(changes.grants) == 1
    assert changes.expands == (Expand("b", INFER, 0), Expand("b", INFER, 1))
    assert len(world.leases(LeaseState.PENDING)) == 3


def test_pending_and_draining_leases_are_left_alone() -> None:
    world = World(2)
    world.register("a", [0, 1], train=[0, 1])
    world.register("b", [0, 1], train=[0, 1])
    world.demand("a", 9)
    world.cycle()
    world.request("a", Phase.REFERENCE_LOG_PROBS)
    world.cycle()
    world.request("b", Phase.INITIALIZATION)
    world.demand("b", 9)
    assert not world.cycle()


def test_a_gang_on_a_device_that_left_the_pool_blocks_nobody() -> None:
    world = World(3)
    world.register("a", [0], train=[1, 2])
    world.register("b", [0], train=[1])
    world.request("a")
    second = world.request("b")
    world.apply(DevicesDiscovered(devices(2)))
    assert world.cycle().grants == (GangGrant(second, (1,)),)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ROLLOUT])
def test_a_running_gang_is_never_preempted(phase: Phase) -> None:
    world = World(2)
    world.register("a", [0, 1], train=[0, 1])
    world.register("b", [0, 1], train=[0, 1])
    world.request("a", phase)
    world.cycle()
    world.request("b", Phase.INITIALIZATION)
    world.demand("b", 100)
    assert not world.cycle()


def test_a_phase_of_unknown_length_runs_where_nobody_works_or_else_at_home() -> None:
    world = World(6)
    for name in ("a", "b", "c", "d"):
        world.register(name, [4, 5], train=[0, 1], alternatives=[[4, 5], [2, 3]])
    world.demand("a", 1)
    world.cycle()
    first = world.request("a")
    assert world.cycle().grants == (GangGrant(first, (0, 1)),)
    second = world.request("b")
    assert world.cycle().grants == (GangGrant(second, (2, 3)),), "a rollout is at work on 4 or 5"
    waits = world.request("c")
    assert not world.cycle()
    world.release_gangs()
    assert world.cycle().grants == (GangGrant(waits, (0, 1)),)
    world.release_gangs()
    world.demand("d", 9)
    world.register("e", [0, 1, 2, 3])
    world.demand("e", 9)
    world.settle()
    anywhere = world.request("d")
    assert world.cycle().grants == (GangGrant(anywhere, (0, 1)),), "somebody works everywhere"


def test_a_gang_waits_for_the_devices_where_it_last_was() -> None:
    world = World(4)
    for name in ("a", "b"):
        world.register(name, [0], train=[0, 1], alternatives=[[2, 3]])
    for name in ("a", "b"):
        world.request(name)
    world.cycle()
    assert {s.lease.pipeline_id: s.lease.devices for s in world.leases(LeaseState.ACTIVE)} == {"a": (0, 1), "b": (2, 3)}
    world.release_gangs()
    part = world.request("b", exactly=(3,))
    assert world.cycle().grants == (GangGrant(part, (3,)),)
    world.release_gangs()
    world.request("b")
    (request,) = [r for r in world.snapshot().requests if r.pipeline_id == "b"]
    assert request.choices == ((2, 3), (0, 1)), "it was on a part of them since, so it has not moved"
    world.demand("b", 1)
    (rollout,) = world.snapshot().rollouts
    assert rollout.gang_devices == (2, 3), "the policy expects it there, too"


def test_the_first_choice_is_the_first_that_the_pool_still_has() -> None:
    world = World(4)
    world.register("a", [0], train=[2, 3], alternatives=[[0, 1]])
    world.register("b", [0], train=[1], alternatives=[[0]])
    world.apply(DevicesDiscovered(devices(2)))
    request = world.request("a")
    waits = world.request("b")
    assert world.cycle().grants == (GangGrant(request, (0, 1)),)
    world.release_gangs()
    assert world.cycle().grants == (GangGrant(waits, (1,)),)


def three_that_train_in_turn(asked: int) -> tuple[World, list[int]]:
    """The job c trains; rich, which had 50 s, and poor wait for log-probs since 51 and 52, c to train since `asked`."""
    world = World(2)
    for name in ("rich", "poor", "c"):
        world.register(name, [0, 1], train=[0, 1])
    world.request("rich")
    world.cycle()
    world.now = 50.0
    world.request("c")
    world.release_gangs()
    world.cycle()
    waiting = []
    for world.now, name, phase in (
        (51.0, "rich", Phase.REFERENCE_LOG_PROBS),
        (52.0, "poor", Phase.REFERENCE_LOG_PROBS),
        (float(asked), "c", Phase.ACTOR_TRAINING),
    ):
        waiting.append(world.request(name, phase))
    return world, waiting


def order_of_grants(world: World) -> list[int]:
    granted = []
    while world.state.requests:
        world.release_gangs()
        granted += [grant.request_id for grant in world.cycle().grants]
    return granted


@pytest.mark.parametrize(
    ("now", "asked", "expected"),
    [
        (60, 60, [2, 0, 1]),  # nobody is late: the phase decides
        (171, 100, [0, 2, 1]),  # the first is late
        (180, 100, [1, 0, 2]),  # both are, and the second was given less
        (300, 299, [0, 1, 2]),  # both are very late: who asked first
    ],
)
def test_who_waits_too_long_goes_before_the_phase(now: int, asked: int, expected: list[int]) -> None:
    world, waiting = three_that_train_in_turn(asked)
    world.now = float(now)
    assert order_of_grants(world) == [waiting[number] for number in expected]


def test_who_holds_something_meanwhile_is_not_put_behind_who_waits_for_it() -> None:
    """The job c has devices 0 and 1 and asks for 2, which the late one would keep from it until it has 1, too."""
    world = World(3)
    world.register("late", [0], train=[1, 2])
    world.register("c", [0], train=[0, 1], alternatives=[[2]])
    world.request("c")
    world.cycle()
    world.request("late", Phase.VALUE_COMPUTE)
    world.now = 200.0
    (held,) = world.state.leases
    nested = world.state.next_request_id
    world.apply(GangRequested(nested, "c", TRAIN, Phase.VALUE_COMPUTE, holding=(held,), first=(2,), exact=True))
    assert [grant.request_id for grant in world.cycle().grants] == [nested]


def test_a_gang_that_waits_uses_devices_that_come() -> None:
    """Its home is taken; on another node it can begin at once. A later control plane knows the same."""
    world = World(2)
    for name in ("a", "b"):
        registration = Registration(name, "ns", (Cluster(TRAIN, 1, (0, 1), anywhere=name == "b"),))
        world.apply(PipelineRegistered(registration))
        world.apply(PipelineAdmitted(name))
    world.request("a")
    world.cycle()
    waits = world.request("b")
    assert not world.cycle()
    world.apply(DevicesDiscovered((*devices(2), *(replace(d, node_id="new") for d in devices(4)[2:]))))
    assert world.state.requests[waits].choices == ((0, 1), (2, 3))
    again = State()
    for event in image(world.state, world.now):
        again.apply(event, world.now)
    assert (again.requests, again.registrations) == (world.state.requests, world.state.registrations)
    assert world.cycle() == Plan(grants=(GangGrant(waits, (2, 3)),))
    assert world.state.registrations["a"].cluster(TRAIN).choices == ((0, 1),)


def grown(world: World, count: int) -> None:
    """One more node, and with it so many devices in all."""
    before = world.state.devices
    came = devices(count)[len(before) :]
    world.apply(DevicesDiscovered((*before, *(replace(device, node_id=f"node{count}") for device in came))))


def moving(world: World, *names: str) -> None:
    for name in names:
        cluster = Cluster(TRAIN, 1, (0, 1), anywhere=True)
        world.apply(PipelineRegistered(Registration(name, "ns", (cluster,))))
        world.apply(PipelineAdmitted(name))


def test_where_a_gangs_state_lies_is_one_of_its_choices_however_many_devices_come() -> None:
    world = World(2)
    moving(world, "a")
    grown(world, 4)
    world.apply(GangRequested(world.state.next_request_id, "a", TRAIN, Phase.ACTOR_TRAINING, first=(2, 3)))
    world.cycle()
    assert [status.lease.devices for status in world.state.leases.values()] == [(2, 3)]
    world.release_gangs()
    for count in range(8, 60, 4):
        grown(world, count)
    assert (2, 3) in world.state.registrations["a"].cluster(TRAIN).alternatives
    assert world.state.registrations["a"].cluster(TRAIN).devices == (0, 1)


def test_a_gang_whose_grant_is_taken_back_may_use_devices_that_came_meanwhile() -> None:
    world = World(2)
    world.register("roll", [0, 1])
    world.demand("roll", 2)
    world.cycle()
    moving(world, "a")
    waits = world.request("a")
    world.cycle()
    pending = max(world.state.leases)
    assert world.state.leases[pending].state is LeaseState.PENDING
    grown(world, 4)
    world.apply(GrantRevoked(pending))
    assert world.state.requests[waits].choices == ((0, 1), (2, 3))


def test_a_compacted_journal_keeps_all_of_a_request_whose_grant_may_be_taken_back() -> None:
    """Where its state lies and how long a move takes, what its caller holds meanwhile, and since when it waits."""
    world = World(5)
    world.register("roll", [0, 1, 2, 3])
    world.demand("roll", 4)
    world.cycle()
    world.register("a", [4], train=[0, 1], alternatives=[[2, 3], [3, 4]])
    world.apply(PipelineRegistered(Registration("b", "ns", (Cluster(TRAIN, 1, (4,)),))))
    world.apply(PipelineAdmitted("b"))
    world.request("b")
    world.cycle()
    (held,) = (s.lease.epoch for s in world.leases(LeaseState.ACTIVE) if s.lease.devices == (4,))
    waits = world.state.next_request_id
    at_home = GangRequested(waits, "a", TRAIN, Phase.ACTOR_TRAINING, holding=(held,), first=(2, 3), move_s=9.0)
    world.apply(at_home)
    world.cycle()
    (promised,) = (status.lease.epoch for status in world.leases(LeaseState.PENDING))
    world.now += 50.0
    again = State()
    for event in image(world.state, world.now):
        again.apply(event, 1000.0)
    for state, now in ((world.state, world.now), (again, 1000.0)):
        state.apply(GrantRevoked(promised), now)
        request = state.requests[waits]
        assert (request.choices, request.move_s, request.holding) == (((2, 3), (0, 1)), 9.0, (held,))
        assert now - request.asked_at == 50.0
    assert again.requests == world.state.requests
