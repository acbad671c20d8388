"""What a queue knows: jobs, teams and the pool. Times are unix seconds; GPUs are places of a gang (see `Pool`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlix.protocol.errors import RlixError

PRIORITIES: Mapping[str, int] = {"low": -1, "normal": 0, "high": 1}
"""Priority classes. They say who of a team is next, not who can be stopped: that is `Job.preemptible`."""
PRIORITY_NAMES: Mapping[int, str] = {value: name for name, value in PRIORITIES.items()}


class QueueError(RlixError):
    """A job is not in a state for what was asked of it."""


class State(StrEnum):
    """Where a job is. `admitted`: it has its GPUs and is being launched. An ended job may be submitted again."""

    SUBMITTED = "submitted"
    HELD = "held"
    ADMITTED = "admitted"
    RUNNING = "running"
    ENDED = "ended"


class Outcome(StrEnum):
    """How a job ended. `timeout`: its time limit was over."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Stop:
    """A running job was asked to write a checkpoint and end. `outcome`: how it then ended; None: it is queued again.

    `for_id`: the job that gets its GPUs.
    """

    at: float
    why: str
    outcome: Outcome | None = None
    for_id: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One submission. `gpus`: of its largest gang, which it needs at once.

    `limit_s`: the longest that it may run; then it is stopped. `step` of `steps`: how far it was when it last ended or
    was queued again. `failures`: how often in a row it came back for the
    pool's reasons, `not_before` until when it then waits. `requeues`: how often it came back for whatever reason.
    """

    id: int
    name: str
    owner: str
    team: str
    gpus: int
    submitted_at: float
    priority: int = 0
    preemptible: bool = True
    limit_s: float = math.inf
    state: State = State.SUBMITTED
    since: float = 0.0  # in this state
    why: str = ""  # it is in this state
    admitted_at: float = 0.0
    pipeline_id: str = ""
    stop: Stop | None = None
    outcome: Outcome | None = None
    failures: int = 0
    not_before: float = 0.0
    requeues: int = 0
    step: int = 0
    steps: int = 0
    webhook: str = field(default="", repr=False)  # who is told of its end; may be a secret

    @property
    def active(self) -> bool:
        """Whether it has its GPUs."""
        return self.state in (State.ADMITTED, State.RUNNING)

    @property
    def said(self) -> str:
        """Whose it is and which: "team-a/sweep (17)"."""
        return f"{self.team}/{self.name} ({self.id})"

    def become(self, state: State, at: float, why: str = "") -> "Job":
        """The job in another state.

        Raises:
            QueueError: there is no way from its state to that one.
        """
        if state not in _WAYS[self.state]:
            raise QueueError(f"job {self.id} ({self.name}) is {self.state}, and cannot become {state}")
        return replace(self, state=state, since=at, why=why, stop=self.stop if state is State.RUNNING else None)


_WAYS: Mapping[State, frozenset[State]] = {
    State.SUBMITTED: frozenset({State.HELD, State.ADMITTED, State.ENDED}),
    State.HELD: frozenset({State.SUBMITTED, State.ENDED}),
    State.ADMITTED: frozenset({State.RUNNING, State.SUBMITTED, State.ENDED}),
    State.RUNNING: frozenset({State.SUBMITTED, State.ENDED}),
    State.ENDED: frozenset({State.SUBMITTED}),
}


@dataclass(frozen=True, slots=True)
class Team:
    """Of the pool's GPUs, how many a team can always have, and how many at most; its weight in what nobody has.

    `guaranteed` is lent while the team does not use it, to jobs that can be preempted (Kueue: nominal quota and
    borrowing; KAI: quota, limit and over-quota weight).
    """

    guaranteed: int = 0
    maximum: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Pool:
    """`devices` is how many GPUs there are. Jobs share them phase by phase: up to `jobs_per_gpu` gangs have a place on
    each (Slurm: OverSubscribe), and quotas count places."""

    devices: int
    jobs_per_gpu: int = 1

    @property
    def places(self) -> int:
        return self.devices * self.jobs_per_gpu

    @property
    def unit(self) -> str:
        return "GPUs" if self.jobs_per_gpu == 1 else f"places ({self.jobs_per_gpu} on each GPU)"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`jobs`: those that have not ended. `used`: GPU-seconds that were given, decayed, by team and owner. `drained`:
    who wants nothing to start; "": nobody."""

    now: float
    pool: Pool
    jobs: tuple[Job, ...]
    teams: Mapping[str, Team] = field(default_factory=dict)
    used: Mapping[tuple[str, str], float] = field(default_factory=dict)
    drained: str = ""

    def team(self, name: str) -> Team:
        return self.teams.get(name, Team())

    @property
    def common(self) -> int:
        """Places that are guaranteed to nobody."""
        return max(0, self.pool.places - sum(team.guaranteed for team in self.teams.values()))
