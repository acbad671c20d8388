"""From job specs to running pipelines: what `rlix run` does, for programs."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from rlix.control.rpc import root_cause
from rlix.control.settings import Settings
from rlix.flow import prefork
from rlix.flow.workers.worker import WORKER_ENVIRONMENT
from rlix.pipeline.jobs.coordinator import check_importable
from rlix.pipeline.jobs.job_coordinator import JobCoordinator
from rlix.pipeline.jobs.register import register
from rlix.pipeline.jobs.resume import check_resumable
from rlix.pipeline.jobs.run_folder import check_free
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.planning.choose import choose
from rlix.pipeline.spec.clusters import ClusterSpec
from rlix.pipeline.spec.job import JobSpec, check_jobs
from rlix.pipeline.spec.lora import RunSpec
from rlix.protocol.errors import SpecError, WaitTimeoutError
from rlix.protocol.messages import ControlStatus, DeviceKind
from rlix.protocol.types import (
    COORDINATOR_ACTOR_NAME_PREFIX,
    HEAD_RESOURCE,
    NAMESPACE,
    ORCHESTRATOR_ACTOR_NAME,
    coordinator_actor_name,
    pipeline_namespace,
)

logger = logging.getLogger(__name__)

FINAL_STATES = frozenset({"finished", "failed", "stopped"})
STATUS_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 60.0


class JobHandle:
    """A job of this control plane, launched by this process or by another one. Losing the handle ends nothing."""

    def __init__(self, first: JobStatus, run_dir: Path | None, orchestrator: Any, coordinator: Any) -> None:
        """`first` is what is known of the job so far. A coordinator that a user wrote may know no run folder."""
        self.name = first.name
        self.run_dir = run_dir
        self._last = first
        self._orchestrator = orchestrator
        self._coordinator = coordinator
        self._end = self._ask_for_the_end()

    @property
    def pipeline_id(self) -> str:
        """What it is registered as; another id once it was started again on other nodes."""
        return self._last.pipeline_id

    def start(self) -> None:
        """Start the run. Calling it again changes nothing."""
        ray.get(self._coordinator.start.remote(), timeout=_CALL_TIMEOUT_S)
        logger.info("%s started as %s", self.name, self.pipeline_id)

    def status(self) -> JobStatus:
        """What the job is doing; the last known status when it does not answer within two seconds."""
        if self._last.state in FINAL_STATES:
            return self._last
        ready, _ = ray.wait([self._end], timeout=0)
        if ready:
            self._last = self._final_status()
        else:
            with contextlib.suppress(GetTimeoutError, RayActorError):
                self._last = ray.get(self._coordinator.status.remote(), timeout=STATUS_TIMEOUT_S) or self._last
        return self._last

    def stop(self) -> None:
        """Ask for a clean stop: the job writes a checkpoint and ends."""
        with contextlib.suppress(RayActorError):
            self._coordinator.stop.remote()

    def change_run(
        self, verb: Literal["add", "pause", "resume", "remove"], name: str, run: RunSpec | None = None
    ) -> None:
        """Of a multi_lora job: add a run, or pause, resume or remove one.

        Raises:
            SpecError: there is no such run, or already one, or the job has none.
        """
        try:
            ray.get(self._coordinator.change_run.remote(verb, name, run), timeout=_CALL_TIMEOUT_S)
        except RayTaskError as error:
            raise root_cause(error) from error

    def wait(self, timeout_s: float) -> JobStatus:
        """Wait for the end.

        Raises:
            WaitTimeoutError: the job had not ended after `timeout_s`.
        """
        ready, _ = ray.wait([self._end], timeout=timeout_s)
        if not ready:
            raise WaitTimeoutError(f"job {self.name!r} was still in {self._last.phase!r} after {timeout_s:g} s")
        return self.status()

    def close(self) -> None:
        """Free everything the job holds, ended or not."""
        self.status()
        with contextlib.suppress(RayActorError, RayTaskError, GetTimeoutError):
            ray.get(
                self._orchestrator.unregister_pipeline.remote(pipeline_id=self.pipeline_id, reason="closed"),
                timeout=_CALL_TIMEOUT_S,
            )
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(ray.get_actor(f"pipeline:{self.pipeline_id}", pipeline_namespace(self.pipeline_id)))
        ray.kill(self._coordinator)

    def _ask_for_the_end(self) -> Any:
        coordinator = self._coordinator
        return (coordinator.ended if hasattr(coordinator, "ended") else coordinator.closed).remote()

    def _final_status(self) -> JobStatus:
        try:
            final: JobStatus | None = ray.get(self._end)
            final = final or ray.get(self._coordinator.status.remote(), timeout=STATUS_TIMEOUT_S) or self._last
        except ActorUnavailableError:
            self._end = self._ask_for_the_end()
            return self._last
        except (RayTaskError, RayActorError) as error:
            return replace(self._last, state="failed", phase="failed", error=f"the job's coordinator died: {error}")
        except GetTimeoutError:
            final = self._last
        return final if final.state in FINAL_STATES else replace(final, state="stopped", phase="stopped")


def find_jobs(orchestrator: Any) -> list[JobHandle]:
    """Every job of this control plane that has a coordinator, in order of launch. One that ended is found for a minute.

    A job whose coordinator does not answer within a few seconds is there, with what is known without it.
    """
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        pipeline_id = actor["name"].removeprefix(COORDINATOR_ACTOR_NAME_PREFIX)
        if pipeline_id == actor["name"]:
            continue
        with contextlib.suppress(ValueError, RayActorError):  # it has ended since
            found.append(_handle(pipeline_id, orchestrator, ray.get_actor(actor["name"], actor["namespace"])))
    return sorted(found, key=lambda job: (len(job.pipeline_id), job.pipeline_id))


def _handle(pipeline_id: str, orchestrator: Any, coordinator: Any) -> JobHandle:
    first, run_dir = JobStatus(pipeline_id, pipeline_id, "unknown", 0, 0, "does not answer"), None
    with contextlib.suppress(GetTimeoutError):
        if hasattr(coordinator, "config"):
            config: JobConfig = ray.get(coordinator.config.remote(), timeout=STATUS_TIMEOUT_S)
            run_dir = config.run_dir
            first = replace(first, name=config.spec.name, steps=config.spec.steps)
        first = ray.get(coordinator.status.remote(), timeout=STATUS_TIMEOUT_S) or first
    return JobHandle(first, run_dir, orchestrator, coordinator)


def launch(specs: Sequence[JobSpec], runs_dir: Path, *, resume: bool = False) -> list[JobHandle]:
    """Register, admit and start every job on the control plane that `rlix.init` attached to.

    The jobs live as long as the control plane does, whatever becomes of this process.

    Raises:
        SpecError: the jobs do not fit the pool, or not next to each other, or a run folder is in use, or a run cannot
            go on with its spec; nothing was started.
    """
    for spec in specs:
        check_free(runs_dir.absolute() / spec.name)
        if resume:
            check_resumable(spec, runs_dir.absolute() / spec.name)
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)
    status: ControlStatus = ray.get(orchestrator.status.remote(), timeout=_CALL_TIMEOUT_S)
    ids = [device.id for device in status.devices]
    specs = [choose(spec, ids, Settings.from_env().home).spec if spec.is_unplanned else spec for spec in specs]
    nodes = tuple(Counter(device.node_id for device in status.devices).values())
    check_jobs(specs, ids, virtual=all(device.kind is DeviceKind.CPU for device in status.devices), nodes=nodes)
    for spec in specs:
        check_importable(spec)
    prefork.warm(WORKER_ENVIRONMENT)  # every worker is forked from it; it loads while the coordinators start
    with contextlib.ExitStack() as started:  # what was started ends again when another one cannot start
        handles = []
        for spec in specs:
            handles.append(_create(JobConfig(spec, runs_dir.absolute() / spec.name, resume), orchestrator))
            started.callback(handles[-1].close)
        for handle in handles:
            handle.start()
        started.pop_all()
    return handles


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
    first = JobStatus(spec.name, pipeline_id, "starting", 0, spec.steps, "starting")
    return JobHandle(first, config.run_dir, orchestrator, coordinator)


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
    return spec.model_copy(update={"clusters": spec.clusters.model_copy(update=clusters), "plan": None})


def _least_field(cluster: ClusterSpec) -> str:
    return "tensor_parallel" if cluster.least == cluster.tensor_parallel else "the range's min"


def wait_all(handles: Sequence[JobHandle], timeout_s: float) -> list[JobStatus]:
    """Wait for every job, together at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return [handle.wait(max(0.0, deadline - time.monotonic())) for handle in handles]
