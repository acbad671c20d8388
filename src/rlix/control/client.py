"""What a job uses to ask for devices: a synchronous face of the scheduler service."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from rlix.control.rpc import get
from rlix.protocol.errors import PipelineGoneError, RlixError, StaleEpochError
from rlix.protocol.messages import Demand, Device, GangAnswer, Lease, LeaseRecord, LeaseStatus, Registration
from rlix.protocol.types import NAMESPACE, SCHEDULER_ACTOR_NAME, Phase


class JobClient:
    """The leases of one pipeline. Works in any process of the Ray cluster; a request ends with its process."""

    def __init__(
        self, pipeline_id: str, *, scheduler: Any = None, answer_timeout_s: float = 30.0, poll_s: float = 5.0
    ) -> None:
        """`answer_timeout_s` bounds every call, besides what a call is asked to wait. While it waits for devices, the
        client asks again every `poll_s` seconds, so that a request whose caller is gone does not stay.

        Raises:
            RlixError: there is no control plane here.
        """
        self.pipeline_id = pipeline_id
        self._timeout_s = answer_timeout_s
        self._poll_s = poll_s
        if scheduler is None:
            try:
                scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE)
            except ValueError:
                raise RlixError("no control plane in this Ray cluster; call rlix.init first") from None
        self._scheduler = scheduler

    @contextlib.contextmanager
    def phase(self, cluster: str, phase: Phase, timeout_s: float | None = None) -> Iterator[Lease]:
        """Holds the cluster's devices for the duration of the block. Raises what `acquire` raises."""
        lease = self.acquire(cluster, phase, timeout_s)
        try:
            yield lease
        finally:
            # The lease is gone when the pipeline was ended meanwhile; what the block raised says more than that.
            with contextlib.suppress(StaleEpochError):
                self.release(lease)

    def acquire(self, cluster: str, phase: Phase, timeout_s: float | None = None) -> Lease:
        """Waits until all devices of the cluster are this pipeline's; the caller must `release` them.

        Raises:
            SpecError: the request makes no sense.
            PipelineGoneError: the pipeline is not admitted, or ended meanwhile.
            WaitTimeoutError: not granted within `timeout_s` seconds; says who holds the devices.
        """
        request_id: int | None = None
        while True:
            ref = self._scheduler.poll_gang.remote(
                self.pipeline_id, cluster, phase, timeout_s=timeout_s, request_id=request_id, wait_s=self._poll_s
            )
            answer: GangAnswer = self._get(ref, "poll_gang", self._poll_s)
            if answer.lease is not None:
                self._ask("accept_gang", answer.request_id)
                return answer.lease
            request_id = answer.request_id

    def release(self, lease: Lease) -> None:
        """Gives a lease back, once its devices' memory is released.

        Raises:
            StaleEpochError: it is not held any more.
        """
        self._ask("release", lease.epoch)

    def report_demand(self, cluster: str, demand: Demand | int) -> None:
        """What the rollout still has to do, at least how many trajectories: the scheduler grants bundles by it."""
        known = demand if isinstance(demand, Demand) else Demand(demand)
        self._ask("report_demand", self.pipeline_id, cluster, known)

    def attach_workers(self, cluster: str, workers: Mapping[int, Any]) -> None:
        """Names the cluster's worker actors by rank, so that those that do not give a device back can be killed."""
        self._ask("attach_workers", self.pipeline_id, cluster, dict(workers))

    def leases(self) -> tuple[LeaseStatus, ...]:
        """The leases this pipeline holds now, in order of grant."""
        leases: tuple[LeaseStatus, ...] = self._ask("leases", self.pipeline_id)
        return leases

    def registration(self) -> Registration:
        """What this pipeline registered.

        Raises:
            PipelineGoneError: it is not registered.
        """
        registration: Registration = self._ask("registration", self.pipeline_id)
        return registration

    def devices(self) -> tuple[Device, ...]:
        """The pool's devices. Ids need not be dense: see `rlix.protocol.messages.with_ids`."""
        devices: tuple[Device, ...] = self._ask("devices")
        return devices

    def lease_log(self, since: int = 0) -> tuple[LeaseRecord, ...]:
        """What happened to this pipeline's leases after record number `since`."""
        records: tuple[LeaseRecord, ...] = self._ask("lease_log", self.pipeline_id, since)
        return records

    def unregister(self, reason: str = "") -> None:
        """Ends the pipeline; fine when it has ended already."""
        with contextlib.suppress(PipelineGoneError):
            self._ask("unregister_pipeline", self.pipeline_id, reason)

    def _ask(self, method: str, *args: object) -> Any:
        return self._get(getattr(self._scheduler, method).remote(*args), method)

    def _get(self, ref: Any, method: str, wait_s: float = 0.0) -> Any:
        what = f"the scheduler's {method} for pipeline {self.pipeline_id!r}"
        return get(ref, what=what, timeout_s=self._timeout_s + wait_s)
