"""Registration, admission, gangs and their errors, on a real Ray."""

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import psutil
import pytest
import ray

from rlix.control.client import JobClient
from rlix.control.init import init
from rlix.control.settings import Settings
from rlix.protocol.errors import DeadlockError, PipelineGoneError, SpecError, StaleEpochError, WaitTimeoutError
from rlix.protocol.messages import DeviceKind, ReleaseReason
from rlix.protocol.types import ORCHESTRATOR_ACTOR_NAME, Phase
from tests.control.conftest import FakeJob, MakeJob
from tests.waiting import until

pytestmark = pytest.mark.ray

GOOD = {"cluster_tp_configs": {"actor_train": 1}, "cluster_device_mappings": {"actor_train": [0]}}


def ask(ref: Any) -> Any:
    return ray.get(ref, timeout=300)


def test_the_pool_is_found_and_init_attaches_again(ray_session: Any, settings: Settings) -> None:
    devices = ask(ray_session.devices.remote())
    assert [(d.id, d.index, d.kind, d.node_ip) for d in devices] == [
        (i, i, DeviceKind.CPU, "127.0.0.1") for i in range(8)
    ]
    assert ask(init(create_if_missing=False, settings=settings).devices.remote()) == devices
    assert ask(init(settings=settings, log_level="WARNING").devices.remote()) == devices


def test_ray_starts_nothing_that_nobody_uses(ray_session: Any) -> None:
    """Neither its dashboard's process, which `ray.init` would wait for, nor its autoscaler."""
    processes = psutil.Process().children(recursive=True)
    started = " ".join(part for p in processes if p.status() != psutil.STATUS_ZOMBIE for part in p.cmdline())
    assert "/raylet" in started
    assert not re.search(r"/dashboard\.py|/_private/monitor\.py|autoscaler", started)
    assert "/rlix/control/setup_worker.py" in started  # in what the raylet starts workers with


def test_errors_keep_their_type_and_say_what_to_do(ray_session: Any) -> None:
    with pytest.raises(SpecError, match="unknown pipeline id 'ft_x'; get one from allocate_pipeline_id"):
        ask(ray_session.register_pipeline.remote(pipeline_id="ft_x", ray_namespace="n", **GOOD))
    with pytest.raises(SpecError, match="kind must be a word such as 'ft' or 'lora', got ''"):
        ask(ray_session.allocate_pipeline_id.remote(""))
    job_id = ask(ray_session.allocate_pipeline_id.remote("ft"))
    with pytest.raises(PipelineGoneError, match=f"pipeline '{job_id}' is not registered"):
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
    ask(ray_session.register_pipeline.remote(pipeline_id=job_id, ray_namespace="n", **GOOD))  # the same again
    with pytest.raises(SpecError, match="already registered; allocate another id"):
        ask(ray_session.register_pipeline.remote(pipeline_id=job_id, ray_namespace="other", **GOOD))
    with pytest.raises(PipelineGoneError, match="is not admitted; call admit_pipeline first"):
        JobClient(job_id).acquire("actor_train", Phase.ACTOR_TRAINING)
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
    with first.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300) as held:
        with second.client.phase("critic", Phase.CRITIC_TRAINING, timeout_s=300) as elsewhere:
            assert elsewhere.devices == (4,)
        with pytest.raises(WaitTimeoutError) as error:
            second.client.acquire("actor_train", Phase.INITIALIZATION, timeout_s=0.1)
        assert f"{first.id}/actor_train (ACTOR_TRAINING, active) holds [2]" in str(error.value)
        assert f"{second.id}/actor_train for INITIALIZATION within 0.1 s" in str(error.value)
        waiting = second.ask("actor_train", Phase.ACTOR_TRAINING)
        assert wait([waiting], timeout=0.3).not_done == {waiting}
        mine = [p for p in ask(ray_session.status.remote()).pipelines if p.pipeline_id == second.id]
        assert mine[0].waiting == ("actor_train",)  # and not twice: the request that timed out is gone
    lease = waiting.result(300)
    assert lease.devices == (2, 3)
    assert held.epoch < elsewhere.epoch < lease.epoch
    second.client.release(lease)
    second.client.release(lease)  # said again, as after a scheduler that ended before it answered; it is recorded once
    with pytest.raises(StaleEpochError, match=f"lease {held.epoch} is not held"):
        second.client.release(held)
    records = second.client.lease_log()
    assert [(r.event, r.lease.epoch, r.reason) for r in records] == [
        ("granted", elsewhere.epoch, None),
        ("released", elsewhere.epoch, ReleaseReason.RELEASED),
        ("granted", lease.epoch, None),
        ("released", lease.epoch, ReleaseReason.RELEASED),
    ]
    assert records[2].waited_s is not None
    assert records[2].waited_s > 0.0
    assert second.client.lease_log(records[2].number) == records[3:]
    everybodys = ask(ray_session.leases_since.remote(records[1].number))
    assert [r for r in everybodys if r.lease.pipeline_id == second.id] == list(records[2:])
    assert all(r.number > records[1].number for r in everybodys)


def test_priority_decides_who_is_next(make_job: MakeJob) -> None:
    holder, log_probs, training = (make_job({"actor_train": [5]}) for _ in range(3))
    with holder.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        later = log_probs.ask("actor_train", Phase.OLD_LOG_PROBS)
        until_it_waits(log_probs)
        sooner = training.ask("actor_train", Phase.ACTOR_TRAINING)
        until_it_waits(training)
        assert not later.done()
        assert not sooner.done()
    training.client.release(sooner.result(300))
    log_probs.client.release(later.result(300))


def test_a_gang_runs_on_an_alternative_that_is_free_and_waits_while_none_is(make_job: MakeJob) -> None:
    elsewhere = {"actor_train": [[6, 7]]}
    holder, moves, waits = (make_job({"actor_train": [0, 1]}, alternatives=elsewhere) for _ in range(3))
    with holder.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        with moves.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300) as moved:
            assert moved.devices == (6, 7)
            with pytest.raises(WaitTimeoutError, match=r"devices \[0, 1\] or \[6, 7\] were not granted"):
                waits.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=0.1)
            waiting = waits.ask("actor_train", Phase.ACTOR_TRAINING)
            until_it_waits(waits)
        assert waiting.result(300).devices == (6, 7)
    waits.client.release(waiting.result(300))


def test_unregistering_refuses_waiting_requests_frees_devices_and_kills_workers(
    make_job: MakeJob, make_worker: Callable[[], Any], ray_session: Any
) -> None:
    holder, other = make_job({"actor_train": [0, 1], "critic": [2]}), make_job({"actor_train": [0], "critic": [2]})
    worker = make_worker()
    holder.client.name_holders("actor_train", {0: ask(worker.process.remote())})
    holder.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=300)
    critic = other.client.acquire("critic", Phase.CRITIC_TRAINING, timeout_s=300)
    refused = holder.ask("critic", Phase.CRITIC_TRAINING)
    served = other.ask("actor_train", Phase.ACTOR_TRAINING)
    until_it_waits(holder)
    until_it_waits(other)
    ask(ray_session.unregister_pipeline.remote(holder.id, "enough"))
    with pytest.raises(PipelineGoneError, match="was ended while it waited for 'critic': enough"):
        refused.result(300)
    assert served.result(300).devices == (0,)
    other.client.release(critic)
    with pytest.raises(ray.exceptions.RayActorError):
        ask(worker.ping.remote())
    assert holder.client.lease_log()[-1].reason is ReleaseReason.UNREGISTERED
    with pytest.raises(PipelineGoneError):
        holder.client.acquire("critic", Phase.CRITIC_TRAINING)


def test_a_caller_that_dies_leaves_no_request_and_no_lease_behind(
    make_job: MakeJob, make_worker: Callable[[], Any]
) -> None:
    holder, dying, patient = (make_job({"actor_train": [6]}) for _ in range(3))
    caller = make_worker()
    ask(caller.ping.remote())
    with holder.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        caller.acquire.remote(dying.id, "actor_train", Phase.ACTOR_TRAINING)
        until_it_waits(dying)
        next_one = patient.ask("actor_train", Phase.ACTOR_TRAINING)
        until_it_waits(patient)
        ray.kill(caller)
    # The request of the dead caller was first in line: whatever it got must come back.
    patient.client.release(next_one.result(300))


def test_a_program_that_dies_ends_its_pipeline(
    make_job: MakeJob, make_worker: Callable[[], Any], ray_session: Any
) -> None:
    job, other = make_job({"actor_train": [3]}), make_job({"actor_train": [3]})
    program, worker = make_worker(), make_worker()
    ask(program.join.remote(job.id))
    job.client.name_holders("actor_train", {0: ask(worker.process.remote())})
    job.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=300)
    waiting = other.ask("actor_train", Phase.ACTOR_TRAINING)
    ray.kill(program)
    other.client.release(waiting.result(300))
    with pytest.raises(ray.exceptions.RayActorError):
        ask(worker.ping.remote())
    with pytest.raises(PipelineGoneError):
        job.client.registration()


def test_a_stopped_trainer_is_ended_and_the_next_gang_goes_on(
    make_job: MakeJob, make_worker: Callable[[], Any]
) -> None:
    job, other = make_job({"actor_train": [3]}), make_job({"actor_train": [3]})
    trainer = make_worker()
    process = ask(trainer.process.remote())
    job.client.name_holders("actor_train", {0: process})
    lease = job.client.acquire("actor_train", Phase.ACTOR_TRAINING, timeout_s=300)
    waiting = other.ask("actor_train", Phase.ACTOR_TRAINING)
    os.kill(process.pid, signal.SIGSTOP)
    other.client.release(waiting.result(300))
    with pytest.raises(StaleEpochError):
        job.client.release(lease)


def test_what_a_job_waits_for_behind_itself_is_refused(make_job: MakeJob) -> None:
    job = make_job({"actor_train": [1, 2], "critic": [2]})
    with job.client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300):
        with pytest.raises(DeadlockError, match=r"critic .* waits for devices \[2\] of lease"):
            job.client.acquire("critic", Phase.CRITIC_TRAINING)
        stop = threading.Event()
        stop.set()
        with pytest.raises(InterruptedError, match="told to stop while waiting for critic"):
            job.client.acquire("critic", Phase.CRITIC_TRAINING, stop=stop)


def until_it_waits(job: FakeJob) -> None:
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, "rlix")
    until(
        lambda: job.id in [waiting.pipeline_id for waiting in ask(orchestrator.status.remote()).waiting],
        f"{job.id} never waited",
    )
