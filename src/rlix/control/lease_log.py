"""What happened to each pipeline's leases, for the job's own record."""

from collections import deque
from itertools import takewhile
from typing import Literal

from rlix.protocol.messages import Lease, LeaseRecord, ReleaseReason

KEPT_RECORDS = 10_000
KEPT_PIPELINES = 256
MOST_TOLD = 50_000


class LeaseLog:
    """The last records of each pipeline; those of ended pipelines stay readable for a while.

    A record's number is its time in microseconds, or one more than that of the record before it: numbers grow also
    across restarts of the control plane, after which those who read on find what they have not read yet.
    """

    def __init__(self) -> None:
        self._records: dict[str, deque[LeaseRecord]] = {}
        self._ended: deque[str] = deque()
        self._why: dict[str, str] = {}

    def add(
        self,
        event: Literal["granted", "shrinking", "released"],
        lease: Lease,
        time: float,
        *,
        reason: ReleaseReason | None = None,
        waited_s: float | None = None,
    ) -> None:
        """`time`: unix seconds."""
        records = self._records.setdefault(lease.pipeline_id, deque(maxlen=KEPT_RECORDS))
        number = max(int(time * 1e6), records[-1].number + 1 if records else 0)
        records.append(
            LeaseRecord(number=number, event=event, lease=lease, time=time, reason=reason, waited_s=waited_s)
        )

    def since(self, pipeline_id: str, number: int) -> tuple[LeaseRecord, ...]:
        """The records after `number` (0: all that are kept), oldest first."""
        return tuple(record for record in self._records.get(pipeline_id, ()) if record.number > number)

    def all_since(self, number: int) -> tuple[LeaseRecord, ...]:
        """Of every pipeline, the records after `number`, those of one in order; the latest, where they are many."""
        found = [
            r for records in self._records.values() for r in takewhile(lambda r: r.number > number, reversed(records))
        ]
        found.sort(key=lambda record: record.number)
        return tuple(found[-MOST_TOLD:])

    def gave_back(self, pipeline_id: str, epoch: int) -> bool:
        """Whether the lease has ended, and by its holder's word."""
        for record in reversed(self._records.get(pipeline_id, ())):
            if record.event == "released" and record.lease.epoch == epoch:
                return record.reason in (ReleaseReason.RELEASED, ReleaseReason.SHRUNK)
        return False

    def end(self, pipeline_id: str, why: str) -> None:
        """Notes that the pipeline has ended; forgets the one that ended longest ago when too many are kept."""
        self._ended.append(pipeline_id)
        self._why[pipeline_id] = why
        while len(self._ended) > KEPT_PIPELINES:
            oldest = self._ended.popleft()
            self._records.pop(oldest, None)
            self._why.pop(oldest, None)

    def why_ended(self, pipeline_id: str) -> str:
        """What was said when it ended; "" when it has not, or long ago."""
        return self._why.get(pipeline_id, "")
