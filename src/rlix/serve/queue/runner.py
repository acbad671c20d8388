"""What the queue needs of a pool: how large it is, to start a job there once, and what has become of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rlix.protocol.messages import ControlStatus, LeaseRecord
from rlix.scheduler.queue.jobs import Outcome


@dataclass(frozen=True, slots=True)
class Work:
    """A job that has been admitted. `folder` and `runs_dir`, in which its run folder is, are no other job's. `attempt`:
    how often it was queued again before."""

    id: int
    name: str
    folder: Path
    runs_dir: Path
    attempt: int
    admitted_at: float

    @property
    def files(self) -> Path:
        """Its spec (`JOB_FILE`) and files, apart from what is noted of its starts."""
        return self.folder / FILES

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name


class Is(StrEnum):
    """`absent`: nobody has begun to start it."""

    ABSENT = "absent"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is there of a job. `by_pool`: it failed for a reason of the pool's, and may be tried again. `for_queue`: why
    the queue had it stopped, which a queue that was restored from a backup does not know."""

    state: Is
    pipeline_id: str = ""
    phase: str = ""
    step: int = 0
    steps: int = 0
    outcome: Outcome | None = None
    why: str = ""
    by_pool: bool = False
    for_queue: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """What the control plane says of itself. `plans`: how many it has made since it started, in `plan_s` seconds.
    `waiting`: by phase, the gangs that wait for devices. `leased`: devices under a lease."""

    plans: int = 0
    plan_s: float = 0.0
    waiting: Mapping[str, int] = field(default_factory=dict)
    leased: int = 0
    quarantined: int = 0


class Runner(Protocol):
    """Is called from one thread. Everything may be asked again."""

    def devices(self) -> int:
        """How many there are.

        Raises:
            RlixError: there is no pool now; says why.
        """

    def control(self) -> Control:
        """Raises:
        RlixError: there is no pool now; says why.
        """

    def leases(self, since: int) -> tuple[ControlStatus, Sequence[LeaseRecord]]:
        """Who holds what, and what happened to leases after record number `since`.

        Raises:
            RlixError: there is no pool now; says why.
        """

    def start(self, work: Work) -> None:
        """Begins to start it; returns at once. A second time changes nothing, nor after the caller was killed."""

    def look(self, works: Sequence[Work]) -> Mapping[int, Seen]:
        """What has become of these.

        Raises:
            RlixError: the pool does not say.
        """

    def stop(self, work: Work, why: str, *, now: bool) -> None:
        """Has it write a checkpoint and end, or, `now`, end without. Who follows it is told `why`."""


FILES, JOB_FILE = "files", "job.yaml"
"""The folder of a work's files, and among them the job spec. Paths in it are relative to that folder."""
