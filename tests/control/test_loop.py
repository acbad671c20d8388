"""The loop on a virtual clock: what one job, process or node does stops nobody else, and nobody innocent is ended."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlix.control.job import GANG_GAP_S
from rlix.control.journal import JournalError, encode
from rlix.control.planning import Decide
from rlix.control.status import status_of
from rlix.protocol.errors import SpecError, WaitTimeoutError
from rlix.protocol.events import DrainStarted, Event, LeaseReleased
from rlix.protocol.messages import Demand, Lease, LeaseState, Occupant, Process, ReleaseReason
from rlix.protocol.types import LAUNCHER, Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies import Policy
from rlix.scheduler.snapshot import GANG_PATIENCE_S, Snapshot
from rlix.scheduler.state import State
from rlix.sim.books import Forgetful
from tests.control.world import DEVICES, INFER, TRAIN, World, process, service_of


class Kept(Forgetful):
    """A journal in memory, by the world's clock."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.world: World | None = None

    def check(self, event: Event) -> None:
        encode(event)

    def append(self, events: Sequence[Event]) -> None:
        now = 1e9 + (self.world.clock.time() if self.world is not None else 0.0)
        self.events += [(now, event) for event in events]


def kept_world(jobs: int = 2, **options: Any) -> World:
    journal = Kept()
    journal.world = world = World(jobs, journal=journal, **options)
    return world


def restart(world: World) -> None:
    world.restart(list(world.journal.events))  # type: ignore[attr-defined]
    world.core.start()


def demand(world: World, job: str, trajectories: int) -> tuple[Lease, ...]:
    """Reports it and asks nothing: the bundles it is granted."""
    world.core.report(job, INFER.name, Demand(trajectories))
    world.run(0.0)
    return world.held(job)


# -- a node that takes its time ---------------------------------------------------------------------------------------


def not_answering(world: World) -> list[Callable[[], None]]:
    """What the node is asked about locks from now on; called, it answers."""
    asked: list[Callable[[], None]] = []
    occupied = world.machine.occupied
    world.machine.occupied = lambda devices, done: asked.append(  # type: ignore[method-assign]
        lambda: occupied(devices, done)
    )
    return asked


def test_a_bundle_that_is_given_back_is_not_granted_again_while_a_node_is_asked() -> None:
    world = World(1)
    (lease,) = world.roll("ft_1", 1)
    asked = not_answering(world)
    world.core.given_back(lease)
    for held in ({lease.epoch}, set[int]()):  # before and after its rollout has forgotten it
        answer = world.core.poll("ft_1", INFER.name, held, set())
        assert (answer.granted, answer.taken, answer.lost) == ((), (), ())
    asked.pop()()
    assert lease.epoch not in world.core.state.leases


def test_a_bundle_given_back_before_it_was_noted_is_looked_at_although_the_first_look_is_lost() -> None:
    world = World(1)
    (lease,) = demand(world, "ft_1", 1)
    asked = not_answering(world)
    world.core.given_back(lease)
    world.core.poll("ft_1", INFER.name, {lease.epoch}, set())
    asked.clear()
    world.run(31.0)
    asked.pop()()
    assert lease.epoch not in world.core.state.leases


def test_a_process_seen_stopped_once_is_not_ended_because_its_node_is_silent_then() -> None:
    world = World(1)
    world.core.start()
    lease = world.gang("ft_1")
    world.core.name_holders("ft_1", TRAIN.name, [(0, process(9))])
    world.machine.states_[process(9)] = "stopped"
    world.run(1.5)
    world.machine.states = lambda processes, done: None  # type: ignore[method-assign]
    world.run(30.0)
    assert world.held("ft_1") == (lease,)


@pytest.mark.parametrize("holds", [False, True])
def test_a_stopped_worker_is_ended_though_it_locks_nothing(holds: bool) -> None:
    world = World(1)
    world.core.start()
    leases = (world.gang("ft_1"),) if holds else ()
    world.core.name_holders("ft_1", TRAIN.name, [(0, process(9))])
    world.machine.states_[process(9)] = "stopped"
    world.run(world.settings.stopped_s + 3.0)
    assert world.machine.killed == [process(9)]
    assert not any(lease.epoch in world.core.state.leases for lease in leases)
    assert "ft_1" in world.core.state.registrations  # what its death means is for the job to say


def test_who_was_promised_devices_that_leave_waits_for_the_others_at_its_place() -> None:
    moving = replace(TRAIN, alternatives=((2, 3),))
    world = World(2, clusters=(moving, INFER))
    for lease in world.roll("ft_1", 4):
        world.machine.lock(lease, process(5))
    ticket = world.ask("ft_2", moving, key="a")
    promised = world.held("ft_2", LeaseState.PENDING)[0].devices
    world.core.found(tuple(device for device in DEVICES if device.id not in promised))
    world.run(0.0)
    assert ticket.outcome is None
    assert world.core.known.gangs.request(ticket.request_id) is ticket
    world.machine.unlock(process(5))
    for lease in world.held("ft_1", LeaseState.DRAINING):
        world.release(lease)
    world.run(1.0)
    assert isinstance(ticket.outcome, Lease)
    assert set(ticket.outcome.devices).isdisjoint(promised)


# -- a rollout that is slow --------------------------------------------------------------------------------------------


def test_a_script_that_asks_late_loses_its_bundles_and_not_its_life() -> None:
    world, script = World(), process(7)
    world.core.start()
    world.core.name_holders("ft_1", INFER.name, [(rank, script) for rank in range(4)])
    bundles = demand(world, "ft_1", 9)
    stranger = Occupant(0, "another pool", 5, (process(99),))
    world.machine.locks[0] = stranger
    for _ in range(60):
        world.core.watch.beat("ft_1", script, frozenset())
        world.run(1.0)
    assert world.machine.killed == []
    assert world.held("ft_1") == ()  # and it is granted nothing more before it asks
    lost = world.core.poll("ft_1", INFER.name, {lease.epoch for lease in bundles}, set()).lost
    assert set(lost) == {lease.epoch for lease in bundles}
    world.run(1.0)
    assert len(world.held("ft_1")) == 4


def test_a_rollout_that_asks_every_15_seconds_has_its_bundles_after_the_first_time() -> None:
    """A program that is busy in between: it polls, and is told of what has come since."""
    world = World(jobs=1)
    world.core.report("ft_1", INFER.name, Demand(100))
    known: set[int] = set()
    for _ in range(8):
        known |= {lease.epoch for lease in world.core.poll("ft_1", INFER.name, known, set()).granted}
        world.core.poll("ft_1", INFER.name, known, set())  # which notes them
        world.run(15.0)
    assert {lease.epoch for lease in world.held("ft_1")} == known and len(known) == 4
    assert len(world.core.known.endings) <= 4  # of the first time, before anything is known of it


def test_a_bundle_whose_lock_its_rollout_has_is_in_use_whatever_is_said() -> None:
    world, script = World(), process(7)
    (bundle, *others) = demand(world, "ft_1", 9)
    world.machine.lock(bundle, script)
    world.run(60.0)
    assert world.held("ft_1") == (bundle,)
    assert len(others) == 3
    assert world.machine.killed == []


def test_who_does_not_give_back_in_time_is_ended_only_where_it_has_the_lock() -> None:
    world, keeps, forgets = World(), process(7), process(8)
    bundles = world.roll("ft_1", 99)
    world.core.name_holders("ft_1", INFER.name, [(0, keeps), (1, forgets)])
    world.machine.lock(bundles[0], keeps)
    gang = world.ask("ft_2")
    world.run(world.settings.shrink_deadline_s - 1.0)
    assert gang.outcome is None
    world.run(2.0)
    assert world.machine.killed == [keeps]
    assert gang.outcome == world.held("ft_2")[0]


# -- what one job says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        Demand(10**400),
        Demand(1, tokens=10**400),
        Demand(1, knee=5e-324),
        Demand(1, work_s=1e300),
        Demand(1, left_gpu_s=float("nan")),
        Demand(1.5),  # type: ignore[arg-type]
    ],
)
def test_a_demand_out_of_all_proportion_is_refused(said: Demand) -> None:
    world = World()
    with pytest.raises(SpecError, match="job 'ft_1': "):
        asyncio.run(service_of(world).report_demand("ft_1", INFER.name, said))
    assert world.roll("ft_2", 9) != ()


HALF = "half of a pair: \ud800"


@pytest.mark.parametrize(
    "say",
    [
        lambda service: service.name_holders("ft_1", TRAIN.name, {0: Process("node", 7, 1, HALF)}),
        lambda service: service.name_holders("ft_1", TRAIN.name, {0: Process(HALF, 7, 1)}),
        lambda service: service.unregister_pipeline("ft_1", HALF),
        lambda service: service.register_pipeline("ft_1", "ns", {"a": 1}, {"a": 1}, name=HALF),
        lambda service: service.register_pipeline("ft_1", HALF, {"a": 1}, {"a": 1}),
        lambda service: service.register_pipeline("ft_1", "ns", {"a": 10**5000}, {"a": 1}),
        lambda service: service.allocate_pipeline_id("x" * 10_000),
        lambda service: service.beat("ft_1", process(7), [10**400]),
    ],
)
def test_what_cannot_be_written_down_is_refused(say: Callable[[Any], Any]) -> None:
    world = kept_world()
    with pytest.raises(SpecError):
        asyncio.run(say(service_of(world)))
    assert world.gang("ft_2").devices == TRAIN.devices
    assert world.core.trouble == ""


def test_an_event_that_cannot_be_written_changes_nothing_and_does_not_stay() -> None:
    world = kept_world()
    with pytest.raises(JournalError, match="cannot be written"):
        world.core.name_holders("ft_1", TRAIN.name, [(0, Process("node", 7, 1, HALF))])
    assert world.core.state.holders("ft_1", TRAIN.name) == {}
    assert world.gang("ft_2").devices == TRAIN.devices
    restart(world)
    assert world.held("ft_2") != ()


def failing_with(pipeline_id: str) -> Decide:
    def fails(snapshot: Snapshot, state: State, policy: Policy) -> tuple[Event, ...]:
        wants = [r.pipeline_id for r in snapshot.rollouts if r.demand.trajectories]
        if pipeline_id in [*wants, *(request.pipeline_id for request in snapshot.requests)]:
            raise OverflowError("int too large to convert to float")
        return decide(snapshot, state, policy)

    return fails


@pytest.mark.parametrize("culprit", [1, 4, 7])
def test_a_job_for_which_no_plan_can_be_made_is_named_and_the_others_go_on(culprit: int) -> None:
    world = World(7)
    name = f"ft_{culprit}"
    world.core.planning._decide = failing_with(name)
    for number in range(1, 8):
        world.core.report(f"ft_{number}", INFER.name, Demand(9))
    gang = world.ask("ft_3" if culprit != 3 else "ft_2")
    world.run(1.0)
    assert gang.outcome is not None
    assert world.held(name) == ()
    trouble = status_of(world.core).trouble
    assert f"job {name!r} gets nothing more" in trouble
    assert "int too large" in trouble
    world.core.end(name, "stopped")
    world.run(1.0)
    world.core.report(gang.pipeline_id, INFER.name, Demand(3))
    world.run(1.0)
    assert status_of(world.core).trouble == ""


def test_a_planner_that_always_fails_takes_no_turn_until_something_changes() -> None:
    world, turns = World(2), []

    def fails(snapshot: Snapshot, state: State, policy: Policy) -> tuple[Event, ...]:
        turns.append(snapshot)
        raise ValueError("no plan")

    world.core.planning._decide = fails
    for job in ("ft_1", "ft_2"):
        world.core.report(job, INFER.name, Demand(3))
    world.run(1.0)
    assert len(turns) < 10
    assert world.core.planning.refused.keys() == {"ft_1", "ft_2"}


# -- after a restart ---------------------------------------------------------------------------------------------------


def test_a_request_whose_caller_died_while_nobody_looked_is_dropped_or_given_back() -> None:
    world, dead, other = kept_world(3), process(7), process(8)
    held = world.gang("ft_1", holder=process(6), key="held")
    world.ask("ft_2", holder=dead, key="first")
    third = world.ask("ft_3", holder=other, key="second")
    world.machine.states_[dead] = "dead"
    restart(world)
    world.run(1.0)
    world.release(held)
    world.run(15.0)
    again = world.core.known.gangs.find("ft_3", "second")
    assert third.outcome is None
    assert again is not None
    assert again.outcome == world.held("ft_3")[0]
    assert world.held("ft_2") == ()
    assert world.machine.killed == []


def test_who_wanted_to_wait_ten_seconds_waits_ten_seconds() -> None:
    world = kept_world()
    world.gang("ft_1", key="held")
    world.ask("ft_2", timeout_s=10.0, key="k")
    world.run(4.0)
    restart(world)
    ticket = world.core.known.gangs.find("ft_2", "k")
    assert ticket is not None
    world.run(5.9)
    assert ticket.outcome is None
    world.run(0.2)
    assert isinstance(ticket.outcome, WaitTimeoutError)
    assert "within 10 s; ft_1/actor_train" in str(ticket.outcome)
    assert not world.core.state.requests


@pytest.mark.parametrize("unlocks", [True, False])
def test_who_gave_back_before_the_restart_is_not_ended_for_a_lock_that_went_after_it(unlocks: bool) -> None:
    world, trainer = kept_world(), process(7)
    world.core.name_holders("ft_1", TRAIN.name, [(0, trainer), (1, bystander := process(8))])
    lease = world.gang("ft_1", holder=trainer)
    world.machine.lock(lease, trainer)
    world.release(lease)
    assert world.held("ft_1", LeaseState.DRAINING) == (lease,)
    restart(world)
    if unlocks:
        world.machine.unlock(trainer)
    world.run(10.0)
    assert world.machine.killed == ([] if unlocks else [trainer])
    assert bystander not in world.machine.killed
    assert world.held("ft_1", LeaseState.DRAINING) == ()
    reason = ReleaseReason.RELEASED if unlocks else ReleaseReason.KILLED
    assert world.core.known.log.since("ft_1", 0)[-1].reason is reason


@pytest.mark.parametrize("cluster", ["", TRAIN.name])
def test_a_process_that_another_job_names_as_its_own_is_not_ended_with_that_one(cluster: str) -> None:
    world, program, worker, mine, launcher = kept_world(), process(1), process(2), process(3), process(4)
    world.core.name_holders("ft_1", LAUNCHER, [(0, launcher)])
    world.core.name_holders("ft_1", "", [(0, program)])
    world.core.name_holders("ft_1", TRAIN.name, [(0, worker)])
    world.core.name_holders("ft_2", cluster, [(0, program), (1, worker), (2, mine), (3, launcher)])
    world.core.end("ft_2", "a lie")
    world.run(1.0)
    assert world.machine.killed == [mine]
    world.core.end("ft_1", "enough")
    world.run(1.0)
    assert world.machine.killed == [mine, program, worker]


def test_who_ended_its_own_job_is_not_ended_with_it_after_a_restart() -> None:
    world, me, worker = kept_world(), process(1), process(2)
    world.core.name_holders("ft_1", "", [(0, me)])
    world.core.name_holders("ft_1", TRAIN.name, [(0, worker)])
    world.machine.kill = lambda *asked: None  # type: ignore[method-assign]
    world.core.end("ft_1", "done", me)
    del world.machine.kill
    restart(world)
    world.run(5.0)
    assert world.machine.killed == [worker]
    assert "ft_1" not in world.core.state.registrations


def test_deadlines_that_passed_while_nobody_could_answer_begin_anew() -> None:
    world = kept_world()
    bundles = world.roll("ft_1", 99)
    world.machine.lock(bundles[0], process(7))
    world.ask("ft_2", key="k")
    world.run(world.settings.shrink_deadline_s - 1.0)
    restart(world)
    world.run(world.settings.shrink_deadline_s - 1.0)
    assert world.machine.killed == []
    world.run(2.0)
    assert world.machine.killed == [process(7)]


# -- nodes and processes -----------------------------------------------------------------------------------------------


def test_a_phase_that_ended_in_time_while_nobody_could_be_told_was_in_time() -> None:
    world = kept_world()
    lease = world.gang("ft_1", longest_s=10.0)
    world.run(8.0)
    world.core.known.closed = True
    world.run(5.0)
    restart(world)
    world.run(1.0)
    world.core.given_back(lease)
    world.run(3.0)
    assert world.held("ft_1") == ()
    assert status_of(world.core).endings == ()
    assert world.machine.killed == []


def test_what_is_quarantined_of_a_job_that_ends_may_be_given_back_after_a_restart() -> None:
    world = kept_world()
    world.machine.immortal.add(process(5))
    lease = world.gang("ft_1")
    world.machine.lock(lease, process(5))
    world.core.take(lease, "a test")
    world.run(1.0)
    world.core.end("ft_1", "stopped")
    restart(world)
    world.core.given_back(lease)
    world.machine.unlock(process(5))
    world.run(70.0)
    assert lease.epoch not in world.core.state.leases
    assert "ft_1" not in world.core.known.jobs


def test_a_node_that_does_not_answer_delays_nothing_that_others_say() -> None:
    world = World(3)
    world.core.start()
    here, there = process(7), Process("far", 8, 1)
    ask = world.machine.states
    answering = lambda asked, done: None if asked[0].node_id == "far" else ask(asked, done)
    world.machine.states = answering  # type: ignore[method-assign]
    world.core.name_holders("ft_1", "", [(0, there)])
    world.core.name_holders("ft_2", "", [(0, here)])
    world.machine.states_ |= {here: "dead", there: "dead"}
    world.run(3.0)
    assert "ft_2" not in world.core.state.registrations
    world.run(60.0)
    assert "ft_1" in world.core.state.registrations  # nothing is known of it
    world.machine.states = ask  # type: ignore[method-assign]
    world.run(62.0)
    assert "ft_1" not in world.core.state.registrations


def test_a_look_that_is_never_answered_is_asked_again_and_ends_nobody_meanwhile() -> None:
    world, trainer = World(), process(7)
    lease, occupied = world.gang("ft_1"), world.machine.occupied
    world.machine.lock(lease, trainer)
    world.machine.occupied = lambda *asked: None  # type: ignore[method-assign]
    world.release(lease)
    world.run(20.0)
    assert world.held("ft_1") == (lease,)
    world.machine.unlock(trainer)
    world.machine.occupied = occupied  # type: ignore[method-assign]
    world.run(15.0)
    assert world.held("ft_1") == ()
    assert world.machine.killed == []


def test_a_rollout_that_died_is_granted_nothing_more_and_its_devices_are_free() -> None:
    world, ghost = World(), process(7)
    world.core.start()
    demand(world, "ft_1", 1000)
    granted = lambda: [r for r in world.core.known.log.since("ft_1", 0) if r.event == "granted"]
    world.core.known.jobs["ft_1"].heard(ghost, world.clock.time())
    world.machine.states_[ghost] = "dead"
    world.run(3600.0)
    assert len(granted()) == 4
    assert world.held("ft_1") == ()


def test_a_silent_process_with_a_quarantined_lease_is_looked_at_no_more_often_for_it() -> None:
    world, undead = World(), process(7)
    world.core.start()
    world.machine.immortal.add(undead)
    lease = world.gang("ft_1", holder=undead)
    world.core.watch.beat("ft_1", undead, frozenset({lease.epoch}))
    world.machine.lock(lease, undead)
    looks = []
    occupied = world.machine.occupied
    world.machine.occupied = lambda *asked: (looks.append(world.clock.time()), occupied(*asked))  # type: ignore[method-assign,assignment,func-returns-value]
    world.run(world.settings.silent_s + 5.0)
    assert world.core.state.leases[lease.epoch].state is LeaseState.QUARANTINED
    before, timers = len(looks), len(world.clock._queue)
    world.run(600.0)
    assert len(looks) - before <= 2 * (600.0 / 60.0 + 6)
    assert len(world.clock._queue) <= timers + 3
    assert [ending.pipeline_id for ending in status_of(world.core).endings].count("ft_1") == 1


def test_a_rollout_all_of_whose_devices_left_ends_with_a_reason() -> None:
    world = World()
    world.core.start()
    world.roll("ft_1", 9)
    far = [replace(device, id=device.id + 4, node_id="new") for device in DEVICES]
    world.core.found(tuple(far))
    world.run(2.0)
    assert world.core.known.log.why_ended("ft_1") == "all devices of its actor_infer left the pool with their nodes"
    assert "ft_2" in world.core.state.registrations  # which has nothing to roll out


def test_only_what_is_on_the_lock_is_ended_when_a_lease_is_taken() -> None:
    """Whoever is named and has no byte there is not, whoever named it."""
    world, named, there = World(), process(1), process(7)
    world.core.name_holders("ft_1", TRAIN.name, [(0, named)])
    lease = world.gang("ft_1", holder=process(2), longest_s=5.0)
    world.machine.lock(lease, there)
    world.run(6.0)
    assert world.machine.killed == [there]
    assert world.held("ft_1") == ()


def test_a_change_of_mind_of_the_planner_looks_at_nothing() -> None:
    """What is asked back has its time: a device that is not locked yet is not free for it."""
    world = World()
    bundles = world.roll("ft_1", 99)
    world.ask("ft_2")
    world.run(world.settings.shrink_deadline_s - 1.0)
    assert world.held("ft_1", LeaseState.DRAINING) == bundles[:2]
    drained = [e for e in world.core.known.log.since("ft_1", 0) if e.event == "shrinking"]
    assert [record.lease for record in drained] == list(bundles[:2])


def test_alarms_leave_nothing_behind() -> None:
    world = World(1)
    for _ in range(300):
        world.release(world.gang("ft_1", longest_s=100.0))
        world.run(GANG_GAP_S + 0.1)
    assert len(world.clock._queue) < 10
    assert len(world.core.known.alarm._queue) < 80
    assert world.core.known.holds == {}


def test_the_loop_records_one_event_for_what_it_was_told_twice() -> None:
    world = kept_world()
    lease = world.gang("ft_1")
    world.machine.lock(lease, process(7))
    for _ in range(3):
        world.release(lease)
        world.core.take(lease, "it hangs") if world.clock.time() > 1.0 else world.run(0.6)
    drains = [event for _, event in world.journal.events if isinstance(event, DrainStarted)]  # type: ignore[attr-defined]
    assert len(drains) == 1
    assert world.gang("ft_2", phase=Phase.ACTOR_TRAINING).devices == TRAIN.devices


def test_a_bundle_that_was_never_noted_is_free_for_a_gang_when_its_time_to_note_it_is_over() -> None:
    world = World()
    demand(world, "ft_1", 9)
    world.run(1.0)
    gang = world.ask("ft_2")
    assert len(world.held("ft_1", LeaseState.DRAINING)) == 2
    world.run(world.settings.grow_timeout_s)
    assert gang.outcome == world.held("ft_2")[0]
    assert world.machine.killed == []
    world.release(world.held("ft_2")[0])
    world.run(60.0)
    assert world.held("ft_1") == ()
    assert [pipeline.deaf for pipeline in status_of(world.core).pipelines] == [("actor_infer",), ()]


def test_who_waits_is_told_who_is_ahead_by_the_order_in_which_gangs_are_served() -> None:
    world = World(3, clusters=(replace(TRAIN, devices=(0, 1, 2, 3)), INFER))
    everything = world.core.state.registrations["ft_1"].clusters[0]
    world.gang("ft_1", everything)
    late = world.ask("ft_2", everything, Phase.REFERENCE_LOG_PROBS)
    world.run(2 * GANG_PATIENCE_S + 1.0)
    urgent = world.ask("ft_3", everything)
    behind = {each.pipeline_id: each.behind for each in status_of(world.core).waiting}
    assert "ft_2/actor_train (REFERENCE_LOG_PROBS) waits in front of it" in behind["ft_3"]
    assert "in front" not in behind["ft_2"]
    world.release(world.held("ft_1")[0])
    assert isinstance(late.outcome, Lease)
    assert urgent.outcome is None


def test_who_keeps_its_lock_over_the_end_of_its_host_is_ended_after_the_next_lease() -> None:
    """Nobody has seen it, so the job that is granted its device meets the lock, and no other does."""
    world, survivor = World(), process(7)
    lease = world.gang("ft_1")
    world.machine.lock(lease, survivor)
    world.core.record(DrainStarted(lease.epoch), LeaseReleased(lease.epoch, ReleaseReason.NODE_LOST))
    world.run(100.0)
    assert world.machine.killed == []
    second = world.gang("ft_2")
    world.release(second)  # after its `DeviceBusyError`
    world.run(5.0)
    assert world.machine.killed == [survivor]
    assert world.machine.locks == {} and not world.core.state.leases
