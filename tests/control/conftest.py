"""Jobs for tests of the control plane on a real Ray."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from rlix.control.client import JobClient
from rlix.protocol.types import coordinator_actor_name, pipeline_namespace
from tests.control.fakes import FakeCoordinator, FakeWorker


@dataclass
class FakeJob:
    id: str
    client: JobClient
    coordinator: Any


MakeJob = Callable[..., FakeJob]


@pytest.fixture
def make_job(ray_session: Any) -> Iterator[MakeJob]:
    """Registers and admits jobs, with a coordinator that answers as told or with none; ends them after the test."""
    jobs: list[FakeJob] = []

    def make(
        devices: Mapping[str, Sequence[int]],
        *,
        sizes: Mapping[str, int] | None = None,
        alternatives: Mapping[str, Sequence[Sequence[int]]] | None = None,
        coordinator: Any = None,
    ) -> FakeJob:
        job_id = ray.get(ray_session.allocate_pipeline_id.remote("ft"), timeout=30)
        actor = None
        if coordinator is not None:
            actor = (
                ray.remote(num_cpus=0)(FakeCoordinator)
                .options(name=coordinator_actor_name(job_id), namespace=pipeline_namespace(job_id), max_concurrency=100)
                .remote(**coordinator)
            )
            ray.get(actor.pid.remote(), timeout=60)
        ray.get(
            ray_session.register_pipeline.remote(
                pipeline_id=job_id,
                ray_namespace=pipeline_namespace(job_id),
                cluster_tp_configs=sizes or dict.fromkeys(devices, 1),
                cluster_device_mappings={name: list(ids) for name, ids in devices.items()},
                cluster_device_alternatives=alternatives,
            ),
            timeout=30,
        )
        ray.get(ray_session.admit_pipeline.remote(pipeline_id=job_id), timeout=30)
        jobs.append(FakeJob(job_id, JobClient(job_id), actor))
        return jobs[-1]

    yield make
    for job in jobs:
        job.client.unregister("the test is over")
        if job.coordinator is not None:
            ray.kill(job.coordinator)


@pytest.fixture
def make_worker(ray_session: Any) -> Iterator[Callable[[], Any]]:
    workers: list[Any] = []

    def make() -> Any:
        workers.append(ray.remote(num_cpus=0)(FakeWorker).remote())
        return workers[-1]

    yield make
    for worker in workers:
        with contextlib.suppress(ValueError):
            ray.kill(worker)
