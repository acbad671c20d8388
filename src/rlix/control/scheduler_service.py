"""The scheduler service: the actor through which jobs ask for devices and give them back."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import astuple
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from rlix.control.core import Core
from rlix.control.gang_queue import Ticket
from rlix.control.job import Job
from rlix.control.journal import open_journal
from rlix.control.registration import build_registration, check_gang_request, check_rollout_cluster
from rlix.control.settings import Settings
from rlix.protocol.errors import PipelineGoneError, RlixError, SpecError, StaleEpochError
from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    LeaseReleased,
    PipelineRegistered,
)
from rlix.protocol.messages import (
    ControlStatus,
    Demand,
    Device,
    GangAnswer,
    Lease,
    LeaseRecord,
    LeaseStatus,
    PipelineStatus,
    Registration,
    ReleaseReason,
)
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)


class Scheduler:
    """Ray actor. It checks what callers say; `Core` records and acts."""

    def __init__(self, settings: Settings, log_level: int = logging.INFO) -> None:
        logging.getLogger("rlix").setLevel(log_level)
        self._settings = settings
        self._started: Core | None = None

    @property
    def _core(self) -> Core:
        if self._started is None:
            raise RlixError("the control plane is not started; call rlix.init first")
        return self._started

    async def start(self, devices: tuple[Device, ...]) -> None:
        """Opens the journal and starts to plan. Calling it again changes nothing.

        Raises:
            RlixError: there are no devices.
        """
        if self._started is not None:
            return
        if not devices:
            raise RlixError(
                "the Ray cluster has no GPUs; start its nodes with GPUs, or with virtual ones: "
                "ray start --num-gpus=8 --resources='{\"rlix_virtual\": 1}'; "
                "or set RAY_ADDRESS=local to start a separate one"
            )
        journal = open_journal(self._settings.home)
        journal.start_session()
        _log_to(self._settings.home / "logs" / f"{journal.path.stem}.log")
        self._started = Core(self._settings, journal)
        self._core.record(DevicesDiscovered(devices))
        self._core.start()

    async def close(self) -> None:
        """Ends every pipeline, then stops planning and closes the journal."""
        if self._started is None:
            return
        running = list(self._core.state.registrations)
        await asyncio.gather(*(self._core.end(pipeline_id, "the control plane shuts down") for pipeline_id in running))
        self._core.close()
        self._started = None

    # -- pipelines ---------------------------------------------------------------------------------------------------

    async def allocate_pipeline_id(self, kind: str) -> str:
        """A new id: the kind and a number.

        Raises:
            SpecError: `kind` cannot be part of an actor's name.
        """
        if not isinstance(kind, str) or not kind.isidentifier():
            raise SpecError(f"allocate_pipeline_id: kind must be a word such as 'ft' or 'lora', got {kind!r}")
        return self._core.allocate(kind)

    async def register_pipeline(
        self,
        pipeline_id: str,
        ray_namespace: str,
        cluster_tp_configs: object,
        cluster_device_mappings: object,
        cluster_device_alternatives: object = None,
        elastic_clusters: object = None,
    ) -> Registration:
        """See `Orchestrator.register_pipeline`."""
        if pipeline_id in self._core.state.registrations:
            raise SpecError(
                f"register_pipeline({pipeline_id!r}): already registered; allocate another id for another pipeline"
            )
        if pipeline_id not in self._core.state.allocated:
            raise SpecError(
                f"register_pipeline: unknown pipeline id {pipeline_id!r}; get one from allocate_pipeline_id first"
            )
        registration = build_registration(
            pipeline_id,
            ray_namespace,
            cluster_tp_configs,
            cluster_device_mappings,
            self._core.state.devices,
            cluster_device_alternatives,
            elastic_clusters,
            self._core.state.registrations.values(),
        )
        self._core.record(PipelineRegistered(registration))
        return registration

    async def admit_pipeline(self, pipeline_id: str) -> None:
        """See `Orchestrator.admit_pipeline`. Admitting an admitted pipeline changes nothing."""
        registration = self._registration(pipeline_id, "admit_pipeline")
        if pipeline_id not in self._core.jobs:
            self._core.admit(registration)

    async def unregister_pipeline(self, pipeline_id: str, reason: str = "") -> None:
        """See `Orchestrator.unregister_pipeline`."""
        self._registration(pipeline_id, "unregister_pipeline")
        await self._core.end(pipeline_id, reason)

    async def attach_workers(self, pipeline_id: str, cluster: str, workers: Mapping[int, Any]) -> None:
        """Names the actors of a cluster by rank, so that they can be killed when the job does not give devices back."""
        job = self._job(pipeline_id, "attach_workers")
        if cluster not in [c.name for c in job.registration.clusters]:
            raise SpecError(f"attach_workers({pipeline_id!r}): cluster {cluster!r} is not registered")
        job.attach(cluster, workers)

    # -- devices -----------------------------------------------------------------------------------------------------

    async def request_gang(self, pipeline_id: str, cluster: str, phase: Phase, timeout_s: float | None = None) -> Lease:
        """Waits until all devices of the cluster are the pipeline's.

        For callers that live as long as the pipeline; others use `JobClient`, whose requests end with their caller.

        Raises:
            SpecError: the request makes no sense.
            PipelineGoneError: the pipeline is not admitted, or ended meanwhile.
            WaitTimeoutError: not granted within `timeout_s` seconds; says who holds the devices.
        """
        ticket = self._open_ticket(pipeline_id, cluster, phase, timeout_s)
        try:
            return await asyncio.shield(ticket.answer)
        except asyncio.CancelledError:
            self._core.withdraw(ticket)
            raise
        finally:
            self._core.gangs.close(ticket)

    async def poll_gang(
        self,
        pipeline_id: str,
        cluster: str,
        phase: Phase,
        *,
        timeout_s: float | None = None,
        request_id: int | None = None,
        wait_s: float = 5.0,
    ) -> GangAnswer:
        """`request_gang` in turns: answers after `wait_s` seconds at the latest, then wants to be asked again with the
        request's id, and the lease accepted. What a caller that died asked for, or got, is taken back."""
        if request_id is None:
            ticket = self._open_ticket(pipeline_id, cluster, phase, timeout_s)
        else:
            found = self._core.gangs.get(request_id)
            if found is None or found.pipeline_id != pipeline_id:
                raise PipelineGoneError(f"request {request_id} of pipeline {pipeline_id!r} is not waiting any more")
            ticket = found
        self._core.gangs.stop_timer(ticket, "abandoned")
        try:
            await asyncio.wait([ticket.answer], timeout=wait_s)
        except asyncio.CancelledError:
            self._core.abandon(ticket)
            raise
        self._core.gangs.after(ticket, "abandoned", self._settings.abandon_after_s, lambda: self._core.abandon(ticket))
        if not ticket.answer.done():
            return GangAnswer(ticket.request_id, None)
        if ticket.answer.exception() is not None:
            self._core.gangs.close(ticket)
        return GangAnswer(ticket.request_id, ticket.answer.result())

    async def accept_gang(self, request_id: int) -> None:
        """Says that the caller of `poll_gang` has the lease. One that nobody accepts goes back.

        Raises:
            StaleEpochError: it has gone back.
        """
        ticket = self._core.gangs.get(request_id)
        if ticket is None or not ticket.answer.done():
            raise StaleEpochError(f"request {request_id}: its lease was not accepted in time and has gone back")
        self._core.gangs.close(ticket)

    async def release(self, epoch: int) -> None:
        """Gives a lease back. The caller has released the devices' memory.

        Raises:
            StaleEpochError: no such lease is held (any more).
        """
        if epoch not in self._core.state.leases:
            raise StaleEpochError(f"release: lease {epoch} is not held (any more)")
        self._core.record(LeaseReleased(epoch, ReleaseReason.RELEASED))

    async def report_demand(self, pipeline_id: str, cluster: str, demand: Demand) -> None:
        """What the rollout still has to do.

        Raises:
            SpecError: not a rollout cluster, or not a demand.
        """
        job = self._job(pipeline_id, "report_demand")
        check_rollout_cluster(job.registration, cluster)
        if not isinstance(demand, Demand) or not all(0 <= value < math.inf for value in astuple(demand)):
            raise SpecError(f"report_demand({pipeline_id!r}): needs finite numbers from 0 up, got {demand!r}")
        self._core.record(DemandReported(pipeline_id, cluster, demand))

    # -- questions ---------------------------------------------------------------------------------------------------

    async def leases(self, pipeline_id: str) -> tuple[LeaseStatus, ...]:
        """The leases the pipeline holds now, in order of grant."""
        return self._core.state.leases_of(pipeline_id)

    async def lease_log(self, pipeline_id: str, since: int = 0) -> tuple[LeaseRecord, ...]:
        """What happened to the pipeline's leases after record number `since`."""
        return self._core.log.since(pipeline_id, since)

    async def devices(self) -> tuple[Device, ...]:
        """The pool's devices, by id."""
        return self._core.state.devices

    async def registration(self, pipeline_id: str) -> Registration:
        """What the pipeline registered."""
        return self._registration(pipeline_id, "registration")

    async def status(self) -> ControlStatus:
        """See `Orchestrator.status`."""
        state = self._core.state
        waiting: dict[str, list[str]] = {}
        for request in state.requests.values():
            waiting.setdefault(request.pipeline_id, []).append(request.cluster)
        demands: dict[str, Demand] = {pipeline_id: demand for (pipeline_id, _), demand in state.demands.items()}
        pipelines = tuple(
            PipelineStatus(
                pipeline_id=pipeline_id,
                admitted=pipeline_id in state.admitted,
                clusters=registration.clusters,
                waiting=tuple(waiting.get(pipeline_id, ())),
                demand=demands.get(pipeline_id, Demand(0)),
            )
            for pipeline_id, registration in state.registrations.items()
        )
        return ControlStatus(
            devices=state.devices,
            pipelines=pipelines,
            leases=tuple(state.leases.values()),
            journal_length=len(self._core.journal),
        )

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _open_ticket(self, pipeline_id: str, cluster: str, phase: Phase, timeout_s: float | None) -> Ticket:
        job = self._job(pipeline_id, "request_gang")
        found = check_gang_request(job.registration, cluster, phase)
        if timeout_s is not None and not timeout_s > 0:
            raise SpecError(f"request_gang({pipeline_id!r}): timeout_s must be positive or None, got {timeout_s!r}")
        return self._core.request(pipeline_id, found, Phase(phase), timeout_s)

    def _registration(self, pipeline_id: str, where: str) -> Registration:
        registration = self._core.state.registrations.get(pipeline_id)
        if registration is None:
            raise PipelineGoneError(f"{where}: pipeline {pipeline_id!r} is not registered (any more)")
        return registration

    def _job(self, pipeline_id: str, where: str) -> Job:
        self._registration(pipeline_id, where)
        job = self._core.jobs.get(pipeline_id)
        if job is None:
            raise PipelineGoneError(f"{where}: pipeline {pipeline_id!r} is not admitted; call admit_pipeline first")
        if job.closing is not None:
            raise PipelineGoneError(f"{where}: pipeline {pipeline_id!r} is being unregistered")
        job.heard_at = time.monotonic()
        return job


def _log_to(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=5_000_000, backupCount=3)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("rlix").addHandler(handler)
