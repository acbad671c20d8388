"""A plan: which parts run where, in turn or beside each other, on batches of which size, and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

AHEAD = "a step ahead"
SLACK = 0.01
"""Plans whose times differ by no more are equally fast: tables are no better."""


class Mode(StrEnum):
    """Everything in turn on the same devices, every part on devices of its own, or some of both."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part: its ranks, on `devices` devices from number `first` of the flow's; `seconds` of one call, and bytes at
    most of the fullest device."""

    name: str
    ranks: int
    first: int
    devices: int
    seconds: float
    peak_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A circle of parts: how often items go round, in how many slices, on the same devices or beside each other.

    `together`: no state goes for another's sake.
    """

    parts: tuple[str, ...]
    rounds: int
    slices: int
    shared: bool
    together: bool = True


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Parts that take turns on the same devices, once for every chunk; `switch_s` of its seconds are for switching."""

    parts: tuple[PartPlan, ...]
    first: int
    devices: int
    seconds: float
    switch_s: float = 0.0
    loops: tuple[LoopPlan, ...] = ()

    @property
    def stays(self) -> bool:
        """Whether no state of it goes for another one's sake."""
        return not self.switch_s and all(loop.together for loop in self.loops)

    @property
    def used(self) -> int:
        """Of its devices, how many work: a part may not be able to use all."""
        return max(part.first + part.devices for part in self.parts) - self.first if self.devices else 0


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Stages that work at the same time on different chunks of `chunk` items; `seconds` for all of a step's items.

    `ahead`: some stages work on the next step's items meanwhile; `seconds` are from one step's end to the next one's.
    """

    stages: tuple[StagePlan, ...]
    chunk: int
    seconds: float
    ahead: bool = False

    @property
    def used(self) -> tuple[int, ...]:
        """Numbers of the devices that work."""
        return tuple(stage.first + i for stage in self.stages for i in range(stage.used))

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts."""
        return tuple(part.name for stage in self.stages for part in stage.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments, one after the other on all devices. `resident`: all states stay there; else each segment's is loaded.

    `seconds` of a step of `items` items, `switch_s` of them between segments.
    """

    segments: tuple[SegmentPlan, ...]
    items: int
    devices: int
    seconds: float
    switch_s: float
    resident: bool

    @property
    def mode(self) -> Mode:
        if all(len(segment.stages) == 1 for segment in self.segments):
            return Mode.COLLOCATED
        own = all(
            len(stage.parts) - sum(len(loop.parts) - 1 for loop in stage.loops) == 1
            for stage in self.segments[0].stages
        )
        return Mode.DISAGGREGATED if len(self.segments) == 1 and own else Mode.HYBRID

    @property
    def extra_stages(self) -> int:
        """How many stages there are beside others."""
        return sum(len(segment.stages) - 1 for segment in self.segments)

    @property
    def parts(self) -> Iterator[PartPlan]:
        return (part for segment in self.segments for stage in segment.stages for part in stage.parts)

    @property
    def shape(self) -> str:
        """`a → b` in turn, `a | b` beside each other, `a+b` in turn within a stage; with chunk size and devices."""
        return " → ".join(_segment(segment, self.items) for segment in self.segments)

    def explain(self) -> str:
        """Where the time of a step goes, line by line."""
        lines = [f"{self.mode}: {self.shape}"]
        if not self.seconds:
            return f"{lines[0]}\n  nothing of it was measured"
        lines.append(f"  {self.seconds:.3f} s a step of {self.items} items")
        for segment in self.segments:
            chunks = self.items // segment.chunk
            slowest = max(segment.stages, key=lambda stage: stage.seconds)
            many = f"{chunks} chunks of {segment.chunk}: " if chunks > 1 else f"{AHEAD}: " if segment.ahead else ""
            lines.append(f"  {segment.seconds:.3f} s  {many}{_stages(segment)}")
            if chunks > 1 or segment.ahead:
                lines.append(f"           the slowest is {_names(slowest)}: {slowest.seconds * chunks:.3f} s of work")
        if self.switch_s:
            lines.append(f"  {self.switch_s:.3f} s  loading and offloading: not all states stay on the devices at once")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Planned:
    """The fastest plan, the next ones of other shapes, fastest first, and what the tables could only guess."""

    best: Plan
    others: tuple[Plan, ...]
    guesses: tuple[str, ...] = ()

    @property
    def runner_up(self) -> Plan | None:
        return self.others[0] if self.others else None

    def of(self, mode: Mode) -> Plan | None:
        """The fastest plan of this mode."""
        return next((plan for plan in (self.best, *self.others) if plan.mode is mode), None)

    def explain(self) -> str:
        parts = [self.best.explain()]
        if self.runner_up is not None:
            parts.append(f"{self._compared(self.runner_up)}:\n{self.runner_up.explain()}")
        modes = [(mode, self.of(mode)) for mode in Mode]
        parts.append("fastest of each mode: " + ", ".join(f"{m} {p.seconds:.3f} s" for m, p in modes if p))
        parts += [f"not measured: {guess}" for guess in self.guesses]
        return "\n".join(parts)

    def _compared(self, other: Plan) -> str:
        factor = other.seconds / self.best.seconds
        if factor >= 1:
            return f"runner-up, {factor:.2f} times as long"
        if factor >= 1 - SLACK:
            return f"as fast within {100 * SLACK:.0f} %, in more stages"
        return f"faster, but not {self.best.mode}: {factor:.2f} times as long"


def _segment(segment: SegmentPlan, items: int) -> str:
    stages = " | ".join(f"{_names(stage)} on {stage.used or 'the CPU'}" for stage in segment.stages)
    if len(segment.stages) == 1:
        return stages
    how = f"by {segment.chunk} of {items}" if segment.chunk < items else AHEAD if segment.ahead else "in turn"
    return f"({stages}, {how})"


def _names(stage: StagePlan) -> str:
    circles = {name: "⟲".join(loop.parts) for loop in stage.loops for name in loop.parts}
    return "+".join(dict.fromkeys(circles.get(part.name, part.name) for part in stage.parts))


def _stages(segment: SegmentPlan) -> str:
    return ", ".join(_stage(stage) for stage in segment.stages)


def _stage(stage: StagePlan) -> str:
    switching = f" ({stage.switch_s:.3f} s of it switching)" if stage.switch_s else ""
    last = stage.first + stage.used - 1
    numbers = f"device {last}" if stage.used == 1 else f"devices {stage.first}–{last}"
    where = numbers if stage.devices else "the CPU"
    rounds = "".join(f", {loop.rounds} rounds in {loop.slices} slice(s)" for loop in stage.loops)
    return f"{_names(stage)} {stage.seconds:.3f} s on {where}{rounds}{switching}"
