"""Rollouts that grow and shrink, and programs that do not do their part, on a real Ray."""

from collections.abc import Callable
from typing import Any

import pytest
import ray

from rlix.protocol.messages import LeaseState, ReleaseReason
from rlix.protocol.types import Phase
from tests.control.conftest import FakeJob, MakeJob
from tests.control.test_pipelines import ask

pytestmark = pytest.mark.ray


def start_rollout(job: FakeJob, bundles: int, demand: int = 64) -> set[int]:
    """Reports demand and waits until the rollout was told of so many bundles; returns their devices."""
    ask(job.rollout.report.remote(demand))
    told = ask(job.rollout.told.remote("granted", bundles))
    return {device for lease in told for device in lease.devices}


def reasons(job: FakeJob) -> list[ReleaseReason]:
    return [r.reason for r in job.client.lease_log() if r.reason is not None]


def test_a_gang_takes_devices_from_a_rollout_which_gets_them_back(make_job: MakeJob) -> None:
    rollout = make_job({"actor_infer": range(8)}, sizes={"actor_infer": 2}, rollout={})
    trainer = make_job({"actor_train": [1, 2]})
    assert start_rollout(rollout, 4) == set(range(8))
    with trainer.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300) as lease:
        assert lease.devices == (1, 2)
        shrunk = ask(rollout.rollout.told.remote("taken", 2))
        assert sorted(s.devices for s in shrunk) == [(0, 1), (2, 3)]
        held = rollout.client.leases()
        # Bundle (0, 1) and (2, 3) had to go, and cannot come back while devices 1 and 2 are held.
        assert sorted(s.lease.devices for s in held) == [(4, 5), (6, 7)]
        assert {s.state for s in held} == {LeaseState.ACTIVE}
    again = ask(rollout.rollout.told.remote("granted", 6))[4:]
    assert sorted(g.devices for g in again) == [(0, 1), (2, 3)]
    assert min(g.epoch for g in again) > lease.epoch
    assert reasons(rollout) == [ReleaseReason.SHRUNK, ReleaseReason.SHRUNK]
    events = [r.event for r in rollout.client.lease_log()]
    assert sorted(events) == ["granted"] * 6 + ["released"] * 2 + ["shrinking"] * 2
    assert events[:4] == ["granted"] * 4


def test_a_rollout_that_does_not_give_back_loses_that_worker_only(
    make_job: MakeJob, make_worker: Callable[[], Any]
) -> None:
    rollout = make_job({"actor_infer": [0, 1]}, rollout={"shrink": False})
    victim, bystander = make_worker(), make_worker()
    processes = ask([victim.process.remote(), bystander.process.remote()])
    rollout.client.name_holders("actor_infer", dict(enumerate(processes)))
    start_rollout(rollout, 2)
    for lease in ask(rollout.rollout.told.remote("granted", 2)):
        ask((victim, bystander)[lease.bundle].lock.remote(rollout.id, lease))
    with make_job({"actor_train": [0]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        assert reasons(rollout) == [ReleaseReason.KILLED]
        with pytest.raises(ray.exceptions.RayActorError):
            ask(victim.ping.remote())
        ask(bystander.ping.remote())
        assert [s.lease.devices for s in rollout.client.leases()] == [(1,)]
        assert [lost.bundle for lost in ask(rollout.rollout.told.remote("lost", 1))] == [0]


def test_a_rollout_that_takes_nothing_up_is_left_alone_and_others_are_not(make_job: MakeJob) -> None:
    broken = make_job({"actor_infer": [0, 1, 2, 3]}, rollout={"grow": False})
    broken.client.report_demand("actor_infer", 1000)
    healthy = make_job({"actor_infer": [0, 1, 2, 3]}, rollout={})
    assert start_rollout(healthy, 4) == {0, 1, 2, 3}
    # It gets no others before it has asked what it has: without that there would be hundreds by now.
    assert reasons(broken) == [ReleaseReason.SHRUNK] * 4
    ask(broken.rollout.take_up.remote())
    ask(healthy.rollout.report.remote(0))
    ask(broken.rollout.told.remote("granted", 1))


def test_a_program_that_dies_while_it_gives_back_ends_with_its_workers(
    make_job: MakeJob, make_worker: Callable[[], Any], ray_session: Any
) -> None:
    rollout = make_job({"actor_infer": [4, 5]}, rollout={"shrink": False})
    worker = make_worker()
    rollout.client.name_holders("actor_infer", {1: ask(worker.process.remote())})
    rollout.client.name_holders("", {0: ask(rollout.rollout.process.remote())})
    start_rollout(rollout, 2)
    trainer = make_job({"actor_train": [4]})
    waiting = trainer.ask("actor_train", Phase.ACTOR_TRAINING)
    ask(rollout.rollout.told.remote("taken", 1))
    ray.kill(rollout.rollout)
    trainer.client.release(waiting.result(300))
    with pytest.raises(ray.exceptions.RayActorError):
        ask(worker.ping.remote())
    # Every lease of the dead job is gone, including the one that nobody asked back.
    with make_job({"actor_train": [5]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        assert rollout.id not in [p.pipeline_id for p in ask(ray_session.status.remote()).pipelines]
