"""Where the devices' time went, over several runs that shared them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlix.monitor.intervals import Interval, Intervals, intersect, length, subtract, union
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


@dataclass(frozen=True, slots=True)
class Lane:
    """When one device worked for one job, when bytes moved there, and when the job held a lease on it."""

    busy: Intervals = ()
    switching: Intervals = ()
    held: Intervals = ()


Lanes = Mapping[int, Lane]
"""Of one run, by device."""


def lanes(record: RunRecord) -> Lanes:
    """Every device that the run touched, in one pass over what it wrote."""
    busy, switching = defaultdict[int, list[Interval]](list), defaultdict[int, list[Interval]](list)
    for span in record.spans:
        (switching if span.kind in SWITCHING_KINDS else busy)[span.device].append((span.start, span.end))
    held = {device: union(where for _, where in found) for device, found in holdings(record).items()}
    return {
        device: Lane(union(busy.get(device, ())), union(switching.get(device, ())), held.get(device, ()))
        for device in sorted({*busy, *switching, *held})
    }


def holdings(record: RunRecord) -> dict[int, list[tuple[str, Interval]]]:
    """By device, under which phase the job held a lease on it, and when; one that did not end, to the last word."""
    granted: dict[tuple[int, int], tuple[str, float]] = {}
    found = defaultdict[int, list[tuple[str, Interval]]](list)
    for lease in sorted(record.leases, key=lambda lease: lease.time):
        for device in lease.devices:
            if lease.event == "granted":
                granted[device, lease.epoch] = lease.phase, lease.time
            elif lease.event == "released" and (device, lease.epoch) in granted:
                phase, start = granted.pop((device, lease.epoch))
                found[device].append((phase, (start, lease.time)))
    last = record.last_time if granted else 0.0
    for (device, _), (phase, start) in granted.items():
        found[device].append((phase, (start, last)))
    return found


def account(
    records: Sequence[RunRecord],
    window: Intervals | None = None,
    of: Sequence[Lanes] | None = None,
    jobs: tuple[JobUse, ...] | None = None,
) -> Accounting:
    """Account for every second of every device within `window` (by default the time in which any job ran).

    Time that several spans cover, of one job or of several, counts once. `of`: each record's `lanes`, where they are
    known, and `jobs`, which depend on no window.
    """
    window = shared_window(records) if window is None else window
    window_s = length(window)
    of = [lanes(record) for record in records] if of is None else of
    devices = tuple(
        _device_use(device, [each.get(device, Lane()) for each in of], window) for device in device_ids(records)
    )
    if jobs is None:
        jobs = tuple(_job_use(record, mine) for record, mine in zip(records, of, strict=True))
    in_window = sum(
        1 for record in records for row in record.metrics if any(a <= row.get("time", a) <= b for a, b in window)
    )
    return Accounting(window_s, devices, jobs, steps_per_hour=_per_hour(in_window, window_s))


def _device_use(device: int, jobs: Sequence[Lane], window: Intervals) -> DeviceUse:
    busy = intersect(window, _any(lane.busy for lane in jobs))
    switching = subtract(intersect(window, _any(lane.switching for lane in jobs)), busy)
    idle = subtract(subtract(window, busy), switching)
    leased = intersect(idle, _any(lane.held for lane in jobs))
    held_s = length(leased)
    return DeviceUse(device, length(busy), length(switching), held_s, max(0.0, length(idle) - held_s))


def _any(several: Iterable[Intervals]) -> Intervals:
    """The points in any of these."""
    found = [each for each in several if each]
    return found[0] if len(found) == 1 else union(interval for each in found for interval in each)


def _job_use(record: RunRecord, mine: Lanes) -> JobUse:
    sessions = record.sessions
    active_s = length(sessions)
    tokens = sum(row.get("tokens", 0.0) for row in record.metrics)
    by_device = [_device_use(device, [lane], sessions) for device, lane in mine.items()]
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
