"""What the control plane keeps about one admitted pipeline besides the recorded state."""

from dataclasses import dataclass, field

from rlix.control.settings import Settings
from rlix.protocol.messages import Process, Progress

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
GANG_GAP_S = 0.2  # between two phases of a job: until its next gang request is in


@dataclass(slots=True)
class Departure:
    """A pipeline ends: its program is ended first, which would start its workers again, then these, then its leases.

    `told`: what they are told, "" where it ends by its own word. `spare`: the process that says so; it is not ended,
    unless it keeps devices locked. `awaited_by`: until when the nodes are given to end the processes.
    """

    told: str
    spare: Process | None
    ended: int = 0  # of the two groups
    awaited_by: float = 0.0
    tried: bool = False  # its leases have ended, or are quarantined


@dataclass(slots=True)
class Caller:
    """A process that speaks for the job: when it last did, and what it said that it holds."""

    heard_at: float
    held: frozenset[int] = frozenset()
    unheld: dict[int, float] = field(default_factory=dict)  # leases it asked for but does not know, since when


class Job:
    """Who speaks for the job, and how often it failed lately. Times are the clock's.

    `now` is when the pipeline was admitted.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.callers: dict[Process, Caller] = {}
        self.ending: Departure | None = None
        self.progress: Progress | None = None  # what it said last; forgotten with the scheduler's process
        self.deaf: set[str] = set()  # elastic clusters that did not take a bundle up and have not asked since
        self._polls: dict[str, tuple[float, float]] = {}  # of elastic clusters: the last, the longest time between two
        self._failures = 0
        self._muted_until = 0.0
        self._rolling: set[str] = set()  # elastic clusters with something outstanding
        self._gang_until = 0.0

    def heard(self, process: Process | None, now: float) -> None:
        """Notes that somebody spoke for the job."""
        self.heard_at = now
        if process is None:
            return
        caller = self.callers.get(process)
        if caller is None:
            self.callers[process] = Caller(now)
        else:
            caller.heard_at = now

    def polled(self, cluster: str, now: float) -> None:
        """Notes that its rollout has asked what is new."""
        last, longest_s = self._polls.get(cluster, (now, 0.0))
        self._polls[cluster] = now, max(longest_s, now - last)

    def note_s(self, cluster: str, settings: Settings) -> float:
        """So long a rollout has to note a bundle: one that asks rarely longer, but no longer than to give one back."""
        _, rarely_s = self._polls.get(cluster, (0.0, 0.0))
        return max(settings.grow_timeout_s, min(2 * rarely_s, settings.shrink_deadline_s))

    def failed(self, now: float) -> float:
        """Notes that a grow or shrink failed; returns until when the job gets no further bundle."""
        pause = min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self._muted_until = now + pause
        return self._muted_until

    def succeeded(self) -> None:
        self._failures = 0

    @property
    def rolling(self) -> bool:
        """Whether something is outstanding, by its last reports."""
        return bool(self._rolling)

    def rollout_ended(self, cluster: str, trajectories: int) -> bool:
        """Takes a report of what is outstanding; True when that has just become nothing, on all elastic clusters."""
        before = bool(self._rolling)
        if trajectories:
            self._rolling.add(cluster)
        else:
            self._rolling.discard(cluster)
        return before and not self._rolling

    def phase_ended(self, now: float) -> float:
        """Notes that its rollout or a gang of it has just ended: it is likely to ask for a gang before the answer."""
        self._gang_until = now + GANG_GAP_S
        return self._gang_until

    def expects_gang(self, now: float) -> bool:
        return now < self._gang_until

    def muted(self, cluster: str, now: float) -> bool:
        """Whether a rollout must not get further bundles for now: the job is ending or failed a moment ago, or it did
        not take the last one up."""
        return self.ending is not None or now < self._muted_until or cluster in self.deaf
