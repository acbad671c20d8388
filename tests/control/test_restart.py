"""The control plane's own processes are killed or stopped: jobs go on, and nothing is given twice or forgotten."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from rlix.control.rpc import get
from rlix.control.settings import Settings
from rlix.node.device_lock import DeviceLocks
from rlix.pipeline.jobs.launch import check_in_service
from rlix.protocol.errors import PipelineGoneError, SpecError
from rlix.protocol.messages import NodeState, Process
from rlix.protocol.types import (
    NAMESPACE,
    ORCHESTRATOR_ACTOR_NAME,
    RESOURCE_MANAGER_ACTOR_NAME,
    SCHEDULER_ACTOR_NAME,
    Phase,
)
from tests.control.conftest import FakeJob, MakeJob
from tests.control.test_pipelines import ask, until_it_waits
from tests.control.test_rollouts import start_rollout
from tests.waiting import until

pytestmark = pytest.mark.ray


def process_of(name: str) -> Process:
    process: Process = ask(ray.get_actor(name, NAMESPACE).process.remote())
    return process


def until_another(name: str, before: Process) -> None:
    """Until the actor answers from another process."""

    def there() -> bool:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            answered: bool = ray.get(ray.get_actor(name, NAMESPACE).process.remote(), timeout=10) != before
            return answered
        return False

    until(there, f"{name} did not come back")


def test_a_killed_scheduler_comes_back_and_everybody_keeps_what_he_has(make_job: MakeJob) -> None:
    holder, waiter = make_job({"actor_train": [0, 1]}), make_job({"actor_train": [1, 2]})
    rollout = make_job({"actor_infer": [4, 5, 6]}, rollout={})
    start_rollout(rollout, 3)
    held = holder.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=300)
    waiting = waiter.ask("actor_train", Phase.ACTOR_TRAINING)
    until_it_waits(waiter)
    before = process_of(SCHEDULER_ACTOR_NAME)
    os.kill(before.pid, signal.SIGKILL)
    assert [s.lease.epoch for s in holder.client.leases()] == [held.epoch]  # asked while it is away: answered when back
    assert process_of(SCHEDULER_ACTOR_NAME) != before
    assert len(rollout.client.leases()) == 3
    assert not waiting.done()
    holder.client.release(held)
    got = waiting.result(300)
    assert got.devices == (1, 2)
    assert got.epoch > max([held.epoch, *(s.lease.epoch for s in rollout.client.leases())])
    waiter.client.release(got)
    # The rollout is asked to give way by a scheduler that never granted it anything.
    with make_job({"actor_train": [4]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        assert [lease.devices for lease in ask(rollout.rollout.told.remote("taken", 1))] == [(4,)]
    assert make_job({"critic": [0]}).id not in {holder.id, waiter.id, rollout.id}  # ids go on, too


@pytest.mark.parametrize(
    ("name", "number"), [(ORCHESTRATOR_ACTOR_NAME, signal.SIGKILL), (RESOURCE_MANAGER_ACTOR_NAME, signal.SIGSTOP)]
)
def test_the_other_actors_come_back_too(make_job: MakeJob, ray_session: Any, name: str, number: signal.Signals) -> None:
    """The other way about in `test_a_watchdog_that_has_just_started_ends_what_was_stopped_before`."""
    before = process_of(name)
    os.kill(before.pid, number)
    until_another(name, before)
    all_is_well(make_job, ray_session)


def all_is_well(make_job: MakeJob, ray_session: Any) -> None:
    assert len(ask(ray_session.devices.remote())) == 8
    with make_job({"actor_train": [3]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300) as lease:
        assert lease.devices == (3,)


def test_a_stopped_scheduler_is_started_again(make_job: MakeJob) -> None:
    job = make_job({"actor_train": [3]})
    before = process_of(SCHEDULER_ACTOR_NAME)
    os.kill(before.pid, signal.SIGSTOP)
    with job.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300) as lease:
        assert lease.devices == (3,)
    assert process_of(SCHEDULER_ACTOR_NAME) != before


def test_a_journal_that_was_moved_away_is_begun_anew_above_all_that_was_granted(
    make_job: MakeJob, ray_session: Any, settings: Settings, tmp_path: Path
) -> None:
    def used(job: FakeJob) -> int:
        with job.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300) as lease:
            locks = DeviceLocks([job.client.devices()[3].key])
            locks.acquire(job.client.fence(lease), 300.0)
            locks.release()
        return lease.epoch

    before = make_job({"actor_train": [3]})
    epoch = max(used(before) for _ in range(3))
    journal = settings.home / f"journal-{process_of(SCHEDULER_ACTOR_NAME).node_id}.db"
    for part in journal.parent.glob(f"{journal.name}*"):
        part.rename(tmp_path / part.name)
    os.kill(process_of(SCHEDULER_ACTOR_NAME).pid, signal.SIGKILL)
    until(lambda: len(ask(ray_session.devices.remote())) == 8, "nobody told the scheduler of its devices")
    after = make_job({"actor_train": [3]})
    assert used(after) > epoch
    assert int(after.id.removeprefix("ft_")) > int(before.id.removeprefix("ft_"))
    with pytest.raises(PipelineGoneError):
        before.client.registration()


def test_a_watchdog_that_has_just_started_ends_what_was_stopped_before(make_job: MakeJob, ray_session: Any) -> None:
    watcher, stopped = process_of(RESOURCE_MANAGER_ACTOR_NAME), process_of(ORCHESTRATOR_ACTOR_NAME)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(watcher.pid, signal.SIGKILL)
    until_another(ORCHESTRATOR_ACTOR_NAME, stopped)
    assert process_of(RESOURCE_MANAGER_ACTOR_NAME) != watcher
    all_is_well(make_job, ray_session)


def test_a_drained_host_stays_drained_when_the_resource_manager_is_started_again(
    make_job: MakeJob, ray_session: Any
) -> None:
    job, here = make_job({"actor_train": [3]}), ray.get_runtime_context().get_node_id()
    with pytest.raises(SpecError, match=rf"nowhere: no such host; there are: .*node {here[:8]}"):
        get(ray_session.cordon.remote("nowhere", True), what="the host", timeout_s=300)
    try:
        with job.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
            assert [node.state for node in ask(ray_session.cordon.remote(here[:12], True))] == [NodeState.DRAINING]
            before = process_of(RESOURCE_MANAGER_ACTOR_NAME)
            os.kill(before.pid, signal.SIGKILL)
            until_another(RESOURCE_MANAGER_ACTOR_NAME, before)
            ask(ray_session.ready.remote())
            assert [device.id for device in ask(ray_session.devices.remote())] == [3]
        assert ask(ray_session.devices.remote()) == ()
        (host,) = ask(ray_session.nodes.remote())
        assert host.state is NodeState.CORDONED
        said = f"host {host.name} is cordoned: `rlix uncordon {host.name}` brings it back"
        with pytest.raises(SpecError, match=f"\nthe pool lacks devices: {said}"):
            make_job({"actor_train": [3]})
        with pytest.raises(SpecError, match=f"the pool lends no devices: {said}"):
            check_in_service(ask(ray_session.status.remote()))
    finally:
        back = ask(ray_session.cordon.remote(here, False))
    assert [node.state for node in back] == [NodeState.READY]
    all_is_well(make_job, ray_session)
