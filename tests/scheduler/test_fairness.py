"""Every policy over time, in seconds: nobody waits longer than it promises, equals get equal parts, exchanges end."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlix.protocol.messages import Demand
from rlix.protocol.types import Phase as GangPhase
from rlix.scheduler.policies import POLICIES, Policy, Proportional, Rlix
from rlix.scheduler.snapshot import GANG_PATIENCE_S
from rlix.sim.baselines import exclusive, slots, static
from rlix.sim.timeslice import Timeslice
from tests.scheduler.life import DRAIN_S, Life

JOBS = 6
LONGEST_GANG_S = 10.0
GANG_PHASES = [phase for phase in GangPhase if phase is not GangPhase.ROLLOUT]
BULK = Demand(512, knee=64.0, work_s=900.0, floor_s=90.0, left_gpu_s=9000.0, load_s=1.0)


@dataclass(frozen=True)
class Promise:
    """`turn_s`: how long a bundle stays, at least, before it passes on for the sake of equality.

    `wait_s`: a rollout waits for its first bundle no longer than this and a turn for each of the others.
    `evens_out`: equals have equal parts even where the pool cannot be divided equally at any one moment.
    """

    policy: Policy
    wait_s: float
    turn_s: float
    evens_out: bool = False


PROMISES = {
    "rlix": Promise(Rlix(starving_s=60.0, turn_loads=30.0), wait_s=60.0, turn_s=30.0, evens_out=True),
    "proportional": Promise(Proportional(patience_s=30.0), wait_s=30.0, turn_s=30.0),
    "published": Promise(Proportional(margin=0.0, patience_s=30.0), wait_s=30.0, turn_s=30.0),
    "timeslice": Promise(Timeslice(quantum_gpu_s=40.0), wait_s=0.0, turn_s=5.0, evens_out=True),
    "static": Promise(static, wait_s=0.0, turn_s=1e9),
    "slots": Promise(slots, wait_s=0.0, turn_s=1e9),
    "exclusive": Promise(exclusive, wait_s=0.0, turn_s=1e9),
}
NAMES = st.sampled_from(sorted(PROMISES))


def gang_bound_s(jobs: int, longest_s: float) -> float:
    """Twice `GANG_PATIENCE_S`, and then one after another the gang that runs and one of each other job, with drains."""
    return 2 * GANG_PATIENCE_S + jobs * (longest_s + DRAIN_S + 1.0)


def test_every_policy_that_can_be_selected_promises_something() -> None:
    assert PROMISES.keys() >= POLICIES.keys()


class Pool(RuleBasedStateMachine):
    """Jobs come, report anything, train and go; gangs last up to ten seconds."""

    @initialize(name=NAMES, gpus=st.integers(2, 8))
    def start(self, name: str, gpus: int) -> None:
        self.promise = PROMISES[name]
        self.life = Life(gpus, self.promise.policy, JOBS)
        self.names = 0

    def pick(self, number: int) -> str:
        names = sorted(self.life.state.registrations)
        return names[number % len(names)]

    def has_jobs(self) -> bool:
        return bool(self.life.state.registrations)

    @precondition(lambda self: len(self.life.state.registrations) < JOBS)
    @rule(size=st.sampled_from([1, 1, 2]), gang=st.integers(1, 2))
    def arrive(self, size: int, gang: int) -> None:
        self.life.arrive(f"p{self.names}", size, gang)
        self.names += 1

    @precondition(has_jobs)
    @rule(
        number=st.integers(0, 99),
        trajectories=st.sampled_from([0, 1, 3, 100, 10_000]),
        knee=st.sampled_from([0.0, 16.0]),
        seconds=st.sampled_from([0.0, 5.0, 500.0]),
        left=st.sampled_from([0.0, 1.0, 1e5]),
        load=st.sampled_from([0.0, 0.1, 1.0]),
    )
    def report(self, number: int, trajectories: int, knee: float, seconds: float, left: float, load: float) -> None:
        demand = Demand(trajectories, 0, knee, seconds, seconds, left, load)
        self.life.report(self.pick(number), demand)

    @precondition(has_jobs)
    @rule(number=st.integers(0, 99), seconds=st.floats(1, LONGEST_GANG_S), phase=st.sampled_from(GANG_PHASES))
    def train(self, number: int, seconds: float, phase: GangPhase) -> None:
        name = self.pick(number)
        if all(request.pipeline_id != name for request in self.life.state.requests.values()):
            self.life.train(name, seconds, phase)

    @precondition(has_jobs)
    @rule(number=st.integers(0, 99))
    def leave(self, number: int) -> None:
        self.life.leave(self.pick(number))

    @rule(seconds=st.sampled_from([1, 5, 60, 240]))
    def pass_time(self, seconds: int) -> None:
        self.life.run(seconds)

    @rule()
    def stand_still(self) -> None:
        """While neither time nor demand moves, plans come to rest."""
        for _ in range(20):
            self.life.acknowledge()
            if not self.life.cycle():
                return
        raise AssertionError("plans still change after 20 rounds without any event")

    @invariant()
    def nobody_waits_longer_than_promised(self) -> None:
        if hasattr(self, "life"):
            bound_s = self.promise.wait_s + JOBS * (self.promise.turn_s if self.promise.wait_s else 120.0) + 60.0
            assert self.life.longest_wait_s <= bound_s
            assert self.life.longest_gang_wait_s <= gang_bound_s(JOBS, LONGEST_GANG_S)


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def asks(life: Life, name: str) -> bool:
    """Whether it could ask again: its last gang is over."""
    waits = any(request.pipeline_id == name for request in life.state.requests.values())
    holds = any(s.lease.pipeline_id == name and s.lease.bundle is None for s in life.state.leases.values())
    return not waits and not holds


@pytest.mark.parametrize("name", sorted(PROMISES))
@pytest.mark.parametrize("trainers", [2, 4])
def test_a_gang_of_no_urgency_comes_between_jobs_that_train_back_to_back(name: str, trainers: int) -> None:
    """Flows all of whose parts ask for actor training would starve a third job's reference log-probs."""
    life, longest_s = Life(4, PROMISES[name].policy, 5), 10.0
    names = [f"flow{number}" for number in range(trainers)]
    for each in [*names, "other"]:
        if not life.arrive(each, gang=4):
            return  # confined to a part of its own, nobody is in anybody's way
    done = Counter[str]()
    for _ in range(1800):
        for each in names:
            if asks(life, each):
                life.train(each, longest_s)
                done[each] += 1
        if asks(life, "other"):
            life.train("other", 1.0, GangPhase.REFERENCE_LOG_PROBS)
            done["other"] += 1
        life.tick()
    assert life.longest_gang_wait_s <= GANG_PATIENCE_S + 2 * longest_s + 5.0, done
    assert done["other"] >= 1800 / (GANG_PATIENCE_S + 3 * longest_s) - 1


def equals(name: str, jobs: int, gpus: int) -> Life:
    life = Life(gpus, PROMISES[name].policy, jobs)
    for number in range(jobs):
        assert life.arrive(f"p{number}")
        life.report(f"p{number}", BULK)
        life.run(7)  # who comes first has everything for a moment
    return life


def parts(life: Life, seconds: int) -> dict[str, float]:
    """GPU-seconds by job over the next so many seconds."""
    before = dict(life.used_gpu_s)
    life.run(seconds)
    return {name: gpu_s - before.get(name, 0.0) for name, gpu_s in life.used_gpu_s.items()}


@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.sampled_from([n for n, p in PROMISES.items() if p.evens_out]), st.integers(2, 7), st.integers(2, 9))
@example("rlix", 7, 8)
def test_equal_jobs_end_within_a_tenth_of_equal_parts(name: str, jobs: int, gpus: int) -> None:
    used = parts(equals(name, jobs, gpus), 1800)
    mean = sum(used.values()) / jobs
    assert mean * jobs >= (0.9 if name == "rlix" else 0.5) * gpus * 1800  # and the pool is not idle
    assert all(0.9 * mean <= gpu_s <= 1.1 * mean for gpu_s in used.values()), used


@pytest.mark.parametrize("name", ["proportional", "published", "static"])
def test_equal_jobs_have_equal_parts_where_the_pool_divides_evenly(name: str) -> None:
    used = parts(equals(name, 4, 8), 1800)
    assert all(0.9 * 2 * 1800 <= gpu_s <= 1.1 * 2 * 1800 for gpu_s in used.values()), used


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_exchanges_per_second_are_bounded(name: str) -> None:
    """While nobody's demand changes, a bundle changes hands at most once in a turn."""
    for jobs, gpus in ((3, 8), (5, 2), (2, 3)):
        life = Life(gpus, PROMISES[name].policy, jobs)
        for number in range(jobs):
            if life.arrive(f"p{number}"):
                life.report(f"p{number}", BULK)
        life.run(60)
        before, seconds = life.switches, 900
        life.run(seconds)
        assert life.switches - before <= 2 * gpus * (1 + seconds / PROMISES[name].turn_s)


@pytest.mark.parametrize("known", [True, False])
def test_a_newcomer_is_not_kept_waiting_by_one_job_that_holds_everything(known: bool) -> None:
    policy = Rlix()
    life = Life(8, policy)
    life.arrive("old")
    life.report("old", BULK if known else Demand(512))
    life.run(300)
    assert life.widths() == {"old": 8}
    life.arrive("new")
    life.report("new", BULK if known else Demand(512))
    life.run(int(policy.patience_s + DRAIN_S) + 2)
    assert life.widths()["new"] >= 1
    life.run(300)
    assert life.widths() == {"old": 4, "new": 4}


def test_three_equal_jobs_do_not_stay_at_six_and_one_and_one() -> None:
    life = equals("rlix", 3, 8)
    life.run(300)
    assert sorted(life.widths().values()) == [2, 3, 3]


LIES = {
    "nearly done for ever": Demand(512, knee=64.0, work_s=900.0, floor_s=90.0, left_gpu_s=1e-3, load_s=1.0),
    "no end of trajectories": Demand(10**9, knee=64.0, work_s=900.0, floor_s=90.0, left_gpu_s=9000.0, load_s=1.0),
    "a knee of one": Demand(512, knee=1e-3, work_s=900.0, floor_s=90.0, left_gpu_s=9000.0, load_s=1.0),
    "over any moment": Demand(512, knee=64.0, work_s=0.5, floor_s=0.5, left_gpu_s=9000.0, load_s=1.0),
    "loads for nothing": Demand(512, knee=64.0, work_s=900.0, floor_s=90.0, left_gpu_s=9000.0, load_s=1e-6),
    "loads for ever": Demand(512, knee=64.0, work_s=900.0, floor_s=90.0, left_gpu_s=9000.0, load_s=1e6),
    "all of it": Demand(10**9, knee=1e-3, work_s=0.5, floor_s=0.5, left_gpu_s=1e-3, load_s=1e-6),
}


@pytest.mark.parametrize("lie", sorted(LIES))
@pytest.mark.parametrize(("jobs", "gpus"), [(3, 8), (6, 4)])
def test_a_liar_gets_at_most_a_quarter_more_than_its_share(lie: str, jobs: int, gpus: int) -> None:
    life = Life(gpus, PROMISES["rlix"].policy, jobs)
    for number in range(jobs):
        life.arrive(f"p{number}")
        life.report(f"p{number}", BULK if number else LIES[lie])
    life.run(1200)
    assert life.used_gpu_s["p0"] <= 1.25 * gpus * 1200 / jobs


def test_who_does_not_know_what_is_left_is_taken_for_average() -> None:
    """Of three jobs with one GPU between them, the silent one goes before the longer and after the shorter."""
    for left_gpu_s, first in (((0.0, 90.0, 9000.0), "b"), ((0.0, 9000.0, 9000.0), "a"), ((0.0, 0.0, 0.0), "a")):
        life = Life(1, Rlix())
        for name, left in zip("abc", left_gpu_s, strict=True):
            life.arrive(name)
            life.report(name, Demand(512, knee=64.0, left_gpu_s=left, load_s=1.0))
        life.cycle()
        assert life.widths()[first] == 1
