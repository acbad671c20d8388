"""The simulation: small cases by hand, conservation, determinism, and bounds that bound every policy."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.protocol.events import Event
from rlix.protocol.messages import Demand
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.plan import Expand
from rlix.scheduler.policies.base import Policy, Pool
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.sim.bounds import bounds
from rlix.sim.clock import VirtualClock
from rlix.sim.engine import Simulation
from rlix.sim.gangs_alone import gangs_alone
from rlix.sim.jobs import draw_jobs
from rlix.sim.ledger import Use
from rlix.sim.pool import admit, new_core
from rlix.sim.results import POLICIES, simulate_one
from rlix.sim.trace import SimulationError
from rlix.sim.workload import Workload
from tests.sim.clairvoyant import best_known

# One trajectory length, so that a rollout on any number of bundles takes 1,000 tokens × 10 ms.
ONE: dict[str, Any] = {
    "name": "one",
    "pool": {"gpus": 4, "gpus_per_node": 4},
    "switching": {"expand_s": 5, "shrink_s": 2, "sync_s": 1},
    "jobs": [
        {
            "name": "a",
            "steps": 2,
            "initialization_s": 10,
            "rollout": {
                "trajectories": 4,
                "lengths": {"median": 1000, "sigma": 0, "cap": 1000},
                "decode": {"token_ms": 10, "kv_us": 0, "prefill_us": 0},
            },
            "gangs": [{"phase": "actor_training", "gpus": 4, "seconds": 20, "jitter": 0}],
        }
    ],
}


def two_jobs() -> Workload:
    data = copy.deepcopy(ONE)
    data["jobs"][0]["count"] = 2
    data["jobs"][0]["steps"] = 1
    return Workload.model_validate(data)


@pytest.mark.parametrize("policy", ["rlix", "proportional", "slots", "exclusive", "static", "timeslice"])
def test_one_job_by_hand(policy: str) -> None:
    """Per step: load 5, decode 10, drain 2, train 20; before it all, 10 to initialise."""
    row = simulate_one(Workload.model_validate(ONE), policy, 0)
    assert row.makespan_s == pytest.approx(10 + 2 * (5 + 10 + 2 + 20))
    assert row.critical_bound_s == pytest.approx(10 + 2 * (10 + 20))
    assert row.tight_bound_s == pytest.approx((10 * 4 + 2 * (10 + 20 * 4)) / 4)
    assert row.steps == 2


@pytest.mark.parametrize("policy", ["rlix", "proportional"])
def test_gpus_beyond_the_trajectories_are_surplus(policy: str) -> None:
    """Of four GPUs one decodes the only trajectory; nobody could use the others."""
    data = copy.deepcopy(ONE)
    data["jobs"][0]["rollout"]["trajectories"] = 1
    row = simulate_one(Workload.model_validate(data), policy, 0)
    assert row.idle_share == pytest.approx(3 / 4)
    assert row.surplus_share == pytest.approx(3 / 4)


def test_gpus_that_a_part_keeps_from_others_are_idle_but_no_surplus() -> None:
    """Each job's part is two GPUs. One of the other's two could decode this one's third trajectory."""
    data = copy.deepcopy(ONE)
    data["jobs"][0]["rollout"]["trajectories"] = 3
    data["jobs"] = [data["jobs"][0], copy.deepcopy(data["jobs"][0]) | {"name": "b", "arrives_s": 1000}]
    row = simulate_one(Workload.model_validate(data), "static", 0)
    assert row.idle_share == pytest.approx(2 / 4)
    assert row.surplus_share == pytest.approx(1 / 4)


def test_two_jobs_one_after_another_by_hand() -> None:
    """The second waits for the whole of the first: 10 + 5 + 10 + 2 + 20 each."""
    row = simulate_one(two_jobs(), "exclusive", 0)
    assert sorted(row.job_s.values()) == pytest.approx([47, 94])


def test_gangs_alone_by_hand() -> None:
    """Initialization 0-10 and 10-20, rollouts until 20 and 30, training 20-40 and 40-60: the second waits twice."""
    workload = two_jobs()
    assert sorted(gangs_alone(workload, draw_jobs(workload, 0)).values()) == pytest.approx([40, 60])


def test_two_jobs_in_equal_parts_by_hand() -> None:
    """On two GPUs each, gangs of four take twice as long: 20 + 5 + 10 + 2 + 40, side by side."""
    row = simulate_one(two_jobs(), "static", 0)
    assert sorted(row.job_s.values()) == pytest.approx([77, 77])


@pytest.mark.parametrize("policy", ["rlix", "proportional"])
def test_two_jobs_that_share_by_hand(policy: str) -> None:
    """Gangs of four exclude each other: initialise until 10 and 20; both load until 25 and decode until 35 on two
    bundles each; the first trains from 37 to 57, the second from then to 77."""
    row = simulate_one(two_jobs(), policy, 0)
    assert sorted(row.job_s.values()) == pytest.approx([57, 77])


small = st.fixed_dictionaries(
    {
        "gpus": st.sampled_from([4, 8]),
        "jobs": st.integers(1, 5),
        "tensor_parallel": st.sampled_from([1, 2]),
        "gang": st.sampled_from([1, 2, 4]),
        "same": st.booleans(),
        "moving": st.booleans(),
        "arrivals": st.sampled_from(["together", "poisson", "staggered"]),
        "agentic": st.booleans(),
        "caches": st.booleans(),
        "failing": st.booleans(),
        "sigma": st.floats(0.0, 1.3),
        "seed": st.integers(0, 1000),
    }
)


def build(case: dict[str, Any]) -> Workload:
    rollout: dict[str, Any] = {
        "trajectories": 40,
        "tensor_parallel": case["tensor_parallel"],
        "lengths": {"median": 600, "sigma": case["sigma"], "cap": 4096, "cap_share": 0.05},
        "decode": {"knee": 8, "max_batch": 16},
    }
    if case["agentic"]:
        rollout["decode"]["prefix_cache"] = case["caches"]
        rollout["environment"] = {"reset_p50_s": 3, "reset_p99_s": 9, "result_tokens": 30, "failure_rate": 0.1}
    return Workload.model_validate(
        {
            "name": "drawn",
            "pool": {"gpus": case["gpus"], "gpus_per_node": 4},
            "arrivals": {"kind": case["arrivals"], "load": 0.8, "spread_s": 100},
            "failures": {"mtbf_hours": 0.5 if case["failing"] else None},
            "jobs": [
                {
                    "name": "a",
                    "count": case["jobs"],
                    "steps": 2,
                    "gang_placement": "same" if case["same"] else "spread",
                    "gangs_move": case["moving"],
                    "rollout": rollout,
                    "gangs": [
                        {"phase": "old_log_probs", "gpus": case["gang"], "seconds": 5},
                        {"phase": "actor_training", "gpus": case["gang"], "seconds": 15},
                    ],
                }
            ],
        }
    )


@given(small, st.sampled_from(sorted(POLICIES)))
@settings(max_examples=60, deadline=None)
def test_work_and_time_are_conserved_and_no_policy_beats_the_bounds(case: dict[str, Any], policy: str) -> None:
    workload = build(case)
    jobs = draw_jobs(workload, case["seed"])
    limits = bounds(jobs, case["gpus"])
    trace = Simulation(workload, jobs, POLICIES[policy], seed=case["seed"], horizon_s=1e6).run()

    spent = trace.ledger.gpu_s
    assert sum(spent) == pytest.approx(case["gpus"] * trace.ledger.now)
    assert trace.ledger.idle == case["gpus"]
    assert set(trace.finished) == {job.id for job in jobs}
    assert trace.steps == sum(job.steps for job in jobs)
    steps = [(job, job.step(number)) for job in jobs for number in range(job.steps)]
    assert trace.tokens == pytest.approx(sum(step.work.total.tokens for _, step in steps))
    tight = sum(step.work.total.tight_gpu_s for _, step in steps)
    gangs = sum(step.gang_gpu_s for _, step in steps) + sum(job.spec.initialization_s * case["gang"] for job in jobs)
    assert spent[Use.GANG] - trace.lost_gpu_s == pytest.approx(gangs)
    # A bundle that drains ends the step that it is in.
    assert spent[Use.DECODE] + (spent[Use.DRAIN] if case["agentic"] else 0.0) >= (
        tight + trace.unused_gpu_s + trace.prefill_gpu_s
    ) * (1 - 1e-6)

    sharing = policy in ("rlix", "proportional", "timeslice")
    assert trace.ended_s >= limits.makespan_s(pinned=sharing) * (1 - 1e-9)
    for job in jobs:
        assert trace.finished[job.id] >= limits.work[job.id].critical_s * (1 - 1e-9)
    assert trace.first is not None
    seconds, tight_first, useful = trace.first
    assert len(jobs) == 1 or 0 < trace.first_steps < trace.steps or len(set(trace.finished.values())) == 1
    assert useful <= tight_first * (1 + 1e-9) <= seconds * case["gpus"] * (1 + 1e-6)


@given(small, st.sampled_from(["rlix", "proportional", "slots"]))
@settings(max_examples=10, deadline=None)
def test_the_same_seed_gives_the_same_run(case: dict[str, Any], policy: str) -> None:
    def outcome() -> tuple[object, ...]:
        trace = Simulation(build(case), draw_jobs(build(case), case["seed"]), POLICIES[policy], seed=3).run()
        return trace.finished, trace.switches, trace.ledger.gpu_s, trace.waited_s

    assert outcome() == outcome()


@given(
    small, st.lists(st.floats(1.0, 120.0), min_size=1, max_size=3), st.sampled_from(["rlix", "proportional", "slots"])
)
@settings(max_examples=20, deadline=None)
def test_jobs_that_depart_leave_nothing_behind(case: dict[str, Any], after_s: list[float], policy: str) -> None:
    data = build(case).model_dump()
    for number, seconds in enumerate(after_s):
        data["jobs"] += ({**data["jobs"][0], "name": f"b{number}", "departs_after_s": seconds, "steps": 50},)
    workload = Workload.model_validate(data)
    simulation = Simulation(workload, draw_jobs(workload, case["seed"]), POLICIES[policy], horizon_s=1e6)
    trace = simulation.run()
    assert {job.split("-")[0] for job in trace.finished} == {"a"}
    assert len(trace.finished) == case["jobs"]
    assert not simulation.core.state.leases
    assert not simulation.core.state.registrations
    assert trace.ledger.idle == case["gpus"]


def test_a_job_whose_bundle_fails_gets_no_other_for_a_moment() -> None:
    """Four bundles at 10, when it has initialised; one fails at 17; a second later its place is taken again."""
    workload = Workload.model_validate(ONE)
    jobs = draw_jobs(workload, 0)
    simulation = Simulation(workload, jobs, POLICIES["proportional"])
    core = simulation.core
    simulation.clock.call_later(17.0, lambda: core.take(core.state.leases_of(jobs[0].id)[0].lease, "it failed"))
    trace = simulation.run()
    of_step = [r for r in core.known.log.since(jobs[0].id, 0) if r.lease.phase is Phase.ROLLOUT and r.time < 20.0]
    assert [(r.event, r.time) for r in of_step] == [("granted", 10.0)] * 4 + [
        ("shrinking", 17.0),
        ("released", 17.0),
        ("granted", 18.0),
    ]
    assert trace.switches == 4 + 1 + 4


def test_a_plan_that_breaks_a_rule_ends_the_run() -> None:
    class Taken:
        """The device belongs to the gang of the other job, which initialises."""

        def divide(self, pool: Pool) -> list[Expand]:
            return [Expand(r.pipeline_id, r.cluster, 0) for r in pool.rollouts if r.demand.trajectories]

    workload = two_jobs()
    with pytest.raises(SimulationError, match="Taken at 10 s"):
        Simulation(workload, draw_jobs(workload, 0), Taken(), horizon_s=1000).run()


def test_a_change_is_planned_once() -> None:
    """A turn takes in everything of its moment, and needs no other for what it has changed itself."""
    workload = two_jobs()
    clock, moments = VirtualClock(), list[float]()

    def noted(snapshot: Snapshot, state: State, policy: Policy) -> tuple[Event, ...]:
        moments.append(clock.time())
        return decide(snapshot, state, policy)

    core = new_core(workload, POLICIES["rlix"], clock, decide=noted)
    for job in draw_jobs(workload, 0):
        admit(core, job.registration)
        core.report(job.id, "actor_infer", Demand(4))
    clock.run(1.0)
    assert moments == [0.0]
    assert len(core.state.leases) == 4


def test_sums_that_are_equal_but_for_rounding_are_one_moment() -> None:
    clock, moments = VirtualClock(), list[float]()
    clock.call_later(0.3, lambda: moments.append(clock.time()))
    clock.call_later(0.1, lambda: clock.call_later(0.2, lambda: moments.append(clock.time())))
    clock.run(1.0)
    assert 0.1 + 0.2 != 0.3
    assert moments == [0.3, 0.3]


def test_a_policy_that_serves_nobody_is_found_out() -> None:
    class Nothing:
        def divide(self, pool: object) -> tuple[()]:
            return ()

    workload = Workload.model_validate(ONE)
    with pytest.raises(SimulationError, match="on 0 bundles"):
        Simulation(workload, draw_jobs(workload, 0), Nothing(), horizon_s=1000).run()


def test_the_best_known_schedule_lies_between_the_bounds_and_the_policies() -> None:
    data = copy.deepcopy(ONE)
    data["jobs"][0].update(count=3)
    data["jobs"][0]["rollout"]["lengths"]["sigma"] = 0.5
    workload = Workload.model_validate(data)
    jobs = draw_jobs(workload, 1)
    best = best_known(workload, jobs)
    limits = bounds(jobs, 4)
    assert limits.makespan_s(pinned=True) <= best.makespan_s
    for job, seconds in best.mean_order_job_s.items():
        assert seconds >= limits.work[job].critical_s
