"""Whether parts take the time that the plan says, and what the plan takes if not: pure."""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Self

from rlix.flow.planner import Plan, SegmentPlan, StagePlan
from rlix.flow.planner.timeline import times, work_s

WINDOW = 3  # steps
LIMIT = 0.15


class Drift:
    """Measured against planned seconds of each part's calls, over the last steps.

    `planned`: seconds of a call, and its items. `answered`: seconds by part with which it is known what comes of them:
    where times come and go between these, nothing new is to be found out.
    """

    def __init__(self, planned: Mapping[str, tuple[float, int]], answered: Sequence[Mapping[str, float]] = ()) -> None:
        self._planned = planned
        self.answered = (*answered, {name: seconds for name, (seconds, _) in planned.items()})
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    @classmethod
    def of(cls, plan: Plan, answered: Sequence[Mapping[str, float]] = ()) -> Self:
        return cls(
            {
                part.name: (part.seconds, segment.chunk // _slices(stage).get(part.name, 1))
                for segment in plan.segments
                for stage in segment.stages
                for part in stage.parts
            },
            answered,
        )

    def saw(self, seconds: Mapping[str, list[tuple[int, float]]]) -> None:
        """A step's calls: items and seconds of each, by part. Calls of another size than planned say nothing."""
        for name, calls in seconds.items():
            planned, chunk = self._planned[name]
            like = [s for items, s in calls if items == chunk]
            if like and planned > 0:
                self._seconds[name].append(median(like))

    @property
    def ratios(self) -> dict[str, float]:
        """Measured over planned seconds, the median of the window."""
        return {name: median(seconds) / self._planned[name][0] for name, seconds in self._seconds.items()}

    def factors(self) -> dict[str, float]:
        """By how much each part is off, if from every answer one has been off by more than `LIMIT` in each step of the
        window; else {}."""
        if not self._seconds or any(len(seconds) < WINDOW for seconds in self._seconds.values()):
            return {}
        return self.ratios if all(self._is_off(known) for known in self.answered) else {}

    def _is_off(self, known: Mapping[str, float]) -> bool:
        return any(
            all(s > known[name] * (1 + LIMIT) for s in seconds) or all(s < known[name] / (1 + LIMIT) for s in seconds)
            for name, seconds in self._seconds.items()
        )


def rescaled(plan: Plan, factors: Mapping[str, float], after: Mapping[str, Collection[str]]) -> Plan:
    """The same plan where parts take `factors` times as long; `after`: the parts whose items each of them gets."""
    segments = tuple(_segment(segment, plan.items // segment.chunk, factors, after) for segment in plan.segments)
    more = sum(new.seconds - old.seconds for new, old in zip(segments, plan.segments, strict=True))
    return replace(plan, segments=segments, seconds=plan.seconds + more)


def _segment(
    segment: SegmentPlan, chunks: int, factors: Mapping[str, float], after: Mapping[str, Collection[str]]
) -> SegmentPlan:
    stages = tuple(_stage(stage, factors) for stage in segment.stages)
    return replace(segment, stages=stages, seconds=max(end for *_, end in times(stages, chunks, after)))


def _stage(stage: StagePlan, factors: Mapping[str, float]) -> StagePlan:
    parts = tuple(replace(part, seconds=part.seconds * factors.get(part.name, 1.0)) for part in stage.parts)
    more = work_s(stage.loops, parts) - work_s(stage.loops, stage.parts)
    return replace(stage, parts=parts, seconds=stage.seconds + more)


def _slices(stage: StagePlan) -> dict[str, int]:
    """Into how many slices a chunk is cut for the parts of a circle."""
    return {name: loop.slices for loop in stage.loops for name in loop.parts}
