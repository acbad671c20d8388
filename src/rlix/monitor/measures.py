"""What one run has come to so far, as a monitoring system reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlix.monitor.records import SWITCHING_KINDS, RunRecord


@dataclass(frozen=True, slots=True)
class Measures:
    """Of a run that may go on. `granted` and `lease_wait_s`: leases, and seconds waited for them, by phase.

    `switch_s`: device-seconds by direction (load, offload, sync), each span for itself. `tokens_recomputed`: read again
    by a replica, because their trajectory went on elsewhere. `staleness`, in steps, and `reward` are the last step's;
    None where nothing says it.
    """

    granted: Mapping[str, int] = field(default_factory=dict)
    lease_wait_s: Mapping[str, float] = field(default_factory=dict)
    switch_s: Mapping[str, float] = field(default_factory=dict)
    shrinks: int = 0
    steps: int = 0
    tokens: int = 0
    tokens_recomputed: int = 0
    staleness: float | None = None
    reward: float | None = None


def measure(record: RunRecord) -> Measures:
    granted: dict[str, int] = {}
    waited: dict[str, float] = {}
    for lease in record.leases:
        if lease.event == "granted":
            granted[lease.phase] = granted.get(lease.phase, 0) + 1
            waited[lease.phase] = waited.get(lease.phase, 0.0) + (lease.waited_s or 0.0)
    switch_s = dict.fromkeys(sorted(SWITCHING_KINDS), 0.0)
    for span in record.spans:
        if span.kind in switch_s:
            switch_s[span.kind] += max(0.0, span.end - span.start)
    last = record.metrics[-1] if record.metrics else {}
    return Measures(
        granted,
        waited,
        switch_s,
        shrinks=sum(lease.event == "shrinking" for lease in record.leases),
        steps=len(record.metrics),
        tokens=_total(record, "tokens"),
        tokens_recomputed=_total(record, "tokens_recomputed"),
        staleness=last.get("staleness"),
        reward=last.get("reward"),
    )


def _total(record: RunRecord, key: str) -> int:
    return int(sum(row.get(key, 0.0) for row in record.metrics))
