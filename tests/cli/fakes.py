"""Statuses and jobs made up for the tests of the command line."""

from dataclasses import dataclass, field, replace

from rlix.pipeline.jobs.status import JobStatus
from rlix.protocol.messages import ControlStatus, Device, DeviceKind, Lease, LeaseState, LeaseStatus
from rlix.protocol.types import Phase


def job_status(name: str = "sort", pipeline_id: str = "ft_1", state: str = "running", **fields: object) -> JobStatus:
    base = JobStatus(name=name, pipeline_id=pipeline_id, state=state, step=3, steps=10, phase="rollout")
    return replace(base, **fields)  # type: ignore[arg-type]


def lease(
    epoch: int,
    pipeline_id: str,
    devices: tuple[int, ...],
    state: LeaseState = LeaseState.ACTIVE,
    phase: Phase = Phase.ROLLOUT,
) -> LeaseStatus:
    return LeaseStatus(Lease(epoch, pipeline_id, "cluster", phase, devices), state)


def control(*leases: LeaseStatus, devices: int = 4) -> ControlStatus:
    pool = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(devices))
    return ControlStatus(pool, (), leases)


@dataclass
class FakeJob:
    """Shows its statuses one after another; after `stop` it ends `stops_after` looks later."""

    name: str
    statuses: list[JobStatus]
    stops_after: int | None = 1
    stop_calls: int = 0
    looks: int = field(default=0)

    def status(self) -> JobStatus:
        if self.stop_calls and self.stops_after is not None:
            if self.stops_after == 0:
                return replace(self.statuses[-1], state="stopped", phase="stopped")
            self.stops_after -= 1
        current = self.statuses[min(self.looks, len(self.statuses) - 1)]
        self.looks += 1
        return current

    def stop(self) -> None:
        self.stop_calls += 1
