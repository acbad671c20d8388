"""A pool on a clock that a test turns: what runs there, until the test says otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus, Device, DeviceKind, Lease, LeaseRecord, LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.queue.jobs import Outcome
from rlix.serve.queue.runner import Control, Is, Seen, Work


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class FakePool:
    """Jobs start when they are told to, at once, and end by `end`. It forgets nothing that a real one would keep."""

    def __init__(self, devices: int) -> None:
        self.size = devices
        self.away = ""
        self.runs: dict[tuple[int, int], Seen] = {}  # by job and attempt
        self.started: list[tuple[int, int]] = []
        self.stopped: list[tuple[int, bool]] = []
        found = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(devices))
        self.status = ControlStatus(found, (), ())
        self.records: list[LeaseRecord] = []

    def devices(self) -> int:
        if self.away:
            raise RlixError(self.away)
        return self.size

    def leases(self, since: int) -> tuple[ControlStatus, Sequence[LeaseRecord]]:
        self.devices()
        return self.status, [record for record in self.records if record.number > since]

    def lend(self, clock: Clock, pipeline_id: str, devices: Sequence[int], epoch: int, phase: Phase) -> None:
        """From now on."""
        lease = Lease(epoch, pipeline_id, "actor_train", phase, tuple(devices))
        self.records.append(LeaseRecord(int(clock.now * 1e6) + epoch, "granted", lease, clock.now))
        self.status = replace(self.status, leases=(*self.status.leases, LeaseStatus(lease, LeaseState.ACTIVE)))

    def give_back(self, clock: Clock, epoch: int) -> None:
        (lease,) = (status.lease for status in self.status.leases if status.lease.epoch == epoch)
        self.records.append(LeaseRecord(int(clock.now * 1e6) + epoch, "released", lease, clock.now))
        left = tuple(status for status in self.status.leases if status.lease is not lease)
        self.status = replace(self.status, leases=left)

    def control(self) -> Control:
        self.devices()
        return Control(plans=7, plan_s=0.5, waiting={"actor_training": 2}, leased=3, quarantined=1)

    def start(self, work: Work) -> None:
        assert (work.files / "job.yaml").is_file()
        if (work.id, work.attempt) not in self.runs:
            self.started.append((work.id, work.attempt))
            self.runs[work.id, work.attempt] = Seen(Is.RUNNING, f"ft_{len(self.started)}", "rollout", 1, 5)

    def look(self, works: Sequence[Work]) -> Mapping[int, Seen]:
        self.devices()
        return {work.id: self.runs.get((work.id, work.attempt), Seen(Is.ABSENT)) for work in works}

    def stop(self, work: Work, why: str, *, now: bool) -> None:
        assert why
        self.stopped.append((work.id, now))

    def end(self, id: int, outcome: Outcome = Outcome.FINISHED, why: str = "", **rest: Any) -> None:
        attempt = max(attempt for job, attempt in self.runs if job == id)
        self.runs[id, attempt] = Seen(Is.ENDED, outcome=outcome, why=why, **rest)
