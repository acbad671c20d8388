"""A flow as its user writes it: parts, each a worker class and one of its methods, and what each of them needs.

    flow = Flow("mine", [
        Part("generate", Generator, "generate"),
        Part("score", Scorer, "score", after=("generate",)),
        Part("train", Trainer, "train", after=("score",)),
    ], items=256, sample=make_prompts)

A method takes a list of items and returns a list, one for each; every rank is called with its share, also when that is
empty, so that they may speak to each other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any

from rlix.flow.counts import is_count
from rlix.flow.planner import Edge, Graph, Mode, Plan, Planned, make_plan
from rlix.flow.planner.graph import MOST_PARTS, check_shape
from rlix.flow.profiler.profile import Profile, graph_of
from rlix.flow.programs.checks import all_of, check_name, check_part_call
from rlix.flow.workers.flow_worker import FlowWorker
from rlix.protocol.errors import SpecError


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a flow.

    Args:
        after: the parts whose items it gets; of several, tuples with one of each. (): the step's own items.
        kwargs: of the worker's `__init__`.
        unit, most, chunk, cpu_ranks: as of `rlix.flow.planner.Component`.
    """

    name: str
    worker: type[FlowWorker]
    method: str
    after: Sequence[str] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    unit: int = 1
    most: int | None = None
    chunk: int = 1
    cpu_ranks: int = 0

    def __post_init__(self) -> None:
        check_name("part", self.name)
        if isinstance(self.after, str):
            raise SpecError(f"{self.name}: after={self.after!r} is not a tuple of names: write after=({self.after!r},)")
        if len(set(all_of(str, self.after, f"{self.name}: after"))) < len(self.after):
            raise SpecError(f"{self.name}: after={self.after!r} names a part twice: name each once")
        check_shape(self.name, self.unit, self.most, self.chunk, self.cpu_ranks)
        if not (isinstance(self.worker, type) and issubclass(self.worker, FlowWorker)):
            raise SpecError(f"{self.name}: {self.worker!r} is not a class derived from rlix.flow.FlowWorker")
        check_part_call(self.name, self.worker, self.method, self.kwargs)

    @property
    def measured(self) -> str:
        """What a table of this part is a table of."""
        where = f"{self.cpu_ranks} rank(s) on the CPU" if self.cpu_ranks else f"ranks of {self.unit} device(s)"
        return f"{self.worker.__qualname__}.{self.method} on {where}"


@dataclass(frozen=True, slots=True)
class Circle:
    """Parts that stand one after the other and feed each other: a batch goes round so many times.

    The first of them gets what it comes `after` in the first round, from then on what the last of them made. Whoever
    comes after one of them gets what it made in the last round.
    """

    parts: tuple[str, ...]
    rounds: int


class Flow:
    """Parts in the order of their data, and the size of a step.

    `sample(n)` makes n items, for profiling. `circles`: parts that feed each other.

    Raises:
        SpecError: a name is none or is used twice, there are no parts or too many to plan, one needs a part that does
            not stand before it, a circle is none, or there are no items.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        items: int,
        sample: Callable[[int], Sequence[Any]] | None = None,
        circles: Sequence[Circle] = (),
    ) -> None:
        check_name("flow", name)
        self.name, self.items, self._sample = name, items, sample
        self.parts = all_of(Part, parts, f"flow {name}: parts")
        self.circles = all_of(Circle, circles, f"flow {name}: circles")
        if not 0 < len(self.parts) <= MOST_PARTS:
            raise SpecError(f"flow {name}: a flow has 1 to {MOST_PARTS} parts, not {len(self.parts)}")
        if sample is not None and not callable(sample):
            raise SpecError(f"flow {name}: sample is a function that makes so many items, not {sample!r}")
        if not is_count(items):
            raise SpecError(f"flow {name}: a step has 1 item or more, not {items!r}")
        known: set[str] = set()
        for part in self.parts:
            if part.name in known:
                raise SpecError(f"flow {name}: two parts are called {part.name!r}")
            if missing := [other for other in part.after if other not in known]:
                raise SpecError(f"flow {name}: {part.name} comes after {missing}, which no part before it is called")
            known.add(part.name)
        self._check_circles()

    def _check_circles(self) -> None:
        names, used = [part.name for part in self.parts], set[str]()
        for circle in self.circles:
            at = names.index(circle.parts[0]) if circle.parts and circle.parts[0] in names else len(names)
            consecutive = names[at : at + len(circle.parts)] == list(circle.parts)
            follow = consecutive and all(before in self.part(name).after for before, name in pairwise(circle.parts))
            if len(circle.parts) < 2 or not is_count(circle.rounds) or not follow or used & set(circle.parts):
                raise SpecError(
                    f"flow {self.name}: {circle} is no circle: name two or more consecutive parts, each "
                    "`after` the one before it and in no other circle, and a whole number of rounds"
                )
            used |= set(circle.parts)

    @property
    def edges(self) -> list[Edge]:
        back = [Edge(circle.parts[-1], circle.parts[0], rounds=circle.rounds) for circle in self.circles]
        return [Edge(before, part.name) for part in self.parts for before in part.after] + back

    def sample(self, count: int) -> Sequence[Any]:
        if self._sample is None:
            raise SpecError(f"flow {self.name} cannot be profiled: give it `sample`, which makes items")
        return self._sample(count)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def multiple(self, names: Iterable[str]) -> int:
        """A batch given to all of these parts must be a multiple of so many items."""
        return lcm(*(self.part(name).chunk for name in names))

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
        shapes: dict[str, dict[str, int | None]] = {
            part.name: {"unit": part.unit, "most": part.most, "chunk": part.chunk, "cpu_ranks": part.cpu_ranks}
            for part in self.parts
        }
        return graph_of(profile, shapes, self.edges)

    def plan(
        self, profile: Profile, devices: int, *, device_bytes: float = float("inf"), mode: Mode | None = None
    ) -> Planned:
        """Raises SpecError: the profile is of another flow, a part was not profiled, or there is no plan."""
        return make_plan(self.graph(profile), self.items, devices, device_bytes=device_bytes, mode=mode)
