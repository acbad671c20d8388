"""No policy passes bundles round: not in one plan, and not from plan to plan while nothing else changes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlix.protocol.errors import PlanError
from rlix.protocol.messages import Demand, Lease, LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.exchanges import circles
from rlix.scheduler.plan import Expand, Plan, Shrink
from rlix.scheduler.planner import plan
from rlix.scheduler.policies import POLICIES, Pool
from rlix.scheduler.snapshot import Bundles, RolloutState, Snapshot
from rlix.scheduler.validate import check
from tests.scheduler.world import INFER, devices

MOST_PLANS = 40


def lease(epoch: int, name: str, bundles: Bundles, number: int) -> LeaseStatus:
    held = Lease(epoch, name, INFER, Phase.ROLLOUT, bundles[number], number)
    return LeaseStatus(held, LeaseState.ACTIVE)


def crowded(rng: random.Random) -> Snapshot:
    """A pool with every device in use, by jobs that were given different amounts and gain differently by more."""
    count, jobs, width = rng.choice([8, 16]), rng.randint(3, 8), rng.choice([1, 1, 2])
    bundles = Bundles(tuple(tuple(range(d, d + width)) for d in range(0, count, width)))
    weights = [rng.random() ** 2 for _ in range(jobs)]
    holders = [rng.choices(range(jobs), weights)[0] for _ in bundles]
    load_s = rng.choice([0.01, 0.5, 3.0])
    rollouts = tuple(
        RolloutState(
            f"p{job}",
            INFER,
            bundles,
            Demand(
                rng.randint(2, 400),
                knee=rng.choice([16.0, 64.0]),
                work_s=rng.choice([0.0, 50.0, 900.0]),
                floor_s=rng.choice([0.0, 90.0, 190.0]),
                left_gpu_s=1e4 * rng.random(),
                load_s=load_s,
            ),
            waited_s=0.0 if job in holders else 5.0,
            held_s=50.0 if job in holders else 0.0,
            served_gpu_s=3000 * rng.random(),
            used_gpu_s=5000 * rng.random(),
            age_s=1000.0,
        )
        for job in range(jobs)
    )
    leases = tuple(lease(epoch, f"p{holder}", bundles, epoch - 1) for epoch, holder in enumerate(holders, 1))
    return Snapshot(devices(count), (), rollouts, leases)


def after(snapshot: Snapshot, changes: Plan) -> Snapshot:
    """Everything is given back and loaded at the same moment."""
    shrunk = {shrink.epoch for shrink in changes.shrinks}
    leases = [status for status in snapshot.leases if status.lease.epoch not in shrunk]
    epoch = max(status.lease.epoch for status in snapshot.leases)
    bundles = {r.pipeline_id: r.bundles for r in snapshot.rollouts}
    for number, expand in enumerate(changes.expands, epoch + 1):
        leases.append(lease(number, expand.pipeline_id, Bundles(bundles[expand.pipeline_id]), expand.bundle))
    before, counts = held(snapshot), Counter(status.lease.pipeline_id for status in leases)
    gained = {expand.pipeline_id for expand in changes.expands}
    rollouts = tuple(
        replace(
            r,
            waited_s=0.0 if counts[r.pipeline_id] or before[r.pipeline_id] else r.waited_s,
            held_s=r.held_s if counts[r.pipeline_id] and before[r.pipeline_id] else 0.0,
            gained_s=0.0 if r.pipeline_id in gained else r.gained_s,
        )
        for r in snapshot.rollouts
    )
    return replace(snapshot, rollouts=rollouts, leases=tuple(leases))


def held(snapshot: Snapshot) -> Counter[str]:
    return Counter(status.lease.pipeline_id for status in snapshot.leases)


@settings(max_examples=150)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 10**6))
@example("rlix", 50)
@example("rlix", 329)
def test_no_plan_leaves_every_count_as_it_was_and_plans_come_to_rest(name: str, seed: int) -> None:
    snapshot, shapes = crowded(random.Random(seed)), []
    for _ in range(MOST_PLANS):
        changes = plan(snapshot, POLICIES[name])
        if not changes:
            return
        check(snapshot, changes)
        snapshot = after(snapshot, changes)
        shapes.append(sorted(held(snapshot).items()))
        assert len(shapes) < 2 or shapes[-1] != shapes[-2], "a plan that leaves every count as it was"
    raise AssertionError(f"plans go on while nothing changes: {shapes[-6:]}")


class Rotating:
    """Gives everybody's bundle to the next."""

    def divide(self, pool: Pool) -> list[Expand]:
        after = [pool.holdings[at].bundle for at in pool.owner.values()]
        names = [pool.rollouts[h.rollout] for h in pool.holdings]
        return [
            Expand(rollout.pipeline_id, rollout.cluster, bundle)
            for rollout, bundle in zip(names, after[1:] + after[:1], strict=True)
        ]


def three_with_one_each() -> Snapshot:
    bundles = Bundles(tuple((d,) for d in range(3)))
    rollouts = tuple(RolloutState(f"p{job}", INFER, bundles, Demand(5), held_s=1e4) for job in range(3))
    return Snapshot(devices(3), (), rollouts, tuple(lease(job + 1, f"p{job}", bundles, job) for job in range(3)))


def test_the_planner_leaves_out_what_a_policy_passes_round() -> None:
    assert not plan(three_with_one_each(), Rotating())


def test_the_validator_refuses_bundles_that_go_round() -> None:
    expands = tuple(Expand(f"p{job}", INFER, (job + 1) % 3) for job in range(3))
    with pytest.raises(PlanError, match="passed round and leave everybody with as many as before: p0, p1, p2"):
        check(three_with_one_each(), Plan(tuple(map(Shrink, (1, 2, 3))), (), expands))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_what_is_left_out_is_as_many_of_everybodys_and_leaves_no_circle(edges: list[tuple[int, int]]) -> None:
    takes = dict(enumerate(edges))
    out = circles(takes)
    assert Counter(takes[bundle][0] for bundle in out) == Counter(takes[bundle][1] for bundle in out)
    left = {edge for bundle, edge in takes.items() if bundle not in out}
    for _ in range(6):
        left = {(giver, taker) for giver, taker in left if any(taker == other for other, _ in left)}
    assert not left
