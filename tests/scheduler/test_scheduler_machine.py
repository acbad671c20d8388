"""Random life of a pool, event by event; after each one every rule is checked from the leases alone."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlix.protocol.events import (
    DevicesDiscovered,
    DevicesReleased,
    GangCancelled,
    GrantRevoked,
    LeaseQuarantined,
    LeaseReleased,
    PipelineEnding,
    PipelineUnregistered,
)
from rlix.protocol.messages import LeaseState, LeaseStatus, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.image import image
from rlix.scheduler.plan import Plan, Shrink
from rlix.scheduler.planner import plan
from rlix.scheduler.policies.proportional import Proportional
from rlix.scheduler.snapshot import GangRequest, Snapshot
from rlix.scheduler.state import State
from tests.scheduler.world import INFER, TRAIN, World, devices, shuffled

PICK = st.integers(0, 10_000)
GANG_PHASES = [phase for phase in Phase if phase is not Phase.ROLLOUT]


def is_running_rollout(status: LeaseStatus) -> bool:
    return status.lease.phase is Phase.ROLLOUT and status.state is LeaseState.ACTIVE


def assert_rules_kept(before: Snapshot, changes: Plan) -> None:
    """Rules 1-4 for one cycle, recomputed by brute force; shares code with neither planner nor validator."""
    leases = {status.lease.epoch: status for status in before.leases}
    shrunk = [leases[shrink.epoch] for shrink in changes.shrinks]
    assert all(is_running_rollout(status) for status in shrunk), "only running rollouts may shrink"
    bundles = {(r.pipeline_id, r.cluster): r.bundles for r in before.rollouts}
    given_out = [set(grant.devices) for grant in changes.grants]
    given_out += [set(bundles[(e.pipeline_id, e.cluster)][e.bundle]) for e in changes.expands]
    kept = [set(status.lease.devices) for status in before.leases if status not in shrunk]
    taken = Counter(device for group in [*given_out, *kept] for device in group)
    promised = [s for s in before.leases if s.state is LeaseState.PENDING]
    for status in promised:  # a pending lease and the one draining below it share devices
        below = {device for other in before.leases if other != status for device in other.lease.devices}
        taken.subtract(below.intersection(status.lease.devices))
    assert max(taken.values(), default=0) <= 1, "a device was given twice"
    for status in shrunk:
        assert any(group & set(status.lease.devices) for group in given_out), "shrunk for nothing"
    assert_strict_priority(before, {grant.request_id: grant.devices for grant in changes.grants})


def place(before: Snapshot, request: GangRequest) -> tuple[float, ...]:
    """Of a request in the queue: by phase and arrival, unless somebody has waited for two minutes."""
    if all(before.now - other.asked_at < 120 for other in before.requests):
        return request.phase, request.id
    waited_s = before.now - request.asked_at
    if request.holding or waited_s < 120:
        return (0 if request.holding else 3), request.phase, request.id
    return (1, request.id) if waited_s >= 240 else (2, before.given_gpu_s[request.pipeline_id], request.id)


def assert_strict_priority(before: Snapshot, granted: dict[int, tuple[int, ...]]) -> None:
    pool = {device.id for device in before.devices}
    fixed = {d for status in before.leases if not is_running_rollout(status) for d in status.lease.devices}
    firsts = {r.id: next((set(c) for c in r.choices if pool.issuperset(c)), None) for r in before.requests}
    possible = [r for r in before.requests if firsts[r.id]]
    demand = {(r.pipeline_id, r.cluster): r.demand.trajectories for r in before.rollouts}
    leases = [status.lease for status in before.leases if is_running_rollout(status)]
    for request in possible:
        first = firsts[request.id]
        claim = set(granted.get(request.id, first))
        ahead = [other for other in possible if place(before, other) < place(before, request)]
        rivals = [other for other in ahead if set(granted.get(other.id, firsts[other.id])) & claim]
        if request.id in granted:
            assert all(other.id in granted for other in rivals), "a gang overtook a more urgent or earlier one"
            assert not any(other.id in granted for other in rivals), "overlapping gangs granted together"
            assert not fixed & claim, "granted devices that cannot be had"
        else:
            assert rivals or fixed & claim, "a gang that fits was left waiting"
        if claim != first and not request.work_gpu_s:  # who knows its length weighs all choices
            gangs = any(set(granted.get(o.id, firsts[o.id])) & first for o in ahead) or fixed & first
            worked = [lease for lease in leases if first & set(lease.devices)]
            busy = any(demand.get((lease.pipeline_id, lease.cluster)) for lease in worked)
            assert gangs or busy, "moved while nobody worked at home"
            others = {device for other, devices in granted.items() if other != request.id for device in devices}
            stopped = [lease for lease in leases if claim & set(lease.devices) and not others & set(lease.devices)]
            assert not any(demand.get((s.pipeline_id, s.cluster)) for s in stopped), "moved onto somebody's work"


class Pool(RuleBasedStateMachine):
    @initialize(count=st.integers(2, 10))
    def start(self, count: int) -> None:
        self.world = World(count, Proportional(patience_s=2.0))
        self.names = 0
        self.rng = random.Random(count)

    def some_pipeline(self, pick: int) -> str:
        names = sorted(self.world.state.registrations)
        return names[pick % len(names)]

    def has_pipelines(self) -> bool:
        return bool(self.world.state.registrations)

    @precondition(lambda self: len(self.world.state.registrations) < 6)
    @rule(seed=PICK, size=st.sampled_from([1, 1, 2, 3]))
    def register(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        ids = [device.id for device in self.world.state.devices]
        bundles = rng.randint(1, max(1, len(ids) // size))
        if bundles * size > len(ids):
            return
        infer = rng.sample(ids, bundles * size)
        train = rng.sample(ids, rng.randint(1, len(ids)))
        others = [rng.sample(ids, len(train)) for _ in range(rng.choice([0, 0, 1, 3]))]
        self.world.register(f"p{self.names}", infer, train, size, others)
        self.names += 1

    @precondition(has_pipelines)
    @rule(pick=PICK, trajectories=st.sampled_from([0, 0, 1, 2, 3, 7, 50, 51]))
    def report(self, pick: int, trajectories: int) -> None:
        self.world.demand(self.some_pipeline(pick), trajectories)

    @precondition(has_pipelines)
    @rule(
        pick=PICK,
        phase=st.sampled_from(GANG_PHASES),
        cluster=st.sampled_from([TRAIN, TRAIN, INFER]),
        part=st.booleans(),
    )
    def request(self, pick: int, phase: Phase, cluster: str, part: bool) -> None:
        name, rng = self.some_pipeline(pick), random.Random(pick)
        devices = rng.choice(self.world.state.registrations[name].cluster(cluster).choices)
        some = rng.sample(devices, rng.randint(1, len(devices)))
        self.world.request(name, phase, cluster, tuple(some) if part else ())

    @precondition(lambda self: self.world.state.requests)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        ids = sorted(self.world.state.requests)
        self.world.apply(GangCancelled(ids[pick % len(ids)]))

    def has_gangs(self) -> bool:
        return any(s.lease.phase is not Phase.ROLLOUT for s in self.world.leases(LeaseState.ACTIVE))

    @precondition(has_gangs)
    @rule(pick=PICK)
    def finish_gang(self, pick: int) -> None:
        gangs = [s for s in self.world.leases(LeaseState.ACTIVE) if s.lease.phase is not Phase.ROLLOUT]
        epoch = gangs[pick % len(gangs)].lease.epoch
        self.released(LeaseReleased(epoch, ReleaseReason.RELEASED))

    @precondition(has_gangs)
    @rule(pick=PICK)
    def give_back_a_part(self, pick: int) -> None:
        """The rest stays, under its epoch, and nothing else changes."""
        gangs = [s for s in self.world.leases(LeaseState.ACTIVE) if len(s.lease.devices) > 1 and s.lease.bundle is None]
        if not gangs:
            return
        before, others = gangs[pick % len(gangs)], dict(self.world.state.leases)
        devices = before.lease.devices
        given = tuple(random.Random(pick).sample(devices, 1 + pick % (len(devices) - 1)))
        assert self.world.apply(DevicesReleased(before.lease.epoch, given)) == ()
        after = self.world.state.leases[before.lease.epoch]
        assert after == replace(before, lease=replace(before.lease, devices=after.lease.devices))
        assert sorted((*after.lease.devices, *given)) == sorted(devices)
        assert {**others, before.lease.epoch: after} == self.world.state.leases
        assert all(self.world.state.holder(device) is None for device in given)

    @precondition(lambda self: self.world.leases(LeaseState.DRAINING))
    @rule(pick=PICK, reason=st.sampled_from([ReleaseReason.SHRUNK, ReleaseReason.KILLED]))
    def acknowledge(self, pick: int, reason: ReleaseReason) -> None:
        draining = self.world.leases(LeaseState.DRAINING)
        self.released(LeaseReleased(draining[pick % len(draining)].lease.epoch, reason))

    def released(self, event: LeaseReleased) -> None:
        waiting = {status.lease.epoch for status in self.world.leases(LeaseState.PENDING)}
        activated = [lease.epoch for lease in self.world.apply(event)]
        assert activated == sorted(activated) and set(activated) <= waiting
        assert set(activated) == waiting - {status.lease.epoch for status in self.world.leases(LeaseState.PENDING)}

    @precondition(lambda self: hasattr(self, "world") and self.world.leases(LeaseState.DRAINING))
    @rule(pick=PICK)
    def quarantine(self, pick: int) -> None:
        draining = self.world.leases(LeaseState.DRAINING)
        lease = draining[pick % len(draining)].lease
        for epoch in self.world.state.successors(lease.devices):
            self.world.apply(GrantRevoked(epoch))
        self.world.apply(LeaseQuarantined(lease.epoch, "locked"))

    @precondition(lambda self: hasattr(self, "world") and self.world.leases(LeaseState.QUARANTINED))
    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        quarantined = self.world.leases(LeaseState.QUARANTINED)
        self.released(LeaseReleased(quarantined[pick % len(quarantined)].lease.epoch, ReleaseReason.GIVEN_UP))

    @precondition(has_pipelines)
    @rule(pick=PICK)
    def depart(self, pick: int) -> None:
        name = self.some_pipeline(pick)
        self.world.apply(PipelineEnding(name, "left"))
        for status in self.world.state.leases_of(name):
            self.world.apply(LeaseReleased(status.lease.epoch, ReleaseReason.UNREGISTERED))
        self.world.apply(PipelineUnregistered(name, "left"))
        assert name not in {s.lease.pipeline_id for s in self.world.state.leases.values()}
        assert name not in {r.pipeline_id for r in self.world.state.requests.values()}

    @rule(count=st.integers(2, 12))
    def resize(self, count: int) -> None:
        self.world.apply(DevicesDiscovered(devices(count)))

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def plan_a_cycle(self) -> None:
        before = self.world.snapshot()
        changes = self.world.cycle()
        assert changes == plan(shuffled(before, self.rng), self.world.policy), "the plan depends on order or identity"
        assert_rules_kept(before, changes)

    @precondition(has_pipelines)
    @rule()
    def settle(self) -> None:
        """Without further events plans come to rest, and nobody stays at zero for no reason."""
        self.world.settle()
        assert_nobody_needlessly_at_zero(self.world)

    @invariant()
    def a_device_has_one_holder_and_at_most_one_successor(self) -> None:
        if not hasattr(self, "world"):
            return
        holders: Counter[int] = Counter()
        successors: Counter[int] = Counter()
        for status in self.world.state.leases.values():
            (successors if status.state is LeaseState.PENDING else holders).update(status.lease.devices)
        assert max(holders.values(), default=0) <= 1
        assert max(successors.values(), default=0) <= 1
        for status in self.world.leases(LeaseState.PENDING):
            assert any(device in holders for device in status.lease.devices), "pending without anybody to wait for"

    @invariant()
    def its_image_makes_up_the_same_state_but_for_demand(self) -> None:
        if not hasattr(self, "world"):
            return
        state, again = self.world.state, State()
        for event in image(state, self.world.now):
            again.apply(event, self.world.now)
        for view in ("devices", "allocated", "registrations", "admitted", "requests", "leases"):
            assert getattr(again, view) == getattr(state, view), view
        for epoch in state.leases:
            assert again.answered_by(epoch) == state.answered_by(epoch)
        for counter in ("next_epoch", "next_request_id", "next_device_id", "next_pipeline"):
            assert getattr(again, counter) == getattr(state, counter), counter

    @invariant()
    def every_lease_is_what_was_registered(self) -> None:
        if not hasattr(self, "world"):
            return
        for status in self.world.state.leases.values():
            lease = status.lease
            cluster = self.world.state.registrations[lease.pipeline_id].cluster(lease.cluster)
            if lease.bundle is None:
                assert lease.phase is not Phase.ROLLOUT and any(set(lease.devices) <= set(c) for c in cluster.choices)
            else:
                assert lease.phase is Phase.ROLLOUT and lease.devices == cluster.bundles[lease.bundle]

    @invariant()
    def waiting_is_counted_for_exactly_those_who_wait(self) -> None:
        if not hasattr(self, "world"):
            return
        held = self.world.held()
        for rollout in self.world.snapshot().rollouts:
            if rollout.pipeline_id in held or not rollout.demand.trajectories:
                assert rollout.waited_s == 0


def assert_nobody_needlessly_at_zero(world: World) -> None:
    """A rollout with demand and no bundle has no bundle that is free, or that others could spare."""
    snapshot = world.snapshot()
    pool = {device.id for device in snapshot.devices}
    on = {device: status for status in snapshot.leases for device in status.lease.devices}
    alive = [s for s in snapshot.leases if not pool.isdisjoint(s.lease.devices)]  # its job has not lost it all
    held = Counter(s.lease.pipeline_id for s in alive if is_running_rollout(s))
    demand = {r.pipeline_id: r.demand.trajectories for r in snapshot.rollouts}
    for rollout in snapshot.rollouts:
        if not rollout.demand.trajectories or rollout.pipeline_id in held:
            continue
        for bundle in rollout.bundles:
            losers = {on[device].lease.epoch: on[device] for device in bundle if device in on}
            if not pool.issuperset(bundle) or not all(is_running_rollout(status) for status in losers.values()):
                continue
            loss = Counter(status.lease.pipeline_id for status in losers.values())
            spared = all(demand[name] == 0 or held[name] - n >= 1 for name, n in loss.items())
            assert not spared, f"{rollout.pipeline_id} is at zero although bundle {bundle} could be had"


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 100_000), count=st.integers(2, 10))
def test_long_life_of_a_busy_pool(seed: int, count: int) -> None:
    """The same rules in the proportions of a busy pool, 150 events each, a cycle after most of them."""
    rng = random.Random(seed)
    pool = Pool()
    pool.start(count)
    events = {"register": 2, "report": 8, "request": 4, "finish_gang": 4, "acknowledge": 10, "cancel": 1}
    events |= {"give_back_a_part": 2, "pass_time": 4, "depart": 0.3, "resize": 0.3, "settle": 1, "plan_a_cycle": 6}
    for _ in range(150):
        state, pick = pool.world.state, rng.randrange(10_000)
        (event,) = rng.choices(list(events), list(events.values()))
        if event in {"plan_a_cycle", "settle"}:
            getattr(pool, event)()
        elif event == "register" and len(state.registrations) < 6:
            pool.register(pick, rng.choice([1, 1, 2, 3]))
        elif event == "pass_time":
            pool.pass_time(rng.random())
        elif event == "resize":
            pool.resize(rng.randint(2, 12))
        elif event == "acknowledge" and pool.world.leases(LeaseState.DRAINING):
            pool.acknowledge(pick, rng.choice([ReleaseReason.SHRUNK, ReleaseReason.KILLED]))
        elif event in ("finish_gang", "give_back_a_part") and pool.has_gangs():
            getattr(pool, event)(pick)
        elif event == "cancel" and state.requests:
            pool.cancel(pick)
        elif event in ("report", "request", "depart") and state.registrations:
            arguments: dict[str, list[Any]] = {
                "report": [rng.choice([0, 1, 3, 50, 51])],
                "request": [rng.choice(GANG_PHASES), TRAIN, rng.random() < 0.3],
            }
            getattr(pool, event)(pick, *arguments.get(event, []))
        if rng.random() < 0.7:
            pool.plan_a_cycle()
        pool.a_device_has_one_holder_and_at_most_one_successor()
        pool.every_lease_is_what_was_registered()
        pool.waiting_is_counted_for_exactly_those_who_wait()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 100_000), count=st.integers(1, 6), jobs=st.integers(2, 8))
def test_everybody_with_demand_gets_a_turn_within_bounded_time(seed: int, count: int, jobs: int) -> None:
    """Rollouts that never finish and hold everything: each waiting one runs after at most patience x jobs."""
    rng = random.Random(seed)
    world = World(count, Proportional(patience_s=2.0))
    for job in range(jobs):
        size = rng.choice([size for size in (1, 2, 3) if size <= count])
        width = rng.randint(1, count // size) * size
        world.register(f"p{job}", rng.sample(range(count), width), size=size)
    first_turn: dict[str, int] = {}
    seconds = 2 * (jobs + 1) * jobs
    for at in range(seconds):
        world.now = float(at)
        for job in range(jobs):
            world.demand(f"p{job}", rng.randint(1, 100))
        world.acknowledge()
        world.cycle()
        for name in world.held():
            first_turn.setdefault(name, at)
    assert len(first_turn) == jobs, f"never ran in {seconds} s: {set(world.state.registrations) - set(first_turn)}"


def test_brute_force_rules_notice_a_broken_plan() -> None:
    """The checker above can fail: a plan that shrinks for nothing is noticed."""
    world = World(2)
    world.register("a", [0, 1])
    world.demand("a", 5)
    world.cycle()
    snapshot = world.snapshot()
    with pytest.raises(AssertionError, match="for nothing"):
        assert_rules_kept(snapshot, Plan(shrinks=(Shrink(snapshot.leases[0].lease.epoch),)))
