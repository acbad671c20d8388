"""Whether parts take the time that the plan says: pure."""

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median

from rlix.flow.planner import Plan

WINDOW = 3  # steps
LIMIT = 0.15


class Drift:
    """Measured against planned seconds of each part's calls, over the last steps.

    `scale`: what is known to differ already, and is no news.
    """

    def __init__(self, plan: Plan, scale: Mapping[str, float] | None = None) -> None:
        self._planned = {
            part.name: (part.seconds, segment.chunk)
            for segment in plan.segments
            for stage in segment.stages
            for part in stage.parts
        }
        self._scale = dict(scale or {})
        self._ratios: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def saw(self, seconds: Mapping[str, list[tuple[int, float]]]) -> None:
        """A step's calls: items and seconds of each, by part. Calls of another size than planned say nothing."""
        for name, calls in seconds.items():
            planned, chunk = self._planned[name]
            like = [s for items, s in calls if items == chunk]
            if like and planned > 0:
                self._ratios[name].append(median(like) / planned)

    @property
    def ratios(self) -> dict[str, float]:
        """Measured over planned seconds, the median of the window."""
        return {name: median(ratios) for name, ratios in self._ratios.items()}

    def factors(self) -> dict[str, float]:
        """By how much each part is off, if one has been by more than `LIMIT` in every step of the window; else {}."""
        if not self._ratios or any(len(ratios) < WINDOW for ratios in self._ratios.values()):
            return {}
        steady = [
            name
            for name, ratios in self._ratios.items()
            if all(r / self._scale.get(name, 1.0) > 1 + LIMIT for r in ratios)
            or all(r / self._scale.get(name, 1.0) < 1 - LIMIT for r in ratios)
        ]
        return self.ratios if steady else {}
