"""The single writer without Ray: what it records and how it takes failures."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from rlix.control import core as core_module
from rlix.control.coordinator_link import CoordinatorError
from rlix.control.core import Core
from rlix.control.job import Job
from rlix.control.journal import Journal, JournalError
from rlix.control.settings import Settings
from rlix.control.usage import Usage
from rlix.protocol.errors import RlixError
from rlix.protocol.events import DemandReported, DevicesDiscovered, Event, LeaseReleased, PipelineRegistered
from rlix.protocol.messages import Cluster, Demand, Device, DeviceKind, Registration, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies import Policy
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State

DEVICES = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(4))
TRAIN = Cluster("actor_train", 1, (0, 1))
INFER = Cluster("actor_infer", 1, (0, 1, 2, 3))


class Link:
    """A coordinator that is always there and always agrees."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration

    async def grow(self, leases: object, timeout_s: float) -> None: ...

    async def shrink(self, leases: object, deadline_s: float) -> None: ...

    async def bundles_lost(self, leases: object, timeout_s: float) -> None: ...

    async def ended(self, given_up: Callable[[], bool]) -> str:
        await asyncio.Event().wait()
        return "never"


def with_core(tmp_path: Path, scenario: Callable[[Core], Coroutine[None, None, None]]) -> State:
    """Runs a scenario on a core with two admitted jobs; returns the state at its end."""

    async def main() -> State:
        core = Core(Settings(home=tmp_path), Journal(tmp_path / "journal.db"))
        core.record(DevicesDiscovered(DEVICES))
        core.start()
        for _ in range(2):
            registration = Registration(core.allocate("ft"), "ns", (TRAIN, INFER))
            core.record(PipelineRegistered(registration))
            core.admit(registration)
        await asyncio.wait_for(scenario(core), 20)
        core.close()
        return core.state

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def coordinators_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlix.control.job.CoordinatorLink", Link)


async def gang(core: Core, job_id: str) -> int:
    return (await core.request(job_id, TRAIN, Phase.ACTOR_TRAINING, 5.0).answer).epoch


def test_gpu_seconds_count_from_grant_to_release() -> None:
    usage = Usage(now=10.0)
    usage.granted(1, devices=2, now=11.0)
    usage.granted(2, devices=4, now=12.0)
    assert usage.gpu_s(13.0) == 2 * 2 + 4 * 1
    usage.released(1, now=13.0)
    usage.released(9, now=13.0)  # granted, and given up before it was active
    assert usage.gpu_s(15.0) == 2 * 2 + 4 * 3
    assert usage.age_s(15.0) == 5.0


def test_the_planner_sees_what_each_job_has_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Snapshot] = []

    def spy(snapshot: Snapshot, state: State, policy: Policy) -> tuple[Event, ...]:
        seen.append(snapshot)
        return decide(snapshot, state, policy)

    monkeypatch.setattr(core_module, "decide", spy)

    async def scenario(core: Core) -> None:
        core.record(LeaseReleased(await gang(core, "ft_1"), ReleaseReason.RELEASED))
        core.record(DemandReported("ft_1", "actor_infer", Demand(0)))
        core.record(DemandReported("ft_2", "actor_infer", Demand(9, work_s=1.0)))
        while len(seen[-1].rollouts) < 2:
            await asyncio.sleep(0)

    with_core(tmp_path, scenario)
    first, second = seen[-1].rollouts
    assert first.used_gpu_s > 0
    assert first.age_s > second.age_s > 0
    assert (second.demand.trajectories, second.demand.work_s) == (9, 1.0)


def test_a_gang_is_expected_for_a_moment_after_a_phase_of_a_job_has_ended(tmp_path: Path) -> None:
    async def scenario(core: Core) -> None:
        def expected() -> bool:
            return core._snapshot().rollouts[0].gang_expected

        core.record(DemandReported("ft_1", "actor_infer", Demand(9)))
        assert not expected()
        core.record(DemandReported("ft_1", "actor_infer", Demand(0)))
        assert expected()
        epoch = await gang(core, "ft_1")
        while expected():
            await asyncio.sleep(0.01)
        core.record(DemandReported("ft_1", "actor_infer", Demand(0)))  # a heartbeat ends nothing
        assert not expected()
        core.record(LeaseReleased(epoch, ReleaseReason.RELEASED))
        assert expected()
        core.record(DemandReported("ft_1", "actor_infer", Demand(5)))  # the next step's rollout
        assert not expected()

    with_core(tmp_path, scenario)


def without_waits(state: State) -> Snapshot:
    """What a state knows apart from when it came to know it."""
    snapshot = state.snapshot(0.0)
    return replace(
        snapshot, rollouts=tuple(replace(r, waited_s=0.0, held_s=0.0, served_gpu_s=0.0) for r in snapshot.rollouts)
    )


def test_the_state_is_a_fold_over_the_journal(tmp_path: Path) -> None:
    async def scenario(core: Core) -> None:
        core.record(DemandReported("ft_1", "actor_infer", Demand(9, 900)))
        await gang(core, "ft_2")
        core.request("ft_1", TRAIN, Phase.OLD_LOG_PROBS, None)
        await core.end("ft_1", "enough")
        core.request("ft_2", TRAIN, Phase.OLD_LOG_PROBS, None)
        core.record(DemandReported("ft_2", "actor_infer", Demand(1)))
        await asyncio.sleep(0)

    state = with_core(tmp_path, scenario)
    with Journal(tmp_path / "journal.db") as journal:
        again = State()
        for event in journal.replay():
            again.apply(event, 0.0)
    assert without_waits(again) == without_waits(state)
    assert len(again.leases) >= 1
    assert len(again.requests) == 1
    assert again.registrations == state.registrations
    assert again.next_epoch == state.next_epoch


def test_a_bug_in_the_planner_costs_one_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(core: Core) -> None:
        def broken(*_: object) -> None:
            monkeypatch.setattr(core_module, "decide", decide)
            raise IndexError("a bug")

        monkeypatch.setattr(core_module, "decide", broken)
        first = core.request("ft_1", TRAIN, Phase.ACTOR_TRAINING, None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not first.answer.done()
        core.record(DemandReported("ft_2", "actor_infer", Demand(0)))
        assert (await first.answer).devices == TRAIN.devices

    with caplog.at_level(logging.CRITICAL):
        with_core(tmp_path, scenario)
    assert "a task of the control plane failed: planning" in caplog.text


def test_a_journal_that_cannot_be_written_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(core: Core) -> None:
        def full(_: object) -> None:
            raise JournalError("cannot write to the journal: disk full")

        monkeypatch.setattr(core.journal, "append", full)
        epoch = await gang(core, "ft_1")
        core.record(LeaseReleased(epoch, ReleaseReason.RELEASED))

    with_core(tmp_path, scenario)
    assert "a restart will not know of them" in caplog.text


def test_an_event_that_contradicts_the_state_changes_nothing(tmp_path: Path) -> None:
    async def scenario(core: Core) -> None:
        before = len(core.journal), core.state.snapshot(0.0)
        with pytest.raises(RlixError, match="lease 99"):
            core.record(LeaseReleased(99, ReleaseReason.RELEASED))
        assert (len(core.journal), core.state.snapshot(0.0)) == before

    with_core(tmp_path, scenario)


def test_a_hung_job_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object) -> None:
        await asyncio.sleep(0.05)
        raise CoordinatorError("did not return within 0.05 s")

    async def scenario(core: Core) -> None:
        core.record(DemandReported("ft_1", "actor_infer", Demand(100)))
        while len(core.state.leases) < 4:
            await asyncio.sleep(0)
        monkeypatch.setattr(core.jobs["ft_1"].link, "shrink", hang)
        blocked = core.request("ft_2", TRAIN, Phase.ACTOR_TRAINING, 5.0)
        await asyncio.sleep(0.01)
        assert not blocked.answer.done()
        third = Registration(core.allocate("ft"), "ns", (Cluster("critic", 1, (3,)),))
        core.record(PipelineRegistered(third))
        core.admit(third)
        other = core.request("ft_3", third.clusters[0], Phase.CRITIC_TRAINING, 5.0)
        assert (await blocked.answer).devices == (0, 1)
        assert (await other.answer).devices == (3,)
        killed = [r.lease.devices for r in core.log.since("ft_1", 0) if r.reason is ReleaseReason.KILLED]
        assert sorted(killed) == [(0,), (1,), (3,)]

    with_core(tmp_path, scenario)


def test_pauses_after_failures_grow_to_a_minute_and_end_with_success() -> None:
    job = Job(Registration("ft_1", "ns", (INFER,)), now=0.0)
    assert [job.failed(0.0) for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert job.muted(59.9)
    assert not job.muted(60.0)
    job.succeeded()
    assert job.failed(0.0) == 1.0
