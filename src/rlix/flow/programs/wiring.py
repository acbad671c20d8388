"""A flow as its user writes it: parts, each a worker class and one of its methods, and what each of them needs.

A method takes a list of items and returns a list, one for each; every rank is called with its share, also when that is
empty, so that they may speak to each other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm
from typing import Any, Self

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.parts.local import LocalWorker
from rlix.flow.planner import Edge, Graph, LoopPlan, Mode, PartPlan, Plan, Planned, SegmentPlan, StagePlan, make_plan
from rlix.flow.planner.graph import MOST_PARTS, check_shape
from rlix.flow.profiler.profile import Profile, graph_of
from rlix.flow.programs.checks import all_of, check_items, check_name, check_part_call
from rlix.protocol.errors import SpecError
from rlix.protocol.types import Phase
from rlix.workers.counts import is_count

_BY_CLASS: Any = ...  # of a `chunk`: what the class of its worker asks for


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a flow.

    Args:
        after: the parts whose items it gets; of several, tuples with one of each. (): the step's own items. None: the
            part that stands before it, of which the first gets the step's.
        kwargs: of the worker's `__init__`.
        each: so many items at a time each rank takes by itself, as soon as it is free and they are there, whatever the
            others do. None: all ranks are called together, with a share of each chunk, so that they may speak to each
            other.
        chunk: a batch given to it is a multiple of this; None: all items of a step. Default: 1, and None for a class
            with a `save` of its own, for how often that learns is no plan's to choose.
        unit: devices of one rank.
        most: ranks that it can use; None: as many as there are devices for.
        cpu_ranks: it runs on so many ranks that need no device, a simulator say.
    """

    name: str
    worker: type[FlowWorker]
    method: str = "run"
    after: Sequence[str] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    each: int | None = None
    unit: int = 1
    most: int | None = None
    chunk: int | None = _BY_CLASS
    cpu_ranks: int = 0

    def __post_init__(self) -> None:
        check_name("part", self.name)
        if isinstance(self.after, str):
            raise SpecError(f"{self.name}: after={self.after!r} is not a tuple of names: write after=({self.after!r},)")
        if self.after is not None:
            object.__setattr__(
                self, "after", all_of(str, self.after, f"{self.name}: after")
            )  # a generator is read once
        if self.after is not None and len(set(self.after)) < len(self.after):
            raise SpecError(f"{self.name}: after={self.after!r} names a part twice: name each once")
        if self.chunk is _BY_CLASS:
            learns = _is_worker(self.worker) and self.worker.save is not FlowWorker.save
            object.__setattr__(self, "chunk", None if learns and self.each is None else 1)
        check_shape(self.name, self.unit, self.most, 1 if self.chunk is None else self.chunk, self.cpu_ranks)
        if self.each is not None and (not is_count(self.each) or self.chunk is None or self.each % self.chunk):
            raise SpecError(f"{self.name}: each is a multiple of its chunk ({self.chunk}), not {self.each!r}")
        if not _is_worker(self.worker):
            raise SpecError(f"{self.name}: {self.worker!r} is not a class derived from rlix.flow.FlowWorker")
        check_part_call(self.name, self.worker, self.method, self.kwargs)
        if self.worker.phase is Phase.ROLLOUT:
            raise SpecError(f"{self.name}: a part's devices are held, and rollouts' come and go: choose another phase")
        if issubclass(self.worker, LocalWorker) and (self.each is not None or self.cpu_ranks):
            raise SpecError(f"{self.name}: {self.worker.__name__} has an engine: leave out each and cpu_ranks")

    def ranks(self, devices: int, items: int) -> int:
        """How many of them so many devices, and items, give work at most. Raises SpecError: none."""
        most = self.cpu_ranks or min(devices // self.unit, self.most or devices)
        if not most:
            raise SpecError(f"{self.name} needs {self.unit} device(s) for one rank, and there are {devices}")
        return min(most, max(1, items // (self.chunk or 1)))

    def on(self, devices: int, items: int) -> PartPlan:
        """The part on as many of the first devices as it can use."""
        ranks = self.ranks(devices, items)
        return PartPlan(self.name, ranks, 0, 0 if self.cpu_ranks else ranks * self.unit, 0.0)

    @property
    def measured(self) -> str:
        """What a table of this part is a table of."""
        where = f"{self.cpu_ranks} rank(s) on the CPU" if self.cpu_ranks else f"ranks of {self.unit} device(s)"
        many = "" if self.each is None else f", {self.each} at a time"
        return f"{self.worker.__qualname__}.{self.method} on {where}{many}"


@dataclass(frozen=True, slots=True)
class Circle:
    """Parts that stand one after the other and feed each other: a batch goes round so many times.

    The first of them gets what it comes `after` in the first round, from then on what the last of them made. Whoever
    comes after one of them gets what it made in the last round.
    """

    parts: tuple[str, ...]
    rounds: int


class Wiring:
    """Parts in the order of their data; a worker class alone is a part of its name, of which `run` is called.

    Args:
        items: of a step. None: whoever starts it says.
        sample: makes so many items, for profiling.
        circles: parts that feed each other.

    Raises:
        SpecError: a name is none or is used twice, there are no parts or too many to plan, one needs a part that does
            not stand before it, a circle is none, or there are no items.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Part | type[FlowWorker]],
        items: int | None = None,
        sample: Callable[[int], Sequence[Any]] | None = None,
        circles: Sequence[Circle] = (),
    ) -> None:
        check_name("flow", name)
        self.name, self._items, self._sample = name, items, sample
        self.parts = _parts(name, parts)
        self.circles = all_of(Circle, circles, f"flow {name}: circles")
        if not 0 < len(self.parts) <= MOST_PARTS:
            raise SpecError(f"flow {name}: a flow has 1 to {MOST_PARTS} parts, not {len(self.parts)}")
        if sample is not None and not callable(sample):
            raise SpecError(f"flow {name}: sample is a function that makes so many items, not {sample!r}")
        if items is not None and not is_count(items):
            raise SpecError(f"flow {name}: a step has 1 item or more, not {items!r}")
        known: list[str] = []
        for part in self.parts:
            if part.name in known:
                raise SpecError(f"flow {name}: two parts are called {part.name!r}")
            if missing := [other for other in part.after or () if other not in known]:
                raise SpecError(f"flow {name}: {part.name} comes after {missing}, and before it there are {known}")
            known.append(part.name)
        self._check_circles()

    def _check_circles(self) -> None:
        names, used = [part.name for part in self.parts], set[str]()
        for circle in self.circles:
            at = names.index(circle.parts[0]) if circle.parts and circle.parts[0] in names else len(names)
            consecutive = names[at : at + len(circle.parts)] == list(circle.parts)
            follow = consecutive and all(before in self.before(name) for before, name in pairwise(circle.parts))
            if len(circle.parts) < 2 or not is_count(circle.rounds) or not follow or used & set(circle.parts):
                raise SpecError(
                    f"flow {self.name}: {circle} is no circle: name two or more consecutive parts, each "
                    "`after` the one before it and in no other circle, and a whole number of rounds"
                )
            used |= set(circle.parts)

    @property
    def edges(self) -> list[Edge]:
        back = [Edge(circle.parts[-1], circle.parts[0], rounds=circle.rounds) for circle in self.circles]
        return [Edge(before, part.name) for part in self.parts for before in part.after or ()] + back

    @property
    def items(self) -> int:
        if self._items is None:
            raise SpecError(
                f"flow {self.name}: say how many items a step has: items= of the flow, or like= where it is started"
            )
        return self._items

    def like(self, items: Sequence[Any] | None) -> Self:
        """The same flow, of steps of such items where it does not say itself of which."""
        if items is None:
            return self
        check_items(self.name, items)
        other = copy(self)
        other._items = self._items or len(items)
        other._sample = self._sample or (lambda count: [items[i % len(items)] for i in range(count)])
        return other

    def sample(self, count: int) -> Sequence[Any]:
        if self._sample is None:
            raise SpecError(f"flow {self.name} cannot be profiled: give it `sample`, which makes items")
        return self._sample(count)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def before(self, name: str) -> tuple[str, ...]:
        """The parts whose items this one gets."""
        return tuple(self.part(name).after or ())

    def multiple(self, names: Iterable[str]) -> int:
        """A batch given to all of these parts must be a multiple of so many items."""
        return lcm(*(self.part(name).chunk or self.items for name in names))

    def check(self, plan: Plan, devices: int) -> None:
        """Raises SpecError: the plan is of other parts, of more devices, or of chunks that the parts do not take."""
        planned, mine = sorted(part.name for part in plan.parts), sorted(part.name for part in self.parts)
        if planned != mine:
            raise SpecError(f"flow {self.name}: the plan is of parts {planned}, and the flow has {mine}")
        used = max(plan.devices, *(part.first + part.devices for part in plan.parts))
        if used > devices:
            raise SpecError(
                f"flow {self.name}: the plan is for {used} device(s), and there are {devices}: plan it again"
            )
        for segment in plan.segments:
            multiple = self.multiple(segment.names)
            if not is_count(segment.chunk) or segment.chunk % multiple:
                raise SpecError(
                    f"flow {self.name}: the plan has chunks of {segment.chunk} items, and its parts take multiples of "
                    f"{multiple}"
                )

    def graph(self, profile: Profile) -> Graph:
        """Raises SpecError: the profile is of another flow, has not all parts, or is of what one of them was before."""
        if profile.flow != self.name:
            raise SpecError(f"flow {self.name}: the profile is of flow {profile.flow}: run `rlix profile` on this one")
        for part in self.parts:
            known = profile.parts.get(part.name)
            if known is not None and known.measured not in ("", part.measured):
                raise SpecError(
                    f"flow {self.name}: {part.name} was measured as {known.measured}, and is {part.measured} now: run "
                    "`rlix profile path/to/file.py:name` again, or `rlix.flow.profile`"
                )
        return graph_of(profile, self._shapes, self.edges)

    def fits(self, profile: Profile, devices: int) -> bool:
        """Whether a plan of whole steps by this profile needs no guess."""
        try:
            self.graph(profile)
        except SpecError:
            return False
        tables = ((profile.parts[part.name].table, part.ranks(devices, self.items)) for part in self.parts)
        return not any(table.unknown(ranks, self.items) for table, ranks in tables)

    def unmeasured(self, devices: int) -> Plan:
        """Every part in turn on all devices that it can use, nobody's state beside another's: nothing need be known."""
        circles = {name: circle for circle in self.circles for name in circle.parts}
        segments = []
        for part in self.parts:
            circle = circles.get(part.name)
            if circle is not None and part.name != circle.parts[0]:
                continue
            names = circle.parts if circle is not None else (part.name,)
            placed = tuple(self.part(name).on(devices, self.items) for name in names)
            loops = (LoopPlan(names, circle.rounds, 1, True, together=False),) if circle is not None else ()
            stage = StagePlan(placed, 0, max(one.devices for one in placed), 0.0, loops=loops)
            segments.append(SegmentPlan((stage,), self.items, 0.0))
        return Plan(tuple(segments), self.items, devices, 0.0, 0.0, resident=False)

    @property
    def _shapes(self) -> dict[str, dict[str, int | None]]:
        return {
            part.name: {
                "unit": part.unit,
                "most": part.most,
                "chunk": part.chunk or self.items,
                "cpu_ranks": part.cpu_ranks,
                "streams": part.each is not None,
            }
            for part in self.parts
        }

    def plan(
        self, profile: Profile, devices: int, *, device_bytes: float | None = None, mode: Mode | None = None
    ) -> Planned:
        """Raises SpecError: the profile is of another flow, a part was not profiled, or there is no plan."""
        room = profile.device_bytes if device_bytes is None else device_bytes
        return make_plan(self.graph(profile), self.items, devices, device_bytes=room, mode=mode)


def _parts(flow: str, given: object) -> tuple[Part, ...]:
    """With what each comes after."""
    if isinstance(given, Iterable):
        given = [Part(one.__name__.lower(), one) if _is_worker(one) else one for one in given]
    parts = all_of(Part, given, f"flow {flow}: parts (each a Part, or a class derived from FlowWorker)")
    before: list[tuple[str, ...]] = [(), *((part.name,) for part in parts)]
    return tuple(
        part if part.after is not None else replace(part, after=default)
        for part, default in zip(parts, before, strict=False)
    )


def _is_worker(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, FlowWorker)
