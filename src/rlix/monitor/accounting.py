"""Where the devices' time went, over several runs that shared them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlix.monitor.intervals import Intervals, intersect, length, subtract, union
from rlix.monitor.records import SWITCHING_KINDS, RunRecord

EDGE_STEPS = 5
FIRST, LAST = slice(None, EDGE_STEPS), slice(-EDGE_STEPS, None)
"""Reward and exact match at the start and at the end of a run are means over this many steps."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Seconds of one device within the window; they add up to the window's length.

    Work counts as busy even while something is loaded beside it; `held_s` is idle time under a lease, `free_s` without.
    """

    device: int
    busy_s: float
    switching_s: float
    held_s: float
    free_s: float

    @property
    def idle_s(self) -> float:
        return self.held_s + self.free_s

    @property
    def window_s(self) -> float:
        return self.busy_s + self.switching_s + self.idle_s


@dataclass(frozen=True, slots=True)
class JobUse:
    """One job: what it did, what it learned and what it used. Device seconds are summed over devices."""

    name: str
    state: str
    steps: int
    active_s: float
    startup_s: float
    steps_per_hour: float
    tokens: int
    tokens_per_s: float
    busy_device_s: float
    switching_device_s: float
    shrinks: int
    reward_first: float | None
    reward_last: float | None
    exact_first: float | None
    exact_last: float | None


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter of a job that trains many: how far it is and what it has had of what they share.

    `gang_s` and `gang_wait_s`: seconds in which it had the gang, to score, to train and to publish, and waited for
    that. `staleness`: mean age of its tokens in steps, None where nothing says it.
    """

    name: str
    state: str
    steps: int
    tokens: int
    gang_s: float
    gang_wait_s: float
    staleness: float | None
    reward_first: float | None
    reward_last: float | None
    exact_first: float | None
    exact_last: float | None


@dataclass(frozen=True, slots=True)
class Accounting:
    """`window_s` is the time in which any of the jobs ran; shares are of devices x window."""

    window_s: float
    devices: tuple[DeviceUse, ...]
    jobs: tuple[JobUse, ...]
    steps_per_hour: float

    @property
    def total(self) -> DeviceUse:
        """All devices added up, under the number -1."""
        return DeviceUse(
            device=-1,
            busy_s=sum(use.busy_s for use in self.devices),
            switching_s=sum(use.switching_s for use in self.devices),
            held_s=sum(use.held_s for use in self.devices),
            free_s=sum(use.free_s for use in self.devices),
        )

    def share(self, seconds: float) -> float:
        """`seconds` of devices as a share of all there were (0 when there was no time at all)."""
        total = self.window_s * len(self.devices)
        return seconds / total if total > 0 else 0.0


def device_ids(records: Iterable[RunRecord]) -> tuple[int, ...]:
    """Every device of the pool, and any other a job worked on."""
    ids: set[int] = set()
    for record in records:
        ids.update(device.id for device in record.devices)
        ids.update(span.device for span in record.spans)
    return tuple(sorted(ids))


def shared_window(records: Sequence[RunRecord]) -> Intervals:
    """The time in which any of the jobs ran."""
    return union(interval for record in records for interval in record.sessions)


def contended_window(records: Sequence[RunRecord]) -> Intervals:
    """The time in which every one of the jobs was past its first step and still running (may be empty)."""
    common: Intervals | None = None
    for record in records:
        first = [event.time for event in record.job_events if event.event == "first_step"]
        stepping = intersect(record.sessions, ((min(first), float("inf")),)) if first else ()
        common = stepping if common is None else intersect(common, stepping)
    return common or ()


def account(records: Sequence[RunRecord], window: Intervals | None = None) -> Accounting:
    """Account for every second of every device within `window` (by default the time in which any job ran).

    Time that several spans cover, of one job or of several, counts once.
    """
    window = shared_window(records) if window is None else window
    window_s = length(window)
    devices = tuple(_device_use(records, device, window) for device in device_ids(records))
    jobs = tuple(_job_use(record) for record in records)
    in_window = sum(
        1 for record in records for row in record.metrics if any(a <= row.get("time", a) <= b for a, b in window)
    )
    return Accounting(window_s, devices, jobs, steps_per_hour=_per_hour(in_window, window_s))


def _device_use(records: Sequence[RunRecord], device: int, window: Intervals) -> DeviceUse:
    spans = [span for record in records for span in record.spans if span.device == device]
    busy = intersect(window, union((s.start, s.end) for s in spans if s.kind not in SWITCHING_KINDS))
    switching = subtract(intersect(window, union((s.start, s.end) for s in spans if s.kind in SWITCHING_KINDS)), busy)
    idle = subtract(subtract(window, busy), switching)
    leased = intersect(idle, union(interval for record in records for interval in held(record, device)))
    return DeviceUse(device, length(busy), length(switching), length(leased), length(subtract(idle, leased)))


def held(record: RunRecord, device: int) -> Intervals:
    """When the job held a lease on the device."""
    granted: dict[int, float] = {}
    intervals: list[tuple[float, float]] = []
    for lease in sorted(record.leases, key=lambda lease: lease.time):
        if device not in lease.devices:
            continue
        if lease.event == "granted":
            granted[lease.epoch] = lease.time
        elif lease.event == "released" and lease.epoch in granted:
            intervals.append((granted.pop(lease.epoch), lease.time))
    intervals += [(start, record.last_time) for start in granted.values()]
    return union(intervals)


def _job_use(record: RunRecord) -> JobUse:
    active_s = length(record.sessions)
    tokens = sum(row.get("tokens", 0.0) for row in record.metrics)
    by_device = [_device_use([record], device, record.sessions) for device in device_ids([record])]
    return JobUse(
        name=record.name,
        state=record.state,
        steps=len(record.metrics),
        active_s=active_s,
        startup_s=record.startup_s,
        steps_per_hour=_per_hour(len(record.metrics), active_s),
        tokens=int(tokens),
        tokens_per_s=tokens / active_s if active_s > 0 else 0.0,
        busy_device_s=sum(use.busy_s for use in by_device),
        switching_device_s=sum(use.switching_s for use in by_device),
        shrinks=sum(1 for lease in record.leases if lease.event == "shrinking"),
        reward_first=edge_mean(record, "reward", FIRST),
        reward_last=edge_mean(record, "reward", LAST),
        exact_first=edge_mean(record, "exact", FIRST),
        exact_last=edge_mean(record, "exact", LAST),
    )


def adapter_use(run: RunRecord) -> AdapterUse:
    def total(key: str) -> float:
        return sum(row.get(key, 0.0) for row in run.metrics)

    return AdapterUse(
        name=run.name,
        state=run.state,
        steps=len(run.metrics),
        tokens=int(total("tokens")),
        gang_s=total("gang_s"),
        gang_wait_s=total("gang_wait_s"),
        staleness=edge_mean(run, "staleness", slice(None)),
        reward_first=edge_mean(run, "reward", FIRST),
        reward_last=edge_mean(run, "reward", LAST),
        exact_first=edge_mean(run, "exact", FIRST),
        exact_last=edge_mean(run, "exact", LAST),
    )


def edge_mean(record: RunRecord, key: str, edge: slice) -> float | None:
    values = [row[key] for row in record.metrics if key in row][edge]
    return fmean(values) if values else None


def _per_hour(count: int, seconds: float) -> float:
    return 3600.0 * count / seconds if seconds > 0 else 0.0
