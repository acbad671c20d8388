"""What happened to each pipeline's leases, for the job's own record."""

from collections import deque
from collections.abc import Callable
from typing import Literal

from rlix.protocol.messages import Lease, LeaseRecord, ReleaseReason

KEPT_RECORDS = 10_000
KEPT_PIPELINES = 256


class LeaseLog:
    """The last records of each pipeline, numbered from 1; those of ended pipelines stay readable for a while."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        """`now` gives unix seconds."""
        self._now = now
        self._records: dict[str, deque[LeaseRecord]] = {}
        self._ended: deque[str] = deque()

    def add(
        self,
        event: Literal["granted", "shrinking", "released"],
        lease: Lease,
        *,
        reason: ReleaseReason | None = None,
        waited_s: float | None = None,
    ) -> None:
        records = self._records.setdefault(lease.pipeline_id, deque(maxlen=KEPT_RECORDS))
        number = records[-1].number + 1 if records else 1
        record = LeaseRecord(
            number=number, event=event, lease=lease, time=self._now(), reason=reason, waited_s=waited_s
        )
        records.append(record)

    def since(self, pipeline_id: str, number: int) -> tuple[LeaseRecord, ...]:
        """The records after `number` (0: all that are kept), oldest first."""
        return tuple(record for record in self._records.get(pipeline_id, ()) if record.number > number)

    def end(self, pipeline_id: str) -> None:
        """Notes that the pipeline has ended; forgets the one that ended longest ago when too many are kept."""
        self._ended.append(pipeline_id)
        while len(self._ended) > KEPT_PIPELINES:
            self._records.pop(self._ended.popleft(), None)
