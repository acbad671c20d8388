"""Registration, admission, gangs and their errors, on a real Ray."""

from collections.abc import Callable
from typing import Any

import pytest
import ray

from rlix.control.init import init
from rlix.control.settings import Settings
from rlix.protocol.errors import PipelineGoneError, SpecError, StaleEpochError, WaitTimeoutError
from rlix.protocol.messages import DeviceKind, ReleaseReason
from rlix.protocol.types import SCHEDULER_ACTOR_NAME, Phase
from tests.control.conftest import MakeJob

pytestmark = pytest.mark.ray

GOOD = {"cluster_tp_configs": {"actor_train": 1}, "cluster_device_mappings": {"actor_train": [0]}}


def ask(ref: Any) -> Any:
    return ray.get(ref, timeout=30)


def test_the_pool_is_found_and_init_attaches_again(ray_session: Any, settings: Settings) -> None:
    devices = ask(ray_session.devices.remote())
    assert [(d.id, d.index, d.kind, d.node_ip) for d in devices] == [
        (i, i, DeviceKind.CPU, "127.0.0.1") for i in range(8)
    ]
    assert ask(init(create_if_missing=False, settings=settings).devices.remote()) == devices
    assert ask(init(settings=settings, log_level="WARNING").devices.remote()) == devices


def test_errors_keep_their_type_and_say_what_to_do(ray_session: Any) -> None:
    with pytest.raises(SpecError, match="unknown pipeline id 'ft_x'; get one from allocate_pipeline_id"):
        ask(ray_session.register_pipeline.remote(pipeline_id="ft_x", ray_namespace="n", **GOOD))
    with pytest.raises(SpecError, match="kind must be a word such as 'ft' or 'lora', got ''"):
        ask(ray_session.allocate_pipeline_id.remote(""))
    job_id = ask(ray_session.allocate_pipeline_id.remote("ft"))
    with pytest.raises(PipelineGoneError, match=f"admit_pipeline: pipeline '{job_id}' is not registered"):
        ask(ray_session.admit_pipeline.remote(pipeline_id=job_id))
    with pytest.raises(ValueError, match="device 9 does not exist; this pool has devices 0-7"):  # a SpecError is one
        ask(
            ray_session.register_pipeline.remote(
                pipeline_id=job_id,
                ray_namespace="n",
                cluster_tp_configs={"critic": 1},
                cluster_device_mappings={"critic": [9]},
            )
        )
    ask(ray_session.register_pipeline.remote(pipeline_id=job_id, ray_namespace="n", **GOOD))
    with pytest.raises(SpecError, match="already registered; allocate another id"):
        ask(ray_session.register_pipeline.remote(pipeline_id=job_id, ray_namespace="n", **GOOD))
    scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, "rlix")
    with pytest.raises(PipelineGoneError, match="is not admitted; call admit_pipeline first"):
        ask(scheduler.request_gang.remote(job_id, "actor_train", Phase.ACTOR_TRAINING))
    ask(ray_session.unregister_pipeline.remote(job_id))
    with pytest.raises(PipelineGoneError, match="is not registered"):
        ask(ray_session.registration.remote(job_id))


def test_sizes_are_placed_beside_what_is_registered_already(ray_session: Any) -> None:
    made = []
    for _ in range(2):
        job_id = ask(ray_session.allocate_pipeline_id.remote("ft"))
        made.append(
            ask(
                ray_session.register_pipeline.remote(
                    pipeline_id=job_id,
                    ray_namespace="n",
                    cluster_tp_configs={"trainer": 1, "policy": 1, "judge": 2},
                    cluster_device_mappings={"trainer": 2, "policy": None, "judge": 4},
                    elastic_clusters=["policy", "judge"],
                )
            )
        )
    first, second = (registration.cluster("trainer") for registration in made)
    assert not set(first.devices) & set(second.devices)
    assert {len(first.devices), *map(len, first.alternatives)} == {2}
    for registration, trainer in zip(made, (first, second), strict=True):
        policy, judge = registration.cluster("policy"), registration.cluster("judge")
        assert (policy.elastic, judge.elastic, trainer.elastic) == (True, True, False)
        assert policy.devices == tuple(range(8))
        assert len(judge.bundles) == 2
        assert set(trainer.devices) <= set(judge.devices)
        ask(ray_session.unregister_pipeline.remote(registration.pipeline_id))


def test_two_jobs_take_turns_and_epochs_grow(make_job: MakeJob, ray_session: Any) -> None:
    first, second = make_job({"actor_train": [0, 1, 2]}), make_job({"actor_train": [2, 3], "critic": [4]})
    with first.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=10) as held:
        with second.client.phase("critic", Phase.CRITIC_TRAINING, timeout_s=10) as elsewhere:
            assert elsewhere.devices == (4,)
        with pytest.raises(WaitTimeoutError) as error:
            second.client.acquire("actor_train", Phase.INITIALIZATION, timeout_s=0.1)
        assert f"{first.id}/actor_train (ACTOR_TRAINING, active) holds [2]" in str(error.value)
        assert f"{second.id}/actor_train for INITIALIZATION within 0.1 s" in str(error.value)
        waiting = ray.get_actor(SCHEDULER_ACTOR_NAME, "rlix").request_gang.remote(
            second.id, "actor_train", Phase.ACTOR_TRAINING
        )
        assert ray.wait([waiting], timeout=0.1)[1] == [waiting]
        mine = [p for p in ask(ray_session.status.remote()).pipelines if p.pipeline_id == second.id]
        assert mine[0].waiting == ("actor_train",)  # and not twice: the request that timed out is gone
    lease = ask(waiting)
    assert lease.devices == (2, 3)
    assert held.epoch < elsewhere.epoch < lease.epoch
    second.client.release(lease)
    with pytest.raises(StaleEpochError, match=f"lease {lease.epoch} is not held"):
        second.client.release(lease)
    records = second.client.lease_log()
    assert [(r.event, r.lease.epoch, r.reason) for r in records] == [
        ("granted", elsewhere.epoch, None),
        ("released", elsewhere.epoch, ReleaseReason.RELEASED),
        ("granted", lease.epoch, None),
        ("released", lease.epoch, ReleaseReason.RELEASED),
    ]
    assert records[2].waited_s is not None
    assert records[2].waited_s >= 0.09  # it waited at least as long as ray.wait above, up to the clock's grain
    assert second.client.lease_log(records[2].number) == records[3:]


def test_priority_decides_who_is_next(make_job: MakeJob) -> None:
    holder, log_probs, training = (make_job({"actor_train": [5]}) for _ in range(3))
    scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, "rlix")
    with holder.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=10):
        later = scheduler.request_gang.remote(log_probs.id, "actor_train", Phase.OLD_LOG_PROBS)
        sooner = scheduler.request_gang.remote(training.id, "actor_train", Phase.ACTOR_TRAINING)
        assert ray.wait([later, sooner], timeout=0.1)[0] == []
    training.client.release(ask(sooner))
    log_probs.client.release(ask(later))


def test_a_gang_that_would_be_second_in_a_queue_runs_on_an_alternative(make_job: MakeJob, ray_session: Any) -> None:
    elsewhere = {"actor_train": [[6, 7]]}
    holder, waits, moves = (make_job({"actor_train": [0, 1]}, alternatives=elsewhere) for _ in range(3))
    scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, "rlix")
    with holder.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=10):
        with pytest.raises(WaitTimeoutError, match=r"devices \[0, 1\] or \[6, 7\] were not granted"):
            waits.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=0.1)  # next in line, so it waits
        waiting = scheduler.request_gang.remote(waits.id, "actor_train", Phase.ACTOR_TRAINING)
        assert ray.wait([waiting], timeout=0.1)[0] == []
        with moves.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=10) as moved:
            assert moved.devices == (6, 7)
    waits.client.release(ask(waiting))


def test_unregistering_refuses_waiting_requests_frees_devices_and_kills_workers(
    make_job: MakeJob, make_worker: Callable[[], Any], ray_session: Any
) -> None:
    holder, other = make_job({"actor_train": [0, 1], "critic": [2]}), make_job({"actor_train": [0], "critic": [2]})
    scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, "rlix")
    worker = make_worker()
    ask(worker.ping.remote())
    holder.client.attach_workers("actor_train", {0: worker})
    holder.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=10)
    critic = other.client.acquire("critic", Phase.CRITIC_TRAINING, timeout_s=10)
    refused = scheduler.request_gang.remote(holder.id, "critic", Phase.CRITIC_TRAINING)
    served = scheduler.request_gang.remote(other.id, "actor_train", Phase.ACTOR_TRAINING)
    assert ray.wait([refused, served], timeout=0.1)[0] == []
    ask(ray_session.unregister_pipeline.remote(holder.id, "enough"))
    with pytest.raises(PipelineGoneError, match="unregistered while it waited for 'critic': enough"):
        ask(refused)
    assert ask(served).devices == (0,)
    other.client.release(critic)
    with pytest.raises(ray.exceptions.RayActorError):
        ask(worker.ping.remote())
    assert holder.client.lease_log()[-1].reason is ReleaseReason.UNREGISTERED
    with pytest.raises(PipelineGoneError):
        holder.client.acquire("critic", Phase.CRITIC_TRAINING)


def test_a_caller_that_dies_leaves_no_request_behind(make_job: MakeJob, make_worker: Callable[[], Any]) -> None:
    holder, dying, patient = (make_job({"actor_train": [6]}) for _ in range(3))
    caller = make_worker()
    ask(caller.ping.remote())
    with holder.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=10):
        ref = caller.acquire.remote(dying.id, "actor_train", Phase.ACTOR_TRAINING)
        assert ray.wait([ref], timeout=1.5)[0] == []  # longer than an unattended request lives: it is attended
        scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, "rlix")
        next_one = scheduler.request_gang.remote(patient.id, "actor_train", Phase.ACTOR_TRAINING)
        ray.kill(caller)
    # The request of the dead caller was first in line: whatever it got must come back.
    patient.client.release(ask(next_one))
