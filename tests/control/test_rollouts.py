"""Rollouts that grow and shrink, and coordinators that do not do their part, on a real Ray."""

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
    """Reports demand and waits until the coordinator was told of so many bundles; returns their devices."""
    job.client.report_demand("actor_infer", demand)
    told = ask(job.coordinator.bundles_told.remote("grow", bundles))
    return {device for lease in told for device in lease.devices}


def reasons(job: FakeJob) -> list[ReleaseReason]:
    return [r.reason for r in job.client.lease_log() if r.reason is not None]


def test_a_gang_takes_devices_from_a_rollout_which_gets_them_back(make_job: MakeJob) -> None:
    rollout = make_job({"actor_infer": range(8)}, sizes={"actor_infer": 2}, coordinator={})
    trainer = make_job({"actor_train": [1, 2]})
    assert start_rollout(rollout, 4) == set(range(8))
    with trainer.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=10) as lease:
        assert lease.devices == (1, 2)
        shrunk = ask(rollout.coordinator.bundles_told.remote("shrink", 2))
        assert sorted(s.devices for s in shrunk) == [(0, 1), (2, 3)]
        held = rollout.client.leases()
        # Bundle (0, 1) and (2, 3) had to go, and cannot come back while devices 1 and 2 are held.
        assert sorted(s.lease.devices for s in held) == [(4, 5), (6, 7)]
        assert {s.state for s in held} == {LeaseState.ACTIVE}
    again = ask(rollout.coordinator.bundles_told.remote("grow", 6))[4:]
    assert sorted(g.devices for g in again) == [(0, 1), (2, 3)]
    assert min(g.epoch for g in again) > lease.epoch
    assert reasons(rollout) == [ReleaseReason.SHRUNK, ReleaseReason.SHRUNK]
    assert [r.event for r in rollout.client.lease_log()] == (
        ["granted"] * 4 + ["shrinking"] * 2 + ["released"] * 2 + ["granted"] * 2
    )


@pytest.mark.parametrize("answer", ["hang", "raise"])
def test_a_rollout_that_does_not_give_back_loses_its_workers_only(
    make_job: MakeJob, make_worker: Callable[[], Any], answer: str
) -> None:
    rollout = make_job({"actor_infer": [0, 1]}, coordinator={"shrink": answer})
    victim, bystander = make_worker(), make_worker()
    ask([victim.ping.remote(), bystander.ping.remote()])
    rollout.client.attach_workers("actor_infer", {0: victim, 1: bystander})
    start_rollout(rollout, 2)
    with make_job({"actor_train": [0]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=20):
        assert reasons(rollout) == [ReleaseReason.KILLED]
        with pytest.raises(ray.exceptions.RayActorError):
            ask(victim.ping.remote())
        ask(bystander.ping.remote())
        assert [s.lease.devices for s in rollout.client.leases()] == [(1,)]
        assert [lost.bundle for lost in ask(rollout.coordinator.bundles_told.remote("lost", 1))] == [0]


def test_a_coordinator_that_cannot_grow_is_left_alone_and_others_are_not(make_job: MakeJob) -> None:
    broken = make_job({"actor_infer": [0, 1, 2, 3]}, coordinator={"grow": "raise"})
    broken.client.report_demand("actor_infer", 1000)
    ask(broken.coordinator.bundles_told.remote("lost", 4))
    healthy = make_job({"actor_infer": [0, 1, 2, 3]}, coordinator={})
    assert start_rollout(healthy, 4) == {0, 1, 2, 3}
    assert reasons(broken)[:4] == [ReleaseReason.KILLED] * 4
    # Tried again after a pause, not at once: without one there would be hundreds by now.
    assert len(reasons(broken)) <= 12
    ask(broken.coordinator.set_answer.remote("grow", "ack"))
    healthy.client.report_demand("actor_infer", 0)
    ask(broken.coordinator.bundles_told.remote("grow", len(reasons(broken)) + 1))


def test_a_coordinator_that_dies_while_it_shrinks_ends_its_pipeline(
    make_job: MakeJob, make_worker: Callable[[], Any], ray_session: Any
) -> None:
    rollout = make_job({"actor_infer": [4, 5]}, coordinator={"shrink": "hang"})
    worker = make_worker()
    ask(worker.ping.remote())
    rollout.client.attach_workers("actor_infer", {1: worker})
    start_rollout(rollout, 2)
    trainer = make_job({"actor_train": [4]})
    waiting = trainer.client
    ref = ray.get_actor("rlix:scheduler", "rlix").request_gang.remote(
        trainer.id, "actor_train", Phase.ACTOR_TRAINING, 20.0
    )
    ask(rollout.coordinator.bundles_told.remote("shrink", 1))
    ray.kill(rollout.coordinator)
    waiting.release(ask(ref))
    with pytest.raises(ray.exceptions.RayActorError):
        ask(worker.ping.remote())
    # Every lease of the dead job is gone, including the one that nobody asked back.
    with make_job({"actor_train": [5]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=20):
        assert rollout.id not in [p.pipeline_id for p in ask(ray_session.status.remote()).pipelines]
