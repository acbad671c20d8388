"""The default policy: hand-made cases for each of its rules, and random pools under the validator."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.protocol.messages import Demand, Device, DeviceKind, Lease, LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.plan import Plan
from rlix.scheduler.planner import plan
from rlix.scheduler.policies.rlix import Rlix, _Division, rlix
from rlix.scheduler.snapshot import Bundles, GangRequest, RolloutState, Snapshot
from rlix.scheduler.validate import check

INFER = "actor_infer"


def demand(trajectories: int, **learnt: float) -> Demand:
    return Demand(trajectories, knee=64.0, work_s=600.0, floor_s=60.0, **learnt)


def rollout(name: str, gpus: int, wants: Demand, *, width: int = 1, **more: object) -> RolloutState:
    bundles = tuple(tuple(range(i, i + width)) for i in range(0, gpus, width))
    return RolloutState(name, INFER, bundles, wants, **more)  # type: ignore[arg-type]


def held(epoch: int, name: str, *devices: int, bundle: int | None = None) -> LeaseStatus:
    number = devices[0] if bundle is None else bundle
    return LeaseStatus(Lease(epoch, name, INFER, Phase.ROLLOUT, devices, number), LeaseState.ACTIVE)


def decide(gpus: int, rollouts: list[RolloutState], leases: tuple[LeaseStatus, ...] = (), policy: Rlix = rlix) -> Plan:
    devices = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(gpus))
    snapshot = Snapshot(devices, (), tuple(rollouts), leases)
    decided = plan(snapshot, policy)
    check(snapshot, decided)
    return decided


def widths(decided: Plan) -> dict[str, int]:
    names = [expand.pipeline_id for expand in decided.expands]
    return {name: names.count(name) for name in names}


def test_alone_it_takes_what_would_idle() -> None:
    assert widths(decide(8, [rollout("a", 8, demand(512))])) == {"a": 8}
    assert widths(decide(8, [rollout("a", 8, demand(3))])) == {"a": 3}  # more than one bundle a trajectory are no use


def test_everybody_has_one_before_anybody_has_two() -> None:
    assert widths(decide(3, [rollout("a", 3, demand(5000)), *(rollout(n, 3, demand(4)) for n in "bc")])) == {
        "a": 1,
        "b": 1,
        "c": 1,
    }


def test_the_second_bundle_goes_to_the_larger_batch_per_knee() -> None:
    assert widths(decide(4, [rollout("bulk", 4, demand(512)), rollout("tail", 4, demand(10))])) == {
        "bulk": 3,
        "tail": 1,
    }


def test_a_running_bundle_moves_only_when_that_pays() -> None:
    both = (held(1, "a", 0), held(2, "a", 1), held(3, "b", 2))
    equals = [rollout("a", 3, demand(256)), rollout("b", 3, demand(256))]
    assert not decide(3, equals, both)
    tail = [rollout("a", 3, demand(10)), rollout("b", 3, demand(256))]
    decided = decide(3, tail, both)
    assert len(decided.shrinks) == 1
    assert widths(decided) == {"b": 1}


def test_warm_bundles_without_demand_are_kept_until_somebody_has_a_use_for_them() -> None:
    parked = (held(1, "a", 0), held(2, "a", 1), held(3, "a", 2))
    assert not decide(3, [rollout("a", 3, Demand(0))], parked)
    decided = decide(3, [rollout("a", 3, Demand(0)), rollout("b", 3, demand(2))], parked)
    assert (len(decided.shrinks), widths(decided)) == (2, {"b": 2})


def test_among_equals_the_poorest_then_the_shortest_goes_first() -> None:
    rich, poor = (rollout(n, 1, demand(100), used_gpu_s=used, age_s=100.0) for n, used in (("a", 1e3), ("b", 10.0)))
    assert widths(decide(1, [rich, poor])) == {"b": 1}
    served = {"gang_devices": (0,), "used_gpu_s": 1000.0, "age_s": 100.0}
    long, short = (rollout(n, 1, demand(100, left_gpu_s=left), **served) for n, left in (("a", 9e3), ("b", 50.0)))
    assert widths(decide(1, [long, short])) == {"b": 1}


def test_a_rollout_sits_where_its_own_gang_will_come() -> None:
    decided = decide(4, [rollout("a", 4, demand(2), gang_devices=(2, 3))])
    assert [expand.bundle for expand in decided.expands] == [2, 3]


def about_to_train(trajectories: int = 4) -> RolloutState:
    """A rollout on device 0 that ends in ten seconds; its job then trains on devices 1 and 2."""
    return rollout("a", 1, Demand(trajectories, knee=64.0, floor_s=8.0, work_s=2.0, load_s=2.0), gang_devices=(1, 2))


def test_devices_that_a_gang_will_take_are_used_last() -> None:
    decided = decide(4, [about_to_train(), rollout("b", 4, demand(1000, load_s=3.0))], (held(1, "a", 0),))
    assert [e.bundle for e in decided.expands] == [3, 1, 2]


def test_nothing_is_loaded_between_two_gangs_of_a_job() -> None:
    between = rollout("a", 2, Demand(0), gang_devices=(0,), gang_expected=True)
    starving = rollout("b", 2, demand(1000), waited_s=10_000.0)
    assert [expand.bundle for expand in decide(2, [between, starving]).expands] == [1]
    silent = rollout("a", 2, Demand(0), gang_devices=(0,))
    assert len(decide(2, [silent, starving]).expands) == 2


def test_nothing_is_loaded_where_a_gang_waits_only_for_rollouts_to_drain() -> None:
    devices = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(3))
    request = GangRequest(1, "a", "actor_train", Phase.ACTOR_TRAINING, (0, 1))
    draining = LeaseStatus(Lease(1, "c", INFER, Phase.ROLLOUT, (0,), 0), LeaseState.DRAINING)
    working = LeaseStatus(Lease(1, "c", "actor_train", Phase.ACTOR_TRAINING, (0,)), LeaseState.ACTIVE)
    for lease, bundles in ((draining, [2]), (working, [2, 1])):
        decided = plan(Snapshot(devices, (request,), (rollout("b", 3, demand(1000)),), (lease,)), rlix)
        assert [expand.bundle for expand in decided.expands] == bundles


def test_nobody_waits_for_ever() -> None:
    holders = (held(1, "a", 0), held(2, "b", 1))
    rollouts = [rollout(name, 2, demand(100), held_s=rlix.turn_s) for name in "ab"]
    assert not decide(2, [*rollouts, rollout("c", 2, demand(100), waited_s=rlix.starving_s - 0.1)], holders)
    assert widths(decide(2, [*rollouts, rollout("c", 2, demand(100), waited_s=rlix.starving_s)], holders)) == {"c": 1}


@st.composite
def pools(draw: st.DrawFn) -> Snapshot:
    gpus = 8
    rollouts, leases, taken = [], [], set[int]()
    for index in range(draw(st.integers(1, 5))):
        width = draw(st.sampled_from([1, 2, 4]))
        wants = Demand(
            draw(st.sampled_from([0, 1, 3, 100, 1000])),
            knee=draw(st.sampled_from([0.0, 8.0, 96.0])),
            work_s=draw(st.floats(0, 500)),
            floor_s=draw(st.floats(0, 100)),
            left_gpu_s=draw(st.floats(0, 1e5)),
            load_s=draw(st.sampled_from([0.0, 6.0])),
        )
        gang = tuple(range(4)) if draw(st.booleans()) else tuple(range(4, 8))
        known = {"gang_devices": gang, "gang_expected": draw(st.sampled_from([False, False, True]))}
        seconds = {name: draw(st.floats(0, 1e4)) for name in ("waited_s", "used_gpu_s", "age_s")}
        one = rollout(f"p{index}", gpus, wants, width=width, **known, **seconds)
        rollouts.append(one)
        for number, devices in enumerate(one.bundles):
            if draw(st.booleans()) and taken.isdisjoint(devices):
                taken.update(devices)
                state = draw(st.sampled_from([LeaseState.ACTIVE, LeaseState.ACTIVE, LeaseState.PENDING]))
                lease = Lease(len(leases) + 1, one.pipeline_id, INFER, Phase.ROLLOUT, devices, number)
                leases.append(LeaseStatus(lease, state))
    requests = ()
    if draw(st.booleans()):
        requests = (GangRequest(1, "p0", "actor_train", Phase.ACTOR_TRAINING, rollouts[0].gang_devices),)
    devices = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(gpus))
    return Snapshot(devices, requests, tuple(rollouts), tuple(leases))


@given(pools())
@settings(max_examples=200, deadline=None)
def test_every_plan_is_valid_repeatable_and_leaves_no_free_bundle_to_the_idle(snapshot: Snapshot) -> None:
    decided = plan(snapshot, rlix)
    check(snapshot, decided)
    assert plan(snapshot, rlix) == decided
    shuffled = Snapshot(snapshot.devices, snapshot.requests, snapshot.rollouts[::-1], snapshot.leases[::-1])
    assert plan(shuffled, rlix) == decided
    derived = tuple(replace(r, bundles=Bundles(r.bundles)) for r in snapshot.rollouts)
    assert plan(replace(snapshot, rollouts=derived), rlix) == decided
    after = {d for s in snapshot.leases for d in s.lease.devices}
    after |= {d for g in decided.grants for d in g.devices}
    bundles = {r.pipeline_id: r.bundles for r in snapshot.rollouts}
    after |= {d for e in decided.expands for d in bundles[e.pipeline_id][e.bundle]}
    after |= {d for r in snapshot.requests for d in r.devices}  # kept for a gang, as are those where one will come
    after |= {d for r in snapshot.rollouts if r.gang_expected or r.demand.floor_s for d in r.gang_devices}
    served = {s.lease.pipeline_id for s in snapshot.leases} | {e.pipeline_id for e in decided.expands}
    for one in snapshot.rollouts:
        if one.demand.trajectories and one.pipeline_id not in served:
            assert all(not after.isdisjoint(devices) for devices in one.bundles)


def crowded(rng: random.Random) -> Snapshot:
    """A pool nearly all of which is held, in bundles of several widths, by some who have just been given one."""
    gpus, leases, taken = 64, list[LeaseStatus](), set[int]()
    bundles = {w: Bundles(tuple(tuple(range(d, d + w)) for d in range(0, gpus, w))) for w in (1, 2, 4, 8)}
    rollouts = [
        RolloutState(
            f"p{index}",
            INFER,
            bundles[rng.choice((1, 1, 2, 4, 8))],
            Demand(rng.choice([0, 1, 2, 60, 2000]), knee=rng.choice([4.0, 64.0]), load_s=rng.choice([0.0, 0.5, 9.0])),
            waited_s=rng.choice([0.0, 25.0, 700.0]),
            held_s=300.0 * rng.random(),
            served_gpu_s=30000.0 * rng.random(),
            used_gpu_s=50000.0 * rng.random(),
            age_s=9000.0,
            gained_s=rng.choice([1.0, math.inf]),
        )
        for index in range(rng.randint(6, 30))
    ]
    for _ in range(3 * gpus):
        one = rng.choice(rollouts)
        number = rng.randrange(len(one.bundles))
        if taken.isdisjoint(one.bundles[number]):
            taken.update(one.bundles[number])
            lease = Lease(len(leases) + 1, one.pipeline_id, INFER, Phase.ROLLOUT, one.bundles[number], number)
            leases.append(LeaseStatus(lease, LeaseState.ACTIVE))
    devices = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(gpus))
    return Snapshot(devices, (), tuple(rollouts), tuple(leases))


def test_what_a_division_does_not_look_at_again_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = [crowded(random.Random(seed)) for seed in range(150)]
    plans = [plan(snapshot, rlix) for snapshot in snapshots]
    monkeypatch.setattr(_Division, "_out_of_reach", lambda *_: math.inf)
    monkeypatch.setattr(_Division, "_keeps", lambda *_: False)
    assert [plan(snapshot, rlix) for snapshot in snapshots] == plans
