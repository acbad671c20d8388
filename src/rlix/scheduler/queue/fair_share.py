"""Fair share: what was given lately, against what one is entitled to. The words are Slurm's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlix.scheduler.queue.jobs import Snapshot

HALF_LIFE_S = 7 * 86400.0
"""After which a GPU-second counts half (Slurm: PriorityDecayHalfLife, and its default)."""


@dataclass(slots=True)
class Usage:
    """GPU-seconds that were given, by team and owner, decaying exponentially."""

    half_life_s: float = HALF_LIFE_S
    _at: float = 0.0
    _used: dict[tuple[str, str], float] = field(default_factory=dict)

    def charge(self, team: str, owner: str, gpu_s: float, at: float) -> None:
        """`gpu_s` were given at about this time, which may be before that of the last charge."""
        if at > self._at:
            self._used, self._at = dict(self.at(at)), at
        late = 0.5 ** ((self._at - at) / self.half_life_s)
        self._used[team, owner] = self._used.get((team, owner), 0.0) + gpu_s * late

    def at(self, now: float) -> Mapping[tuple[str, str], float]:
        left = 0.5 ** (max(0.0, now - self._at) / self.half_life_s)
        return {key: used * left for key, used in self._used.items()}


def of_team(snapshot: Snapshot, team: str) -> float:
    """Decayed GPU-seconds for each unit of the team's weight: who has less is next."""
    used = sum(gpu_s for (name, _), gpu_s in snapshot.used.items() if name == team)
    return used / snapshot.team(team).weight


def times_its_share(snapshot: Snapshot, team: str) -> float | None:
    """What the team was given of all that was given, by what its weight is of all weights; None where nothing was.

    All: of teams that are configured, have jobs, or were given something.
    """
    teams = {*snapshot.teams, *(job.team for job in snapshot.jobs), *(name for name, _ in snapshot.used)}
    given, weights = sum(snapshot.used.values()), sum(snapshot.team(name).weight for name in teams)
    if given <= 0 or team not in teams:
        return None
    mine = of_team(snapshot, team) * snapshot.team(team).weight / given
    return mine / (snapshot.team(team).weight / weights)
