"""From job specs to running pipelines: what `rlix run` does, for programs."""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlix.control.rpc import root_cause
from rlix.flow import prefork
from rlix.flow.worker import WORKER_ENVIRONMENT
from rlix.pipeline.base import JobConfig, JobStatus
from rlix.pipeline.coordinator import PipelineCoordinator, check_importable
from rlix.pipeline.run_folder import check_free
from rlix.pipeline.spec import JobSpec, check_jobs
from rlix.pipeline.spec_clusters import ClusterSpec
from rlix.protocol.errors import SpecError, WaitTimeoutError
from rlix.protocol.messages import ControlStatus
from rlix.protocol.types import (
    NAMESPACE,
    ORCHESTRATOR_ACTOR_NAME,
    ClusterName,
    coordinator_actor_name,
    pipeline_namespace,
)

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 60.0
_FINAL_STATES = ("finished", "failed", "stopped")


class JobHandle:
    """A launched job, as seen by whoever launched it."""

    def __init__(self, config: JobConfig, pipeline_id: str, orchestrator: Any, coordinator: Any, pipeline: Any) -> None:
        self.name = config.spec.name
        self.pipeline_id = pipeline_id
        self.run_dir = config.run_dir
        self._orchestrator = orchestrator
        self._coordinator = coordinator
        self._pipeline = pipeline
        self._run = pipeline.run.remote()
        self._last = JobStatus(self.name, pipeline_id, "starting", 0, config.spec.steps, "starting")

    def status(self) -> JobStatus:
        """What the job is doing; the last known status when it does not answer within two seconds."""
        if self._last.state in _FINAL_STATES:
            return self._last
        ready, _ = ray.wait([self._run], timeout=0)
        if ready:
            self._last = self._final_status()
        else:
            with contextlib.suppress(GetTimeoutError, RayActorError):
                self._last = ray.get(self._coordinator.status.remote(), timeout=2.0) or self._last
        return self._last

    def stop(self) -> None:
        """Ask for a clean stop: the job writes a checkpoint and ends."""
        with contextlib.suppress(RayActorError):
            self._coordinator.stop.remote()

    def wait(self, timeout_s: float) -> JobStatus:
        """Wait for the end.

        Raises:
            WaitTimeoutError: the job had not ended after `timeout_s`.
        """
        ready, _ = ray.wait([self._run], timeout=timeout_s)
        if not ready:
            raise WaitTimeoutError(f"job {self.name!r} was still in {self._last.phase!r} after {timeout_s:g} s")
        return self.status()

    def close(self) -> None:
        """Free everything the job holds, ended or not."""
        with contextlib.suppress(RayActorError, RayTaskError, GetTimeoutError):
            ray.get(
                self._orchestrator.unregister_pipeline.remote(pipeline_id=self.pipeline_id, reason="closed"),
                timeout=_CALL_TIMEOUT_S,
            )
        for actor in (self._pipeline, self._coordinator):
            ray.kill(actor)

    def _final_status(self) -> JobStatus:
        try:
            summary = ray.get(self._run)
        except RayTaskError as error:
            cause = root_cause(error)
            return self._failed(f"{type(cause).__name__}: {cause}")
        except RayActorError as error:
            return self._failed(f"the pipeline actor died: {error}")
        with contextlib.suppress(GetTimeoutError, RayActorError):
            self._last = ray.get(self._coordinator.status.remote(), timeout=2.0) or self._last
        return replace(self._last, state=summary.state, phase=summary.state)

    def _failed(self, error: str) -> JobStatus:
        return replace(self._last, state="failed", phase="failed", error=error)


def launch(specs: Sequence[JobSpec], runs_dir: Path, *, resume: bool = False) -> list[JobHandle]:
    """Register, admit and start every job on the control plane that `rlix.init` attached to.

    Raises:
        SpecError: the jobs do not fit the pool, or not next to each other, or a run folder is in use; nothing was
            started.
    """
    for spec in specs:
        check_free(runs_dir.absolute() / spec.name)
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)
    status: ControlStatus = ray.get(orchestrator.status.remote(), timeout=_CALL_TIMEOUT_S)
    check_jobs(specs, [device.id for device in status.devices])
    for spec in specs:
        check_importable(spec.pipeline)
    prefork.warm(WORKER_ENVIRONMENT)  # every worker is forked from it; it loads while the coordinators start
    return [_launch_one(JobConfig(spec, runs_dir.absolute() / spec.name, resume), orchestrator) for spec in specs]


def _launch_one(config: JobConfig, orchestrator: Any) -> JobHandle:
    clusters = config.spec.clusters_in_use
    # The engines of pipelines stay where they are built, unless a pipeline says by a range that its own can move.
    stay = [name for name, c in clusters.items() if isinstance(c.gpus, int) and name != ClusterName.ACTOR_INFER]
    pipeline_id = ray.get(orchestrator.allocate_pipeline_id.remote("ft"), timeout=_CALL_TIMEOUT_S)
    ray.get(
        orchestrator.register_pipeline.remote(
            pipeline_id=pipeline_id,
            ray_namespace=pipeline_namespace(pipeline_id),
            cluster_tp_configs={name: cluster.tensor_parallel for name, cluster in clusters.items()},
            cluster_device_mappings={name: cluster.mapping for name, cluster in clusters.items()},
            cluster_device_alternatives={name: [] for name in stay},
        ),
        timeout=_CALL_TIMEOUT_S,
    )
    ray.get(orchestrator.admit_pipeline.remote(pipeline_id=pipeline_id), timeout=_CALL_TIMEOUT_S)
    coordinator = (
        ray.remote(PipelineCoordinator)
        .options(
            name=coordinator_actor_name(pipeline_id),
            namespace=pipeline_namespace(pipeline_id),
            num_cpus=0,
        )
        .remote(pipeline_id=pipeline_id, pipeline_config=config)
    )
    pipeline = ray.get(coordinator.create_pipeline_actor.remote(pipeline_config=config), timeout=_CALL_TIMEOUT_S)
    logger.info("%s started as %s", config.spec.name, pipeline_id)
    return JobHandle(config, pipeline_id, orchestrator, coordinator, pipeline)


def split_devices(specs: Sequence[JobSpec], pool: Sequence[int]) -> list[JobSpec]:
    """Give each job an equal part of the pool's devices to itself: what sharing is compared with.

    A cluster keeps its tensor-parallel size, and its number of devices as far as the job's part has them.

    Raises:
        SpecError: the part is smaller than the least that one of a job's clusters runs on.
    """
    size = len(pool) // max(1, len(specs))
    return [_on_part(spec, tuple(pool[i * size : (i + 1) * size])) for i, spec in enumerate(specs)]


def _on_part(spec: JobSpec, part: tuple[int, ...]) -> JobSpec:
    clusters = {}
    for name, cluster in spec.clusters_in_use.items():
        parallel = cluster.tensor_parallel
        count = min(cluster.count or len(part), len(part)) // parallel * parallel
        if count < max(cluster.least, 1):
            raise SpecError(
                f"{spec.name}: clusters.{name} needs {cluster.least} devices, but an equal split gives each job "
                f"{len(part)}; run fewer jobs side by side, or lower {_least_field(cluster)}"
            )
        clusters[name] = ClusterSpec(devices=part[:count], tensor_parallel=parallel)
    return spec.model_copy(update={"clusters": spec.clusters.model_copy(update=clusters)})


def _least_field(cluster: ClusterSpec) -> str:
    return "tensor_parallel" if cluster.least == cluster.tensor_parallel else "the range's min"


def wait_all(handles: Sequence[JobHandle], timeout_s: float) -> list[JobStatus]:
    """Wait for every job, together at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return [handle.wait(max(0.0, deadline - time.monotonic())) for handle in handles]
