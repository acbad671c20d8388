"""The single writer without Ray: what it records, how leases end, and how it takes failures."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlix.control.gang_queue import Asked, Ticket
from rlix.control.journal import Journal, JournalError
from rlix.control.scheduler_service import Scheduler
from rlix.control.settings import Settings
from rlix.control.status import status_of
from rlix.protocol.errors import DeadlockError, PipelineGoneError, SpecError, StaleEpochError, WaitTimeoutError
from rlix.protocol.events import (
    Event,
    LeaseReleased,
    PipelineAllocated,
    PipelineEnding,
    PipelineRegistered,
    PipelineUnregistered,
)
from rlix.protocol.messages import Cluster, Demand, Lease, LeaseState, Process, Registration, ReleaseReason
from rlix.protocol.types import LAUNCHER, Phase
from rlix.scheduler.image import image
from tests.control.world import DEVICES, INFER, TRAIN, World, process, service_of

CRITIC = Cluster("critic", 1, (1, 2))


def test_the_planner_sees_what_each_job_has_used_and_when_a_gang_is_expected() -> None:
    world = World()
    lease = world.gang("ft_1")
    world.run(3.0)
    world.release(lease)
    world.roll("ft_1", 0)
    world.roll("ft_2", 9)
    first, second = world.core.planning.snapshot().rollouts
    assert (first.used_gpu_s, first.age_s) == (6.0, 3.0)
    assert second.used_gpu_s == 0.0
    assert first.gang_expected
    world.run(1.0)
    assert not world.core.planning.snapshot().rollouts[0].gang_expected


def test_a_gang_is_expected_when_the_last_of_several_rollouts_has_ended() -> None:
    draft, policy = Cluster("draft", 1, (2,), elastic=True), Cluster("policy", 1, (3,), elastic=True)
    world = World(1, clusters=(TRAIN, draft, policy))
    job = world.core.known.jobs["ft_1"]
    for cluster, outstanding, expected in (
        ("policy", 5, False),
        ("draft", 3, False),
        ("draft", 0, False),
        ("policy", 0, True),
    ):
        world.core.report("ft_1", cluster, Demand(outstanding))
        assert job.expects_gang(world.clock.time()) is expected


def test_a_gang_given_back_while_its_devices_are_locked_is_ended_not_believed() -> None:
    world = World()
    lease = world.gang("ft_1")
    trainer = process(7)
    world.core.name_holders("ft_1", TRAIN.name, [(0, trainer)])
    world.machine.lock(lease, trainer)
    second = world.ask("ft_2")
    world.release(lease)
    world.run(1.0)
    assert second.outcome is None
    assert "still locked by process 7" in world.core.state.leases[lease.epoch].reason
    world.run(5.0)
    assert world.machine.killed == [trainer]
    assert second.outcome == world.held("ft_2")[0]
    assert world.core.known.log.since("ft_1", 0)[-1].reason is ReleaseReason.KILLED


def test_a_gang_whose_lock_goes_a_moment_after_its_word_is_simply_released() -> None:
    world = World()
    lease = world.gang("ft_1")
    world.machine.lock(lease, process(7))
    world.release(lease)
    world.run(0.5)
    world.machine.unlock(process(7))
    world.run(0.5)
    assert world.machine.killed == []
    assert world.core.known.log.since("ft_1", 0)[-1].reason is ReleaseReason.RELEASED


def give_back(world: World, lease: Lease, *devices: int, seconds: float = 0.0) -> Lease:
    """What the service answers to this word, `seconds` later at the latest."""

    async def say() -> Lease:
        said = asyncio.create_task(service_of(world).give_back(lease.pipeline_id, lease.epoch, devices))
        await asyncio.sleep(0)
        world.run(seconds)
        return await asyncio.wait_for(said, 300.0)

    return asyncio.run(say())


def test_a_part_of_a_gang_goes_to_who_waits_and_the_rest_stays_also_over_a_restart(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(journal=journal)
        lease = world.gang("ft_1", key="k")
        second = world.ask("ft_2", devices=(1,))
        world.run(3.0)
        for _ in range(2):  # an answer that is lost is asked for again
            rest = give_back(world, lease, 1)
        assert world.held("ft_1") == (rest,) == (replace(lease, devices=(0,)),)
        assert second.outcome == world.held("ft_2")[0]
        for _ in range(2):
            before = world.core.state
            world.restart(list(journal.replay()))
            assert world.core.state.leases == before.leases
            assert world.core.known.gangs.find("ft_1", "k").outcome == rest  # type: ignore[union-attr]
            journal.compact(image(world.core.state, world.core.clock.time()))
        world.run(3.0)
        third = world.ask("ft_2", devices=(0,))
        world.release(lease)  # by its epoch, whatever is left of it
        assert third.outcome in world.held("ft_2")
        assert world.held("ft_1") == ()
    world = World()
    give_back(world, world.gang("ft_1"), 0)
    world.run(2.0)
    world.release(world.held("ft_1")[0])
    records = world.core.known.log.since("ft_1", 0)
    assert [(r.event, r.lease.devices) for r in records] == [
        ("granted", (0, 1)),
        ("released", (0,)),
        ("released", (1,)),
    ]
    world.roll("ft_1", 0)
    assert world.core.planning.snapshot().rollouts[0].used_gpu_s == 2.0


def test_a_part_that_stays_locked_takes_the_lease_with_it() -> None:
    world = World()
    lease, trainer = world.gang("ft_1"), process(7)
    world.machine.lock(lease, trainer)
    second = world.ask("ft_2", devices=(1,))
    world.core.part_given_back(lease, (1,))
    world.run(0.5)
    assert world.held("ft_1") == (lease,)
    del world.machine.locks[1]
    world.run(0.5)
    assert second.outcome == world.held("ft_2")[0]
    (rest,) = world.held("ft_1")
    world.core.take(lease, "it hangs")  # as it was granted: what it has now is taken
    assert world.machine.killed == [trainer]
    assert status_of(world.core).endings[-1].devices == rest.devices == (0,)
    world = World()
    lease = world.gang("ft_1")
    world.machine.lock(lease, trainer)
    second = world.ask("ft_2")
    with pytest.raises(StaleEpochError, match=r"lease 1 \(.*but device 1 is still locked by process 7\)"):
        give_back(world, lease, 1, seconds=5.0)
    assert world.machine.killed == [trainer]
    assert second.outcome == world.held("ft_2")[0]


def test_of_parts_given_back_at_once_the_last_stays() -> None:
    """Each leaves the other when it is said; a node that is asked about locks answers later."""
    world = World()
    lease, service, looks = world.gang("ft_1"), service_of(world), list[Any]()
    occupied = world.machine.occupied
    world.machine.occupied = lambda *asked: looks.append(asked)  # type: ignore[method-assign, assignment]

    async def say() -> list[Any]:
        said = [asyncio.create_task(service.give_back("ft_1", lease.epoch, (device,))) for device in lease.devices]
        await asyncio.sleep(0)
        for asked in looks:
            occupied(*asked)
        return await asyncio.gather(*said, return_exceptions=True)

    rest, refused = asyncio.run(say())
    assert world.held("ft_1") == (rest,) == (replace(lease, devices=(1,)),)
    assert "has no other devices than [1]: release it" in str(refused)
    with pytest.raises(SpecError, match="has no other devices than"):
        give_back(world, lease, 0, 1)


def test_who_gave_a_part_back_may_ask_for_it_while_he_keeps_the_rest() -> None:
    """Also where the node that is asked about locks answers a moment later."""
    critic = Cluster("critic", 1, (1,))
    world = World(clusters=(TRAIN, critic, INFER))
    lease, occupied, clock = world.gang("ft_1"), world.machine.occupied, world.clock
    world.machine.occupied = lambda *asked: clock.call_later(0.01, occupied, *asked)  # type: ignore[method-assign]

    async def both() -> Ticket:
        left = await service_of(world).give_back("ft_1", lease.epoch, (1,))
        return world.core.request("ft_1", critic, Phase.CRITIC_TRAINING, Asked(holding=(left.epoch,)))

    async def moves() -> Ticket:
        asked = asyncio.create_task(both())
        await asyncio.sleep(0)
        world.run(0.1)
        return await asyncio.wait_for(asked, 300.0)

    ticket = asyncio.run(moves())
    world.run(0.1)
    assert ticket.outcome in world.held("ft_1"), ticket.outcome


def test_what_cannot_be_killed_is_quarantined_tried_again_and_given_up_by_a_person_only() -> None:
    world = World()
    lease = world.gang("ft_1")
    undead = process(7)
    world.machine.immortal.add(undead)
    world.machine.lock(lease, undead, [0])
    world.core.take(lease, "it hangs")
    second = world.ask("ft_2")
    world.run(30.0)
    status = world.core.state.leases[lease.epoch]
    assert status.state is LeaseState.QUARANTINED
    assert status.reason == "it hangs; and device 0 is still locked by process 7, although it was killed"
    assert len(world.machine.killed) > 2
    assert second.outcome is None
    assert world.core.loop.give_up(3) == ()
    assert world.core.loop.give_up(0) == (lease,)
    world.run(0.0)
    assert second.outcome == world.held("ft_2")[0]
    assert world.core.known.log.since("ft_1", 0)[-1].reason is ReleaseReason.GIVEN_UP


def test_a_quarantine_ends_by_itself_and_sends_who_waited_for_the_device_back_to_its_place() -> None:
    world = World()
    world.core.name_holders("ft_1", INFER.name, [(n, process(10 + n)) for n in range(4)])
    bundles = world.roll("ft_1", 1000)
    for bundle in bundles:
        world.machine.lock(bundle, process(10 + bundle.devices[0]))
    world.machine.immortal.add(process(10))
    gang = world.ask("ft_2")
    later = world.ask("ft_2")
    assert [lease.devices for lease in world.held("ft_2", LeaseState.PENDING)] == [(0, 1)]
    world.run(world.settings.shrink_deadline_s + 1.0)
    assert world.held("ft_2", LeaseState.PENDING) == ()
    assert gang.request_id in world.core.state.requests
    assert [s.lease.devices for s in world.core.state.leases.values() if s.state is LeaseState.QUARANTINED] == [(0,)]
    world.machine.immortal.clear()
    world.run(30.0)
    assert gang.outcome == world.held("ft_2")[0]
    assert later.outcome is None


def test_ending_a_job_ends_its_program_first_then_its_workers_and_can_be_repeated() -> None:
    world = World()
    lease = world.gang("ft_1")
    world.core.name_holders("ft_1", "", [(0, process(1))])
    world.core.name_holders("ft_1", TRAIN.name, [(0, process(2)), (1, process(3))])
    stray = process(9)  # nobody named it, but it locks a device
    world.machine.lock(lease, stray, [0])
    waiting = world.ask("ft_1")
    world.core.end("ft_1", "enough")
    assert world.machine.killed == [process(1), process(2), process(3), stray]
    assert isinstance(waiting.outcome, PipelineGoneError)
    assert world.machine.told == dict.fromkeys([1, 2, 3, 9], "ft_1: enough")
    assert "ft_1" not in world.core.state.registrations
    assert world.gang("ft_2").devices == (0, 1)


def unregister(world: World, job: str, why: str = "", *, answers: bool = True, seconds: float = 0.0) -> None:
    """Until the service has answered, `seconds` later at the latest."""

    async def say() -> None:
        said = asyncio.create_task(service_of(world).unregister_pipeline(job, why))
        await asyncio.sleep(0)
        world.run(seconds)
        world.core.known.wake(job)
        await asyncio.wait_for(said, 300.0)

    kill = world.machine.kill
    if not answers:
        world.machine.kill = lambda *asked: None  # type: ignore[method-assign]
    try:
        asyncio.run(say())
    finally:
        world.machine.kill = kill  # type: ignore[method-assign]


def test_a_job_with_an_undead_worker_stays_until_its_device_is_free_and_the_others_are_free_at_once() -> None:
    world = World(clusters=(TRAIN, CRITIC, INFER))
    train, undead = world.gang("ft_1"), process(7)
    world.machine.lock(train, undead, [0])
    world.machine.immortal.add(undead)
    with pytest.raises(WaitTimeoutError, match="'ft_1' did not end"):  # a node does not answer
        unregister(world, "ft_1", answers=False, seconds=70.0)
    unregister(world, "ft_1", "enough", seconds=30.0)  # it is asked again
    assert world.core.state.ending == {"ft_1": ""}
    with pytest.raises(AssertionError):
        world.gang("ft_2")
    world.machine.immortal.clear()
    unregister(world, "ft_1", "again")
    assert "ft_1" not in world.core.state.registrations


def test_whoever_speaks_for_itself_is_spared_unless_it_keeps_a_device() -> None:
    world = World()
    me = process(1)
    world.core.name_holders("ft_1", "", [(0, me)])
    world.core.end("ft_1", "done", spare=me)
    assert world.machine.killed == []
    world.core.name_holders("ft_2", "", [(0, me)])
    world.machine.lock(world.gang("ft_2"), me)
    world.core.end("ft_2", "done", spare=me)
    assert world.machine.killed == [me]
    assert world.machine.told == {}  # they know
    assert status_of(world.core).endings == ()


def test_where_nobody_is_named_whoever_took_the_lease_is_its_holder() -> None:
    world = World(clusters=(TRAIN, CRITIC, INFER))
    me, other = process(6), process(7)
    lease = world.gang("ft_2", holder=me)
    bundle = world.roll("ft_2", 1)[-1]
    world.core.watch.beat("ft_2", other, frozenset({bundle.epoch}))
    assert status_of(world.core).holders == {lease.epoch: (me,), bundle.epoch: (other,)}


def test_a_phase_that_takes_longer_than_it_declared_is_ended_and_others_go_on() -> None:
    world = World()
    world.core.name_holders("ft_1", TRAIN.name, [(0, process(7)), (1, process(8))])
    world.machine.lock(world.gang("ft_1", longest_s=5.0), process(7))
    second = world.ask("ft_2")
    world.run(4.9)
    assert second.outcome is None
    world.run(0.2)
    assert world.machine.killed == [process(7)]
    assert second.outcome is not None
    why = "ACTOR_TRAINING took longer than the 5 s that it declared"
    assert world.machine.told == {7: f"ft_1, actor_train on devices [0, 1]: {why}"}
    (ending,) = status_of(world.core).endings
    assert (ending.time, ending.pipeline_id, ending.why, ending.devices) == (1e9 + 5.0, "ft_1", why, (0, 1))
    with pytest.raises(StaleEpochError, match=f"lease {ending.epoch} .{why}. is not held by 'ft_1'"):
        asyncio.run(service_of(world).release("ft_1", [ending.epoch]))


def test_waiting_lasts_as_long_as_it_takes_unless_the_job_says_otherwise() -> None:
    world = World()
    lease = world.gang("ft_1")
    patient, hasty = world.ask("ft_2"), world.ask("ft_2", timeout_s=1.0)
    world.run(100_000.0)
    assert patient.outcome is None
    assert isinstance(hasty.outcome, WaitTimeoutError)
    assert "ft_1/actor_train (ACTOR_TRAINING, active) holds [0, 1]" in str(hasty.outcome)
    world.release(lease)
    assert patient.outcome is not None


def test_parts_of_a_job_that_wait_for_each_other_are_found_and_named() -> None:
    left, right = Cluster("left", 1, (0,)), Cluster("right", 1, (1,))
    world = World(1, clusters=(left, right, Cluster("elsewhere", 1, (3,))))
    one, other = world.gang("ft_1", left), world.gang("ft_1", right)
    first = world.ask("ft_1", right, holding=(one.epoch,))
    assert first.outcome is None
    second = world.ask("ft_1", left, holding=(other.epoch,))
    assert isinstance(second.outcome, DeadlockError)
    assert "ft_1/left (ACTOR_TRAINING) waits for devices [0] of lease 1" in str(second.outcome)
    assert "waits for ft_1/right (ACTOR_TRAINING)" in str(second.outcome)
    world.release(other)
    assert first.outcome is not None


def test_a_phase_inside_another_avoids_what_that_one_holds_and_so_does_a_restarted_core(tmp_path: Path) -> None:
    outer, inner = Cluster("outer", 1, (0, 1), ((2, 3),)), Cluster("inner", 1, (0,), ((1,), (2,), (3,)))
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(2, clusters=(outer, inner), journal=journal)
        held, within = world.gang("ft_1", outer), world.gang("ft_1", inner, holding=(1,))
        assert (held.epoch, held.devices, within.devices) == (1, (0, 1), (2,))
        other = world.gang("ft_2", inner)  # which is on its own
        assert other.devices == (3,)
        waiting = world.ask("ft_1", inner, holding=(held.epoch, within.epoch), key="k")
        assert waiting.outcome is None
        journal.compact(image(world.core.state, world.core.clock.time()))
        before = world.core.state
        world.restart(list(journal.replay()))
        assert world.core.state.requests == before.requests
        world.run(2.0)
        world.release(other)
        again = world.core.known.gangs.find("ft_1", "k")
        assert again is not None
        assert isinstance(again.outcome, Lease)
        assert again.outcome.devices == (3,)
        everywhere = (held.epoch, within.epoch, again.outcome.epoch)
        assert isinstance(world.ask("ft_1", inner, holding=everywhere).outcome, DeadlockError)


def test_a_full_disk_stops_granting_and_nothing_else_and_leaves_no_hole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        world = World(journal=journal)
        lease = world.gang("ft_1")
        full = {"disk": True}
        append = journal.append

        def refuse(events: object) -> None:
            if full["disk"]:
                refused(events)
            append(events)  # type: ignore[arg-type]

        journal.append = refuse  # type: ignore[method-assign, assignment]
        second = world.ask("ft_2")
        with caplog.at_level(logging.CRITICAL):
            world.release(lease)
            world.run(10.0)
        assert second.outcome is None
        assert lease.epoch not in world.core.state.leases
        assert "disk full" in world.core.known.writer.trouble
        with pytest.raises(JournalError, match="disk full"):
            world.core.allocate("ft")
        full["disk"] = False
        world.run(1.5)
        assert world.core.known.writer.trouble == ""
        assert second.outcome is not None
        before = world.core.state
        world.restart(list(journal.replay()))
        assert world.core.state.leases == before.leases
        assert world.core.state.next_epoch == before.next_epoch


def test_a_compaction_that_is_due_while_the_disk_is_full_writes_nothing_twice(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        world = World(journal=journal)
        lease = world.gang("ft_1")
        world.core.known.writer._compact_at = len(journal) + 1
        world.core.record(PipelineAllocated("earlier", "ft"))
        with pytest.MonkeyPatch.context() as full:
            full.setattr(journal, "append", refused)
            world.core.record(PipelineAllocated("meanwhile", "ft"))
            world.run(0.5)
        world.run(1.5)
        assert lease in world.held("ft_1")
        for number in range(2):  # and compacted, too
            before = world.core.state
            world.restart(list(journal.replay()))
            assert world.core.state.leases == before.leases
            assert world.core.state.allocated == before.allocated
            world.core.known.writer._compact_at = 1
            world.core.record(PipelineAllocated(f"later_{number}", "ft"))
            world.run(3.0)


def refused(events: object) -> None:
    raise JournalError("cannot write to the journal: disk full")


def test_a_lease_that_is_not_in_the_journal_is_nobodys_yet(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        world = World(journal=journal)
        lease = world.gang("ft_1")
        second = world.ask("ft_2")
        append = journal.append

        def refuse(events: object) -> None:
            raise JournalError("cannot write to the journal: disk full")

        # The grant itself is what cannot be written: planning had begun when the disk became full.
        world.core.given_back(lease)
        journal.append = refuse  # type: ignore[method-assign, assignment]
        world.run(0.5)
        assert world.held("ft_2") != ()
        assert second.outcome is None
        journal.append = append  # type: ignore[method-assign]
        world.run(2.0)
        assert second.outcome == world.held("ft_2")[0]


def test_nor_is_a_bundle_whose_devices_became_free_while_the_disk_was_full() -> None:
    world = World()
    mine = world.roll("ft_1", 99)
    world.core.report("ft_2", INFER.name, Demand(99))
    world.run(0.0)
    asked = world.held("ft_1", LeaseState.DRAINING)
    assert asked

    def refuse(events: object) -> None:
        raise JournalError("cannot write to the journal: disk full")

    world.journal.append = refuse  # type: ignore[method-assign, assignment]
    world.core.given_back(*asked)
    held = {lease.epoch for lease in world.held("ft_2")}
    assert held
    assert world.core.poll("ft_2", INFER.name, set(), set()).granted == ()
    assert world.core.poll("ft_1", INFER.name, {lease.epoch for lease in mine}, set()).taken == ()
    del world.journal.append
    world.run(2.0)
    assert {lease.epoch for lease in world.core.poll("ft_2", INFER.name, set(), set()).granted} == held


def test_bundles_given_back_together_are_one_change_and_no_news_to_their_rollout() -> None:
    world = World()
    assert len(world.roll("ft_1", 99)) == 4
    second = world.ask("ft_2")
    taken = world.held("ft_1", LeaseState.DRAINING)
    changes: list[Sequence[Event]] = []
    news: list[str] = []
    world.journal.append = changes.append  # type: ignore[method-assign]
    world.core.known.watchers("ft_1", INFER.name).append(lambda: news.append("ft_1"))
    world.core.given_back(*taken)
    assert changes == [[LeaseReleased(lease.epoch, ReleaseReason.SHRUNK) for lease in taken]]
    assert second.outcome == world.held("ft_2")[0]
    assert news == []


def test_a_bundle_that_is_still_locked_keeps_back_none_of_those_given_back_with_it() -> None:
    world = World()
    bundles = world.roll("ft_1", 99)
    world.machine.lock(bundles[1], process(7))
    world.core.given_back(*bundles)
    world.run(0.1)
    assert world.held("ft_1", LeaseState.DRAINING) == (bundles[1],)
    world.machine.unlock(process(7))
    world.run(0.1)
    assert world.held("ft_1", LeaseState.DRAINING) == ()
    assert world.machine.killed == []


def test_an_id_that_is_never_admitted_is_forgotten(tmp_path: Path) -> None:
    world = World(settings=Settings(home=tmp_path, idle_job_s=60.0))
    world.core.start()
    unregistered, unadmitted = world.core.allocate("ft"), world.core.allocate("ft")
    world.core.record(PipelineRegistered(Registration(unadmitted, "ns", (TRAIN,))))
    world.core.name_holders("ft_1", "", [(0, process(7))])  # a program, so that its pipeline lives on in silence
    world.run(59.0)
    assert {unregistered, unadmitted} <= set(world.core.state.allocated)
    world.run(3.0)
    assert set(world.core.state.allocated) == {"ft_1"}
    assert world.core.known.log.why_ended(unadmitted) == "it was not admitted within 61 s"


@pytest.mark.parametrize("admitted", [False, True])
def test_who_registers_and_dies_at_once_is_forgotten_at_once(admitted: bool, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(journal=journal)
        job, other = world.core.allocate("job"), world.core.allocate("job")
        for number, pipeline_id in enumerate((job, other)):
            asyncio.run(register(service_of(world), pipeline_id, process(7 + number), admitted))
        world.restart(list(journal.replay()))
        world.machine.states_[process(7)] = "dead"
        world.core.start()
        world.run(3.0)
        assert job not in world.core.state.allocated
        assert world.core.known.log.why_ended(job) == "its program, process 7, died"
        assert other in world.core.state.registrations


@pytest.mark.parametrize("admitted", [False, True])
def test_who_launches_and_dies_before_anybody_takes_over_takes_the_pipeline_with_it(
    admitted: bool, tmp_path: Path
) -> None:
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(journal=journal)
        dies, taken_over, joined = jobs = [world.core.allocate("job") for _ in range(3)]
        for pid, job in zip((7, 8, 9), jobs, strict=True):
            asyncio.run(register(service_of(world), job, None, admitted or job != dies, process(pid)))
        asyncio.run(service_of(world).name_holders(taken_over, LAUNCHER, {0: process(20)}))
        asyncio.run(service_of(world).name_holders(joined, "", {0: process(21)}))
        world.core.known.writer._compact()
        world.restart(list(journal.replay()))
        world.machine.states_ |= {process(pid): "dead" for pid in (7, 8, 9)}
        world.core.start()
        world.run(3.0)
        assert dies not in world.core.state.allocated
        assert world.core.known.log.why_ended(dies) == "process 7, which launched it, died before its program began"
        assert {taken_over, joined} <= world.core.state.admitted
        world.machine.states_[process(20)] = "dead"
        world.run(3.0)
        assert taken_over not in world.core.state.allocated
        assert joined in world.core.state.admitted
        assert world.machine.killed == []


async def register(
    service: Scheduler, pipeline_id: str, program: Process | None, admitted: bool, launcher: Process | None = None
) -> None:
    cluster = {"train": 1}, {"train": [0]}
    await service.register_pipeline(pipeline_id, "ns", *cluster, name="mine", program=program, launcher=launcher)
    if admitted:
        await service.admit_pipeline(pipeline_id)


def test_devices_that_leave_take_their_leases_with_them_and_come_back_with_new_numbers() -> None:
    world = World()
    lease = world.gang("ft_1")
    waiting = world.ask("ft_2")
    part = world.ask("ft_2", devices=(1,))
    world.core.found(DEVICES[2:])
    assert lease.epoch not in world.core.state.leases
    assert isinstance(waiting.outcome, PipelineGoneError)
    assert str(part.outcome) == "ft_2/actor_train asks for devices that left the pool with their node: [1]"
    assert world.core.known.log.since("ft_1", 0)[-1].reason is ReleaseReason.NODE_LOST
    assert world.core.state.next_device_id == 4
    assert isinstance(world.ask("ft_2").outcome, PipelineGoneError)  # asked for when it was gone already
    world.core.found(DEVICES)
    assert world.gang("ft_2").devices == (0, 1)


def test_a_lease_that_its_own_asker_does_not_know_of_goes_back(tmp_path: Path) -> None:
    """The answer was lost, or its caller gave up a moment before it came."""
    world = World()
    caller = process(5)
    lease = world.gang("ft_1", holder=caller, key="k")
    second = world.ask("ft_2")
    for _ in range(15):
        world.core.watch.beat("ft_1", caller, frozenset())
        world.run(1.0)
    assert lease.epoch not in world.core.state.leases
    assert second.outcome == world.held("ft_2")[0]
    assert world.core.known.log.since("ft_1", 0)[-1].reason is ReleaseReason.RELEASED
    assert world.machine.killed == []


def test_what_a_dead_process_held_or_waited_for_is_taken_and_a_silent_one_is_given_up() -> None:
    world = World(3)
    world.core.start()
    dead, silent = process(5), process(6)
    held = world.gang("ft_1", holder=dead)
    waiting = world.ask("ft_2", holder=dead)
    world.core.watch.beat("ft_1", dead, frozenset({held.epoch}))
    world.core.watch.beat("ft_2", dead, frozenset())
    third = world.ask("ft_3", holder=silent)
    world.core.watch.beat("ft_3", silent, frozenset())
    world.machine.states_[dead] = "dead"
    world.run(10.0)
    assert held.epoch not in world.core.state.leases
    assert waiting.outcome is not None
    lease = world.held("ft_3")[0]
    assert third.outcome == lease
    world.run(world.settings.silent_s + 10.0)
    assert world.held("ft_3") == ()


def test_the_death_or_the_stop_of_its_program_ends_a_job_and_says_so() -> None:
    world = World()
    world.core.start()
    world.core.name_holders("ft_1", "", [(0, process(1))])
    world.core.name_holders("ft_2", "", [(0, process(2))])
    world.machine.states_ |= {process(1): "dead", process(2): "stopped"}
    world.run(3.0)
    assert "ft_1" not in world.core.state.registrations
    assert world.core.known.log.why_ended("ft_1") == "its program, process 1, died"
    assert "ft_2" in world.core.state.registrations  # stopped for a moment only, perhaps
    world.run(world.settings.stopped_s + 3.0)
    assert "ft_2" not in world.core.state.registrations
    assert "was stopped" in world.core.known.log.why_ended("ft_2")


def test_a_restarted_core_knows_everything_but_demand_and_grants_nothing_twice(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(3, journal=journal)
        world.core.name_holders("ft_1", TRAIN.name, [(0, process(7))])
        lease = world.gang("ft_1", key="mine", longest_s=50.0)
        world.machine.lock(lease, process(7))
        waiting = world.ask("ft_2", key="yours")
        bundles = world.roll("ft_3", 9)
        before = world.core.state
        world.restart(list(journal.replay()))
        after = world.core.state
        assert after.leases == before.leases
        assert after.requests == before.requests
        assert after.next_epoch == before.next_epoch
        assert world.core.known.gangs.find("ft_1", "mine").outcome == lease  # type: ignore[union-attr]
        again = world.core.known.gangs.find("ft_2", "yours")
        assert again is not None
        assert (again.request_id, again.outcome) == (waiting.request_id, None)
        answer = world.core.poll("ft_3", INFER.name, {b.epoch for b in bundles}, set())
        assert (answer.granted, answer.taken, answer.lost) == ((), (), ())
        world.run(60.0)  # the phase's longest duration goes on, too
        assert set(world.machine.killed) == {process(7)}
        assert again.outcome == world.held("ft_2")[0]


def test_a_pipeline_that_was_to_end_when_the_core_was_restarted_ends_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(journal=journal)
        world.core.record(PipelineEnding("ft_1", "bye"))
        world.restart(list(journal.replay()))
        world.core.end("ft_1", "bye")  # its client asks again, before the core comes to it
        world.run(world.settings.settle_s + 1)
        assert [type(event) for _, event in journal.replay()].count(PipelineUnregistered) == 1


def test_who_was_promised_a_device_before_a_restart_has_his_place_when_it_is_quarantined(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db", now=lambda: 1e9) as journal:
        world = World(journal=journal)
        world.core.name_holders("ft_1", INFER.name, [(n, process(10 + n)) for n in range(4)])
        for bundle in world.roll("ft_1", 1000):
            world.machine.lock(bundle, process(10 + bundle.devices[0]))
        world.machine.immortal.add(process(10))
        world.ask("ft_2", key="yours")
        world.restart(list(journal.replay()))
        assert [lease.devices for lease in world.held("ft_2", LeaseState.PENDING)] == [(0, 1)]
        world.run(2 * world.settings.shrink_deadline_s)
        assert world.held("ft_2", LeaseState.PENDING) == ()
        world.machine.immortal.clear()
        world.run(60.0)
        again = world.core.known.gangs.find("ft_2", "yours")
        assert again is not None
        assert again.outcome == world.held("ft_2")[0]


@pytest.mark.parametrize("draining", [False, True])
def test_a_stopped_holder_is_ended_also_while_it_was_to_give_back(draining: bool) -> None:
    world = World()
    worker = process(7)
    (bundle,) = (lease for lease in world.roll("ft_1", 1000) if lease.devices == (0,))
    world.core.name_holders("ft_1", INFER.name, [(0, worker)])
    world.machine.lock(bundle, worker)
    world.core.start()
    world.machine.states_[worker] = "stopped"
    if draining:
        world.ask("ft_2")
        assert bundle in world.held("ft_1", LeaseState.DRAINING)
    world.run(world.settings.stopped_s + 3.0)
    assert world.machine.killed == [worker]
    assert bundle.epoch not in world.core.state.leases


def test_processes_are_looked_at_again_when_an_answer_is_lost() -> None:
    world = World()
    lease = world.gang("ft_1", holder=(asker := process(7)))
    world.core.known.jobs["ft_1"].heard(asker, world.clock.time())
    world.core.start()
    answer, world.machine.states = world.machine.states, lambda processes, done: None  # type: ignore[method-assign,assignment]
    world.run(10.0)
    world.machine.states = answer  # type: ignore[method-assign]
    world.machine.states_[asker] = "dead"
    world.run(70.0)
    assert lease.epoch not in world.core.state.leases
