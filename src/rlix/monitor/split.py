"""What a fixed split of the same devices would have idled: an estimate from what was measured while sharing.

Model. Each of J jobs gets its own N/J of the N devices (the first jobs one more where it does not divide). A step of a
job is the sum of its phases and of its host time, one after another on its own part of n devices:

- a gang phase (training, log-probabilities, ...) that was measured on g devices for w seconds takes w if g <= n, and
  w·g/n on all n otherwise (device-seconds are conserved);
- a rollout that was measured to keep devices busy for r device-seconds takes r/n, but no less than the busiest of its
  devices took, for a trajectory is not split;
- host time, in which the job held devices and none of them did anything (rewards, batching, calls), stays as it was;
- start-up (from the job's start to its first step) takes as long as it did; nothing is ever loaded or offloaded.

Devices of a job that has finished stay idle until the last job has. The estimate flatters the split: rollouts pack
perfectly and switching is free, although a job switches between its own training and rollout within its part, too.
Durations are as measured under sharing: on virtual devices, which compete for the host's cores, a job alone on its part
might run faster or slower.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlix.monitor.accounting import Lanes, device_ids, lanes
from rlix.monitor.intervals import Interval, intersect, length, subtract, union
from rlix.monitor.records import SWITCHING_KINDS, RunRecord, Span

ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class JobSplit:
    """One job on its own fixed part of the devices. Seconds; device seconds are summed over its devices.

    The first of each pair counts from the job's start, the second (`stepping`) from its first step.
    """

    name: str
    devices: int
    run_s: float
    stepping_s: float
    busy_device_s: float
    stepping_busy_device_s: float
    steps_per_hour: float


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """`idle_share` is of all devices until the last job ends.

    `idle_share_stepping` counts each device only from its job's first step to its job's end.
    """

    jobs: tuple[JobSplit, ...]
    makespan_s: float
    idle_share: float
    idle_share_stepping: float
    steps_per_hour: float


def split_estimate(records: Sequence[RunRecord], of: Sequence[Lanes] | None = None) -> SplitEstimate | None:
    """The estimate of the module's model; None when no device was shared, one of the jobs ran at another time than all
    others, or there are fewer devices than jobs. `of`: each record's `lanes`, where they are known."""
    count = len(device_ids(records))
    of = [lanes(record) for record in records] if of is None else of
    used = [{device for device, lane in mine.items() if lane.busy or lane.switching} for mine in of]
    shared = sum(map(len, used)) > len(set().union(*used))
    if not shared or count < len(records) or any(_alone(record, records) for record in records):
        return None
    parts = [count // len(records) + (1 if i < count % len(records) else 0) for i in range(len(records))]
    jobs = tuple(_job_split(record, mine, part) for record, mine, part in zip(records, of, parts, strict=True))
    makespan_s = max(job.run_s for job in jobs)
    busy = sum(job.busy_device_s for job in jobs)
    stepping = sum(job.devices * job.stepping_s for job in jobs)
    stepping_busy = sum(job.stepping_busy_device_s for job in jobs)
    steps = sum(len(record.metrics) for record in records)
    return SplitEstimate(
        jobs=jobs,
        makespan_s=makespan_s,
        idle_share=1.0 - busy / (count * makespan_s) if makespan_s > 0 else 0.0,
        idle_share_stepping=1.0 - stepping_busy / stepping if stepping > 0 else 0.0,
        steps_per_hour=3600.0 * steps / makespan_s if makespan_s > 0 else 0.0,
    )


def _alone(record: RunRecord, records: Sequence[RunRecord]) -> bool:
    """Whether it ran when no other did."""
    return not any(intersect(record.sessions, other.sessions) for other in records if other is not record)


def _job_split(record: RunRecord, mine: Lanes, devices: int) -> JobSplit:
    first_step = min((event.time for event in record.job_events if event.event == "first_step"), default=0.0)
    work = [span for span in record.spans if span.kind not in SWITCHING_KINDS]
    phases: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in work:
        if span.start >= first_step:  # before that it is part of the start-up, whose length is known
            phases[span.step, span.phase].append(span)
    stepping_s = _host_s(record, mine, first_step)
    stepping_s += sum(_phase_s(phase, spans, devices) for (_, phase), spans in phases.items())
    stepping_busy_s = sum(sum(_busy_by_device(spans)) for spans in phases.values())
    run_s = record.startup_s + stepping_s
    return JobSplit(
        name=record.name,
        devices=devices,
        run_s=run_s,
        stepping_s=stepping_s,
        busy_device_s=stepping_busy_s + sum(span.end - span.start for span in work if span.start < first_step),
        stepping_busy_device_s=stepping_busy_s,
        steps_per_hour=3600.0 * len(record.metrics) / run_s if run_s > 0 else 0.0,
    )


def _phase_s(phase: str, spans: list[Span], devices: int) -> float:
    busy = _busy_by_device(spans)
    if phase == ROLLOUT:
        return max(sum(busy) / devices, *busy)
    return length(union((span.start, span.end) for span in spans)) * max(1.0, len(busy) / devices)


def _busy_by_device(spans: list[Span]) -> list[float]:
    by_device: dict[int, list[Interval]] = defaultdict(list)
    for span in spans:
        by_device[span.device].append((span.start, span.end))
    return [length(union(intervals)) for intervals in by_device.values()]


def _host_s(record: RunRecord, mine: Lanes, first_step: float) -> float:
    """Time after the first step in which the job held devices, waited for none, and used none."""
    waits = ((lease.time - lease.waited_s, lease.time) for lease in record.leases if lease.waited_s is not None)
    occupied = union([*((span.start, span.end) for span in record.spans), *waits])
    holding = union(interval for lane in mine.values() for interval in lane.held)
    stepping = intersect(record.sessions, ((first_step, float("inf")),))
    return length(intersect(subtract(stepping, occupied), holding))
