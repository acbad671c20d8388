"""What the scheduler service keeps about one admitted pipeline besides the recorded state."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rlix.control.coordinator_link import CoordinatorLink
from rlix.control.usage import Usage
from rlix.protocol.messages import Lease, Registration

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
GANG_GAP_S = 0.2  # between two phases of a job: until its next gang request is in


class Job:
    """The line to the job's coordinator, what it used, the workers that may be killed, and how often it failed lately.

    `now` is the event loop's time when the pipeline was admitted.
    """

    def __init__(self, registration: Registration, now: float) -> None:
        self.registration = registration
        self.usage = Usage(now)
        self.link = CoordinatorLink(registration)
        self.watch: asyncio.Task[None] | None = None
        self.closing: asyncio.Task[None] | None = None
        self.heard_at = time.monotonic()  # when the pipeline last called
        self._workers: dict[tuple[str, int], Any] = {}
        self._failures = 0
        self._muted_until = 0.0
        self._rolling: set[str] = set()  # elastic clusters with something outstanding
        self._gang_until = 0.0

    def attach(self, cluster: str, workers: Mapping[int, Any]) -> None:
        for rank, handle in workers.items():
            self._workers[cluster, rank] = handle

    def workers(self) -> list[Any]:
        return list(self._workers.values())

    def take_workers_of(self, leases: Iterable[Lease]) -> list[Any]:
        """The attached workers of these rollout bundles (a worker's rank is its bundle), which are then forgotten."""
        keys = [(lease.cluster, lease.bundle) for lease in leases if lease.bundle is not None]
        return [self._workers.pop(key) for key in keys if key in self._workers]

    def failed(self, now: float) -> float:
        """Notes that a grow or shrink failed; returns the seconds for which the job gets no further bundle."""
        pause = min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self._muted_until = now + pause
        return pause

    def succeeded(self) -> None:
        self._failures = 0

    def rollout_ended(self, cluster: str, trajectories: int) -> bool:
        """Takes a report of what is outstanding; True when that has just become nothing, on all elastic clusters."""
        before = bool(self._rolling)
        if trajectories:
            self._rolling.add(cluster)
        else:
            self._rolling.discard(cluster)
        return before and not self._rolling

    def phase_ended(self, now: float) -> None:
        """Notes that its rollout or a gang of it has just ended: it is likely to ask for a gang at once."""
        self._gang_until = now + GANG_GAP_S

    def expects_gang(self, now: float) -> bool:
        return now < self._gang_until

    def muted(self, now: float) -> bool:
        """Whether the job must not get further bundles for now: it is ending, or failed a moment ago."""
        return self.closing is not None or now < self._muted_until
