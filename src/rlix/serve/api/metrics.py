"""`/metrics`: what Prometheus reads. Device time and what jobs did is as of the last accounting, once a minute."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rlix.monitor.measures import Measures
from rlix.scheduler.queue.fair_share import times_its_share
from rlix.scheduler.queue.jobs import Job, State
from rlix.serve.queue.accounts import Accounts, Reading
from rlix.serve.queue.keeper import Keeper
from rlix.serve.queue.store import Used

CONTENT_TYPE = CONTENT_TYPE_LATEST
_JOB = ("id", "name", "owner", "team")  # no "job": Prometheus calls what it scrapes so


def exposition(keeper: Keeper, accounts: Accounts, now: Callable[[], float]) -> Callable[[], bytes]:
    """Makes the text of all metrics, and of the service's process: its memory, its processor time."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(keeper, accounts, now))
    return lambda: generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)
class _Collector(Collector):
    keeper: Keeper
    accounts: Accounts
    now: Callable[[], float]
    highest: dict[tuple[str, ...], float] = field(default_factory=dict)
    """What was told of each counter: a job that goes on from a checkpoint has done fewer steps than it had, and a
    counter that falls is to Prometheus one that begins anew."""

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected before somebody asks."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._pool()
        yield from self._queue()
        yield from self._teams()
        yield from self._jobs()

    def _pool(self) -> Iterator[Metric]:
        keeper, control = self.keeper, self.keeper.control
        yield _gauge("rlix_pool_up", "1 while the pool answers.", float(not keeper.pool_why))
        yield _gauge("rlix_pool_devices", "GPUs of the pool.", keeper.pool.devices)
        yield _gauge("rlix_pool_places", "Places of gangs: GPUs times jobs on each.", keeper.pool.places)
        if control is None:  # a counter that falls to 0 is to Prometheus one that begins anew
            return
        yield _gauge("rlix_pool_devices_leased", "GPUs under a lease.", control.leased)
        yield _gauge("rlix_pool_devices_quarantined", "GPUs that nobody gets, see `rlix status`.", control.quarantined)
        waiting = GaugeMetricFamily("rlix_pool_gangs_waiting", "Gangs that wait for their GPUs.", labels=("phase",))
        for phase, count in control.waiting.items():
            waiting.add_metric((phase,), count)
        yield waiting
        yield _counter("rlix_plan", "Plans that the scheduler made since it started.", control.plans)
        yield _counter("rlix_plan_seconds", "Seconds that it took to make them.", control.plan_s)

    def _queue(self) -> Iterator[Metric]:
        counts = Counter((job.team, str(job.state)) for job in self.keeper.jobs.values())
        jobs = GaugeMetricFamily("rlix_jobs", "Jobs that have not ended.", labels=("team", "state"))
        for (team, state), count in sorted(counts.items()):
            jobs.add_metric((team, state), count)
        yield jobs
        reasons = Counter((job.team, self._reason(job)) for job in self.keeper.jobs.values() if not job.active)
        waiting = GaugeMetricFamily("rlix_jobs_waiting", "Jobs that wait, by reason.", labels=("team", "reason"))
        for (team, reason), count in sorted(reasons.items()):
            waiting.add_metric((team, reason), count)
        yield waiting
        oldest: dict[str, float] = {}
        for job in self.keeper.jobs.values():
            if job.state is State.SUBMITTED:
                oldest[job.team] = max(oldest.get(job.team, 0.0), self.now() - job.since)
        longest = GaugeMetricFamily("rlix_jobs_longest_wait_seconds", "Of submitted jobs.", labels=("team",))
        for team, seconds in sorted(oldest.items()):
            longest.add_metric((team,), seconds)
        yield longest

    def _reason(self, job: Job) -> str:
        """A name for why it waits: that of the reason's class, or that there is no pool."""
        if self.keeper.pool_why and job.state is not State.HELD:
            return "no_pool"
        wait = self.keeper.wait_of(job.id)
        return "starts" if wait is None else re.sub(r"(?<!^)(?=[A-Z])", "_", type(wait.reason).__name__).lower()

    def _teams(self) -> Iterator[Metric]:
        snapshot = self.keeper.snapshot()
        label = ("team",)
        used = GaugeMetricFamily("rlix_team_places_used", "Places that its jobs have.", labels=label)
        guaranteed = GaugeMetricFamily("rlix_team_places_guaranteed", "Places that it can always have.", labels=label)
        maximum = GaugeMetricFamily("rlix_team_places_maximum", "Places that it may have.", labels=label)
        share = GaugeMetricFamily("rlix_team_share_used_ratio", "What it was given, by its share.", labels=label)
        for name in sorted({*snapshot.teams, *(job.team for job in snapshot.jobs), *(t for t, _ in snapshot.used)}):
            team = snapshot.team(name)
            used.add_metric((name,), sum(job.gpus for job in snapshot.jobs if job.active and job.team == name))
            guaranteed.add_metric((name,), team.guaranteed)
            maximum.add_metric((name,), snapshot.pool.places if team.maximum is None else team.maximum)
            if (times := times_its_share(snapshot, name)) is not None:
                share.add_metric((name,), times)
        yield from (used, guaranteed, maximum, share)

    def _jobs(self) -> Iterator[Metric]:
        jobs = self.accounts.lately(self.now(), self.keeper.jobs)
        highest: dict[tuple[str, ...], float] = {}
        for name, text, labels, values in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=(*_JOB, *labels))
            for job, reading in jobs:
                for more, value in values(reading).items():
                    key = (name, *_labels(job), *more)
                    highest[key] = max(value, self.highest.get(key, 0.0))
                    family.add_metric(key[1:], highest[key])
            yield family
        self.highest.clear()
        self.highest.update(highest)
        for name, text, last in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_JOB)
            for job, reading in jobs:
                if (found := last(reading)) is not None:
                    gauge.add_metric(_labels(job), found)
            yield gauge


Values = Callable[[Reading], Mapping[tuple[str, ...], float]]


def _by_phase(what: Callable[[Used], float]) -> Values:
    def sums(reading: Reading) -> Mapping[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for row in reading.used:
            found[row.phase,] = found.get((row.phase,), 0.0) + what(row)
        return found

    return sums


def _keyed(what: Callable[[Measures], Mapping[str, float]]) -> Values:
    return lambda reading: {(key,): value for key, value in what(reading.measures).items()}


def _one(what: Callable[[Measures], float]) -> Values:
    return lambda reading: {(): what(reading.measures)}


_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Values], ...] = (
    ("rlix_job_device_seconds", "Device-seconds under a lease.", ("phase",), _by_phase(lambda row: row.given_s)),
    ("rlix_job_device_busy_seconds", "Of these, at work.", ("phase",), _by_phase(lambda row: row.busy_s)),
    ("rlix_job_device_switching_seconds", "And moving weights.", ("phase",), _by_phase(lambda row: row.switching_s)),
    ("rlix_job_leases_granted", "Leases.", ("phase",), _keyed(lambda found: found.granted)),
    ("rlix_job_lease_wait_seconds", "Waited for gangs' leases.", ("phase",), _keyed(lambda found: found.lease_wait_s)),
    ("rlix_job_switch_seconds", "Device-seconds, by direction.", ("direction",), _keyed(lambda found: found.switch_s)),
    ("rlix_job_shrinks", "Times that its rollout was asked for a bundle.", (), _one(lambda found: found.shrinks)),
    ("rlix_job_steps", "Training steps.", (), _one(lambda found: found.steps)),
    ("rlix_job_tokens", "Tokens of its samples.", (), _one(lambda found: found.tokens)),
    (
        "rlix_job_tokens_recomputed",
        "Tokens that replicas read again, because trajectories went on elsewhere.",
        (),
        _one(lambda found: found.tokens_recomputed),
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("rlix_job_staleness_steps", "Mean age of the last step's tokens.", lambda reading: reading.measures.staleness),
    ("rlix_job_reward", "Mean reward of the last step.", lambda reading: reading.measures.reward),
)


def _labels(job: Job) -> tuple[str, ...]:
    return (str(job.id), job.name, job.owner, job.team)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)
