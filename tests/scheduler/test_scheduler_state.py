"""State: what it refuses, what it leaves unchanged, and that it is a fold over its events."""

import pytest

from rlix.protocol.errors import PipelineGoneError
from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    DevicesReleased,
    DrainStarted,
    Event,
    GangCancelled,
    GangRequested,
    GrantRevoked,
    LeaseGranted,
    LeaseQuarantined,
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineEnding,
    PipelineRegistered,
    PipelineUnregistered,
)
from rlix.protocol.messages import Cluster, Demand, Lease, LeaseState, Registration, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.known import StateError
from rlix.scheduler.state import State
from tests.scheduler.world import INFER, TRAIN, World, devices


def busy_world() -> World:
    """Pipeline a: rollout bundle 0 on (0, 1) is lease 1, training on (2,) is lease 2; request 2 waits."""
    world = World(4)
    world.register("a", [0, 1, 2, 3], train=[2], size=2)
    world.demand("a", 1)
    world.cycle()
    world.request("a")
    world.cycle()
    world.request("a", Phase.OLD_LOG_PROBS)
    return world


def rollout_lease(epoch: int, ids: tuple[int, ...], bundle: int | None) -> LeaseGranted:
    return LeaseGranted(Lease(epoch, "a", INFER, Phase.ROLLOUT, ids, bundle))


def registered(*clusters: Cluster) -> PipelineRegistered:
    return PipelineRegistered(Registration("new", "ns", clusters))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (DevicesDiscovered(devices(2) + devices(1)), "id twice"),
        (PipelineAllocated("a", "ft"), "already allocated"),
        (PipelineRegistered(Registration("a", "ns", ())), "already registered"),
        (registered(Cluster(INFER, 2, (0, 1, 2))), "cannot be cut"),
        (registered(Cluster(INFER, 1, (0, 0))), "none twice"),
        (registered(Cluster(INFER, 1, ())), "at least one"),
        (registered(Cluster(INFER, 1, (0,)), Cluster(INFER, 1, (1,))), "name twice"),
        (registered(Cluster(TRAIN, 2, (0, 1), ((2, 3), (1,)))), r"alternative \(1,\) must be .* in bundles of 2"),
        (PipelineAdmitted("b"), "not registered"),
        (PipelineUnregistered("b", ""), "not registered"),
        (GangRequested(2, "a", TRAIN, Phase.ACTOR_TRAINING), "does not grow"),
        (GangRequested(3, "a", TRAIN, Phase.ROLLOUT), "asks for no gang"),
        (GangRequested(3, "a", "critic", Phase.ACTOR_TRAINING), "no cluster 'critic'"),
        (GangRequested(3, "a", TRAIN, Phase.ACTOR_TRAINING, first=(3,), exact=True), r"has no devices \(3,\); it has"),
        (GangCancelled(1), "not waiting"),
        (DemandReported("a", INFER, Demand(-1)), "negative"),
        (DemandReported("b", INFER, Demand(1)), "not registered"),
        (rollout_lease(2, (0, 1), 0), "does not grow"),
        (rollout_lease(3, (0, 1), 0), "belongs to lease 1"),
        (rollout_lease(3, (2, 3), 1), "belongs to lease 2"),
        (rollout_lease(3, (2, 3), 0), "is not devices"),
        (rollout_lease(3, (2, 3), 2), "bundle 2 of 2"),
        (rollout_lease(3, (2, 3), None), "bundle None"),
        (LeaseGranted(Lease(3, "a", TRAIN, Phase.OLD_LOG_PROBS, (3,)), 2), "asked for"),
        (LeaseGranted(Lease(3, "a", TRAIN, Phase.ACTOR_TRAINING, (2,)), 2), "asked for"),
        (LeaseGranted(Lease(3, "a", TRAIN, Phase.ACTOR_TRAINING, (2,)), 1), "not waiting"),
        (DrainStarted(9), "not held"),
        (LeaseReleased(9, ReleaseReason.RELEASED), "not held"),
        (DevicesReleased(9, (0,)), "not held"),
        (DevicesReleased(1, (0,)), "only an active gang's"),
        (DevicesReleased(2, (2,)), r"\(2,\) are not a part of the devices"),
        (DevicesReleased(2, (3,)), r"\(3,\) are not a part of the devices"),
        (DevicesReleased(2, ()), r"\(\) are not a part of the devices"),
    ],
)
def test_a_contradiction_is_refused_and_changes_nothing(event: Event, message: str) -> None:
    world = busy_world()
    before = world.snapshot()
    with pytest.raises((StateError, PipelineGoneError), match=message):
        world.apply(event)
    assert world.snapshot() == before
    assert (world.state.next_epoch, world.state.next_request_id) == (3, 3)


def test_a_pending_lease_becomes_active_with_its_last_device() -> None:
    world = busy_world()
    world.apply(GangCancelled(2))
    world.apply(LeaseReleased(2, ReleaseReason.RELEASED))
    world.apply(DrainStarted(1))
    world.register("b", [0], train=[1, 2])
    world.request("b")
    assert world.apply(LeaseGranted(Lease(3, "b", TRAIN, Phase.ACTOR_TRAINING, (1, 2)), 3)) == ()
    assert world.state.leases[3].state is LeaseState.PENDING
    with pytest.raises(StateError, match="promised to lease 3"):
        world.apply(rollout_lease(4, (2, 3), 1))
    (active,) = world.apply(LeaseReleased(1, ReleaseReason.SHRUNK))
    assert active.epoch == 3 and world.state.leases[3].state is LeaseState.ACTIVE


def test_a_quarantined_lease_keeps_its_devices_and_who_waited_goes_back_to_its_place() -> None:
    world = busy_world()
    world.apply(DrainStarted(1))
    world.register("b", [0], train=[0])
    world.request("b")
    world.apply(LeaseGranted(Lease(3, "b", TRAIN, Phase.ACTOR_TRAINING, (0,), key="k"), 3))
    with pytest.raises(StateError, match=r"leases \[3\] wait for it; revoke them"):
        world.apply(LeaseQuarantined(1, "locked by process 7"))
    with pytest.raises(StateError, match="only a pending lease"):
        world.apply(GrantRevoked(1))
    world.apply(GrantRevoked(3))
    assert 3 in world.state.requests
    world.apply(LeaseQuarantined(1, "locked by process 7"))
    assert world.state.leases[1].reason == "locked by process 7"
    world.cycle()
    assert 3 in world.state.requests  # the planner does not give a quarantined device away
    world.apply(LeaseReleased(1, ReleaseReason.GIVEN_UP))
    world.cycle()
    assert 3 not in world.state.requests


def test_unregistering_frees_everything_and_activates_who_waited() -> None:
    world = World(2)
    world.register("a", [0, 1])
    world.register("b", [0], train=[0, 1])
    world.demand("a", 2)
    world.cycle()
    request = world.request("b")
    world.cycle()
    assert world.apply(PipelineEnding("a", "finished")) == ()
    with pytest.raises(StateError, match=r"still holds leases \[1, 2\]"):
        world.apply(PipelineUnregistered("a", "finished"))
    assert world.apply(LeaseReleased(1, ReleaseReason.UNREGISTERED)) == ()
    (active,) = world.apply(LeaseReleased(2, ReleaseReason.UNREGISTERED))
    world.apply(PipelineUnregistered("a", "finished"))
    assert active.pipeline_id == "b" and request not in world.state.requests
    assert world.state.leases_of("a") == () and ("a", INFER) not in world.state.demands
    world.apply(LeaseReleased(active.epoch, ReleaseReason.RELEASED))
    world.apply(PipelineUnregistered("b", "finished"))
    snapshot = world.snapshot()
    assert snapshot.leases == snapshot.rollouts == snapshot.requests == ()


def test_only_admitted_pipelines_are_planned_for() -> None:
    state = State()
    state.apply(DevicesDiscovered(devices(2)), 0.0)
    state.apply(PipelineRegistered(Registration("a", "ns", (Cluster(INFER, 1, (0, 1)),))), 0.0)
    state.apply(DemandReported("a", INFER, Demand(5)), 0.0)
    state.apply(GangRequested(1, "a", INFER, Phase.INITIALIZATION), 0.0)
    assert state.snapshot(0.0).rollouts == state.snapshot(0.0).requests == ()
    with pytest.raises(StateError, match="not admitted"):
        state.apply(rollout_lease(1, (0,), 0), 0.0)
    state.apply(PipelineAdmitted("a"), 0.0)
    assert len(state.snapshot(0.0).rollouts) == len(state.snapshot(0.0).requests) == 1


def test_only_gangs_are_expected_on_devices() -> None:
    """Each of a pipeline's rollouts knows where its gangs will be; other rollouts of the pipeline are no gangs."""
    state = State()
    state.apply(DevicesDiscovered(devices(6)), 0.0)
    rollouts = (Cluster("draft", 1, (0,), elastic=True), Cluster("policy", 1, (1, 2), elastic=True))
    gangs = (Cluster(TRAIN, 1, (3, 4), ((5,),)), Cluster("critic", 1, (4,)))
    state.apply(PipelineRegistered(Registration("a", "ns", (*rollouts, *gangs))), 0.0)
    state.apply(PipelineAdmitted("a"), 0.0)
    for cluster in rollouts:
        state.apply(DemandReported("a", cluster.name, Demand(1)), 0.0)
    assert [r.gang_devices for r in state.snapshot(0.0).rollouts] == [(3, 4), (3, 4)]
    state.apply(GangRequested(1, "a", TRAIN, Phase.ACTOR_TRAINING), 0.0)
    state.apply(LeaseGranted(Lease(1, "a", TRAIN, Phase.ACTOR_TRAINING, (5,)), 1), 0.0)
    # Narrower and elsewhere: the next one is expected where it is as wide as it can be.
    assert [r.gang_devices for r in state.snapshot(0.0).rollouts] == [(3, 4), (3, 4)]


def test_equal_placements_share_one_tuple() -> None:
    world = World(4)
    for name in ("a", "b"):
        world.register(name, [0, 1, 2, 3], size=2)
        world.demand(name, 1)
    one, two = world.snapshot().rollouts
    assert one.bundles is two.bundles


def test_waiting_is_counted_in_seconds_whatever_is_reported() -> None:
    world = World(1)
    for name in ("a", "b"):
        world.register(name, [0])
    world.demand("a", 3)
    world.cycle()
    world.now = 10.0
    world.demand("b", 3)
    world.now = 12.5
    for trajectories in (2, 1, 2):
        world.demand("a", trajectories)
        world.demand("b", trajectories)
    assert {r.pipeline_id: r.waited_s for r in world.snapshot().rollouts} == {"a": 0.0, "b": 2.5}
    world.demand("b", 0)
    assert all(r.waited_s == 0.0 for r in world.snapshot().rollouts)


def test_something_else_than_an_event_is_refused() -> None:
    with pytest.raises(TypeError, match="not an event"):
        State().apply("hello", 0.0)  # type: ignore[arg-type]
