"""Jobs for tests of the control plane on a real Ray."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from rlix.control.client import JobClient
from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase, pipeline_namespace
from tests.control.fakes import FakeRollout, FakeWorker


@dataclass
class FakeJob:
    id: str
    client: JobClient
    rollout: Any = None

    def ask(self, cluster: str, phase: Phase, timeout_s: float | None = None) -> "Future[Lease]":
        """Asks for a gang in a thread; wait for the answer with `result(20)`."""
        threads = ThreadPoolExecutor(1)
        try:
            return threads.submit(self.client.acquire, cluster, phase, timeout_s)
        finally:
            threads.shutdown(wait=False)


MakeJob = Callable[..., FakeJob]


@pytest.fixture
def make_job(ray_session: Any) -> Iterator[MakeJob]:
    """Registers and admits jobs, with a rollout that does as told or with none; ends them after the test."""
    jobs: list[FakeJob] = []

    def make(
        devices: Mapping[str, Sequence[int]],
        *,
        sizes: Mapping[str, int] | None = None,
        alternatives: Mapping[str, Sequence[Sequence[int]]] | None = None,
        rollout: Mapping[str, Any] | None = None,
    ) -> FakeJob:
        job_id = ray.get(ray_session.allocate_pipeline_id.remote("ft"), timeout=300)
        ray.get(
            ray_session.register_pipeline.remote(
                pipeline_id=job_id,
                ray_namespace=pipeline_namespace(job_id),
                cluster_tp_configs=sizes or dict.fromkeys(devices, 1),
                cluster_device_mappings={name: list(ids) for name, ids in devices.items()},
                cluster_device_alternatives=alternatives,
            ),
            timeout=300,
        )
        ray.get(ray_session.admit_pipeline.remote(pipeline_id=job_id), timeout=300)
        job = FakeJob(job_id, JobClient(job_id, poll_s=1.0))
        jobs.append(job)
        if rollout is not None:
            job.rollout = ray.remote(num_cpus=0, max_concurrency=10)(FakeRollout).remote(job_id, **rollout)
            ray.get(job.rollout.process.remote(), timeout=300)
        return job

    yield make
    for job in jobs:
        job.client.unregister("the test is over")
        if job.rollout is not None:
            ray.kill(job.rollout)


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
