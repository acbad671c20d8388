"""What jobs were given: read from their run folders, kept in the store, and counted for fair share."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlix.monitor.accounting import holdings, lanes
from rlix.monitor.intervals import Intervals, intersect, length, subtract, union
from rlix.monitor.measures import Measures, measure
from rlix.monitor.records import RunRecord, load_run
from rlix.scheduler.queue.fair_share import Usage
from rlix.scheduler.queue.jobs import Job
from rlix.serve.queue.store import Store, Used

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0
MEASURED_S = 3600.0
"""For so long after a job's end its measures are told, so that who asks now and then has seen the last ones."""


@dataclass(frozen=True, slots=True)
class Account:
    """Device-seconds of one job in one phase, since some time."""

    job: int
    name: str
    owner: str
    team: str
    phase: str
    given_s: float
    busy_s: float
    switching_s: float

    @property
    def idle_s(self) -> float:
        """Under a lease, with nothing to do."""
        return max(0.0, self.given_s - self.busy_s - self.switching_s)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run folder says of a job so far."""

    used: tuple[Used, ...] = ()
    measures: Measures = field(default_factory=Measures)


def read_run(job: Job, run_dir: Path) -> Reading:
    """Of the job's run folder; nothing where that cannot be read. Takes long for a long run."""
    if not (run_dir / "events.jsonl").exists():
        return Reading()
    try:
        record = load_run(run_dir)
        return Reading(tuple(used_in(job.id, record)), measure(record))
    except (ValueError, OverflowError, OSError) as error:  # a job may write there what it likes
        logger.warning("%s is not accounted for: %s", job.said, error)
        return Reading()


def used_in(job: int, record: RunRecord) -> list[Used]:
    """What the leases of a run gave, by hour and phase. One that has not ended counts up to the last thing written."""
    found: dict[tuple[int, str], list[float]] = {}
    did = lanes(record)
    for device, held in holdings(record).items():
        lane = did[device]
        switching = subtract(lane.switching, lane.busy)
        for phase in {phase for phase, _ in held}:
            given = union(where for of, where in held if of == phase)
            for hour in _hours(given):
                there = intersect(given, ((hour * _HOUR_S, (hour + 1) * _HOUR_S),))
                sums = found.setdefault((hour, phase), [0.0, 0.0, 0.0])
                for place, part in enumerate((there, intersect(there, lane.busy), intersect(there, switching))):
                    sums[place] += length(part)
    return [Used(job, hour, phase, *sums) for (hour, phase), sums in sorted(found.items())]


def _hours(given: Intervals) -> Iterable[int]:
    return sorted({hour for a, b in given for hour in range(int(a // _HOUR_S), int(b // _HOUR_S) + 1)})


class Accounts:
    """Keeps the store's table, and what fair share counts, up to date."""

    def __init__(self, store: Store, usage: Usage) -> None:
        self._store, self._usage = store, usage
        self._charged: dict[int, float] = {}
        self._read: dict[int, tuple[float, Job, Reading]] = {}
        whose: dict[int, Job | None] = {}
        for row in store.used():
            job = whose.setdefault(row.job, store.job(row.job))
            if job is not None:
                usage.charge(job.team, job.owner, row.given_s, (row.hour + 0.5) * _HOUR_S)
                self._charged[row.job] = self._charged.get(row.job, 0.0) + row.given_s

    def take(self, job: Job, reading: Reading, now: float) -> None:
        """All that a job was given so far, whatever was taken before. An empty reading changes nothing."""
        self._store.account(reading.used)
        if reading.used or job.id not in self._read:
            self._read[job.id] = (now, job, reading)
        given = sum(row.given_s for row in reading.used)
        self._usage.charge(job.team, job.owner, max(0.0, given - self._charged.get(job.id, 0.0)), now)
        self._charged[job.id] = max(given, self._charged.get(job.id, 0.0))

    def lately(self, now: float, going_on: Collection[int]) -> list[tuple[Job, Reading]]:
        """The last readings of these jobs, and of others that were read within `MEASURED_S`; the rest is forgotten."""
        self._read = {id: read for id, read in self._read.items() if id in going_on or now - read[0] < MEASURED_S}
        return [(job, reading) for _, job, reading in self._read.values()]

    def since(self, at: float) -> list[Account]:
        """By job and phase, from the hour of this unix time on."""
        sums: dict[tuple[int, str], list[float]] = {}
        for row in self._store.used(at):
            found = sums.setdefault((row.job, row.phase), [0.0, 0.0, 0.0])
            for place, part in enumerate((row.given_s, row.busy_s, row.switching_s)):
                found[place] += part
        accounts = []
        jobs = {id: self._store.job(id) for id in {id for id, _ in sums}}
        for (id, phase), seconds in sorted(sums.items()):
            if (job := jobs[id]) is not None:
                accounts.append(Account(id, job.name, job.owner, job.team, phase, *seconds))
        return accounts

    def by_team(self, since: float) -> dict[str, tuple[float, float, float]]:
        """Device-seconds that each team was given, of them at work, and moving weights, from the hour of this time."""
        sums: dict[str, tuple[float, float, float]] = {}
        for id, more in self._store.used_by_job(since).items():
            if (job := self._store.job(id)) is not None:
                given, busy, switching = sums.get(job.team, (0.0, 0.0, 0.0))
                sums[job.team] = (given + more[0], busy + more[1], switching + more[2])
        return sums
