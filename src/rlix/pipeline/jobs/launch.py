"""From job specs to running pipelines: what `rlix run` does, for programs."""

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rlix.control.rpc import get
from rlix.control.settings import Settings
from rlix.node.run_folder import check_free, take_back
from rlix.pipeline.jobs.coordinator import check_importable
from rlix.pipeline.jobs.handle import JobHandle
from rlix.pipeline.jobs.hosts import check_hosts
from rlix.pipeline.jobs.job_coordinator import JobCoordinator
from rlix.pipeline.jobs.register import register
from rlix.pipeline.jobs.resume import check_resumable
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.planning.choose import choose
from rlix.pipeline.planning.made import PlannedJob
from rlix.pipeline.spec.clusters import ClusterSpec
from rlix.pipeline.spec.job import JobSpec, check_jobs
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import ControlStatus, DeviceKind, Registration
from rlix.protocol.types import (
    HEAD_RESOURCE,
    NAMESPACE,
    ORCHESTRATOR_ACTOR_NAME,
    coordinator_actor_name,
    pipeline_namespace,
)
from rlix.workers import prefork
from rlix.workers.worker import WORKER_ENVIRONMENT

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""So many coordinators are started at a time: each is a process that imports for seconds, and others have work."""
_CALL_TIMEOUT_S = 60.0


def launch(given: Sequence[JobSpec | PlannedJob], runs_dir: Path, *, resume: bool = False) -> list[JobHandle]:
    """Register, admit and start every job on the control plane that `rlix.init` attached to.

    The jobs live as long as the control plane does, whatever becomes of this process.

    Raises:
        SpecError: the jobs do not fit the pool, or not next to each other, or a run folder is in use, or a run cannot
            go on with its spec; nothing was started.
    """
    jobs = [one if isinstance(one, PlannedJob) else PlannedJob(one) for one in given]
    for spec in (job.spec for job in jobs):
        check_free(runs_dir.absolute() / spec.name)
        if (moved := take_back(runs_dir.absolute() / spec.name)) is not None:
            logger.info("%s: a start that was killed before its first step is in %s", spec.name, moved)
        if resume:
            check_resumable(spec, runs_dir.absolute() / spec.name)
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)
    asked = orchestrator.status.remote()
    status: ControlStatus = get(asked, what="the orchestrator's status", timeout_s=_CALL_TIMEOUT_S)
    check_in_service(status)
    ids = [device.id for device in status.devices]
    home = Settings.from_env().home
    jobs = [planned(job, ids, home, runs_dir.absolute() / job.spec.name if resume else None) for job in jobs]
    specs = [job.spec for job in jobs]
    nodes = tuple(Counter(device.node_id for device in status.devices).values())
    check_jobs(specs, ids, virtual=all(device.kind is DeviceKind.CPU for device in status.devices), nodes=nodes)
    for spec in specs:
        check_importable(spec)
    prefork.warm(WORKER_ENVIRONMENT)  # every worker is forked from it; it loads while the coordinators start
    with contextlib.ExitStack() as started:  # what was started ends again when another one cannot start
        handles: list[JobHandle] = []
        starting: list[Any] = []  # answers of coordinators that are still to come
        for job, spec in zip(jobs, specs, strict=True):
            if len(starting) >= AT_ONCE:
                _, starting = ray.wait(starting, num_returns=len(starting) - AT_ONCE + 1, timeout=_CALL_TIMEOUT_S)
            config = JobConfig(spec, runs_dir.absolute() / spec.name, resume, plan=job.plan)
            handles.append(_create(config, orchestrator))
            starting.append(handles[-1].asked())
            started.callback(handles[-1].close)
            asked = orchestrator.registration.remote(handles[-1].pipeline_id)
            registration: Registration = ray.get(asked, timeout=_CALL_TIMEOUT_S)
            check_hosts(spec, runs_dir.absolute() / spec.name, registration, {d.id: d for d in status.devices})
        for handle in handles:
            handle.start()
        started.pop_all()
    return handles


def check_in_service(pool: ControlStatus) -> None:
    """Raises SpecError, which says how they come back, where all of a pool's hosts are drained."""
    if pool.drained and not pool.lent:
        raise SpecError(f"the pool lends no devices: {pool.drained}")


def planned(job: PlannedJob, ids: Sequence[int], home: Path, goes_on_in: Path | None) -> PlannedJob:
    """The job with its clusters; where it goes on in a run folder, by the times that the run measured there."""
    return choose(job.spec, ids, home, measured=goes_on_in).job if job.spec.is_unplanned else job


def _create(config: JobConfig, orchestrator: Any) -> JobHandle:
    spec = config.spec
    pipeline_id = register(spec, orchestrator)
    coordinator = (
        ray.remote(JobCoordinator)
        .options(
            name=coordinator_actor_name(pipeline_id),
            namespace=pipeline_namespace(pipeline_id),
            lifetime="detached",
            num_cpus=0,
            resources={HEAD_RESOURCE: 0.001},  # the one node that no job outlives
        )
        .remote(pipeline_id=pipeline_id, pipeline_config=config)
    )
    return JobHandle(JobStatus.first(config, pipeline_id), config.run_dir, orchestrator, coordinator)


def split_devices(specs: Sequence[JobSpec], pool: Sequence[int]) -> list[JobSpec]:
    """Give each job an equal part of the pool's devices to itself: what sharing is compared with.

    A cluster keeps the size of its replicas or shards, and its number of devices as far as the job's part has them.

    Raises:
        SpecError: the part is smaller than the least that one of a job's clusters runs on.
    """
    size = len(pool) // max(1, len(specs))
    return [_on_part(spec, tuple(pool[i * size : (i + 1) * size])) for i, spec in enumerate(specs)]


def _on_part(spec: JobSpec, part: tuple[int, ...]) -> JobSpec:
    clusters = {}
    for name, cluster in spec.clusters_in_use.items():
        unit = cluster.unit
        count = min(cluster.count or len(part), len(part)) // unit * unit
        if count < max(cluster.least, 1):
            raise SpecError(
                f"{spec.name}: clusters.{name} needs {cluster.least} devices, but an equal split gives each job "
                f"{len(part)}; run fewer jobs side by side, or lower {_least_field(cluster)}"
            )
        clusters[name] = cluster.on(devices=part[:count])
    return spec.model_copy(update={"clusters": spec.clusters.model_copy(update=clusters), "plan": None})


def _least_field(cluster: ClusterSpec) -> str:
    return cluster.unit_field if cluster.least == cluster.unit else "the range's min"
