"""A flow as its user writes it: parts, each a worker class and one of its methods, and what each of them needs.

    flow = Flow("my flow", [
        Part("generate", Generator, "generate"),
        Part("score", Scorer, "score", after=("generate",)),
        Part("train", Trainer, "train", after=("score",)),
    ], items=256, sample=make_prompts)

A method takes a list of items and returns a list, one for each; every rank is called with its share, also when that is
empty, so that they may speak to each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlix.flow.planner import Edge, Graph, Mode, Planned, make_plan
from rlix.flow.profiler.profile import Profile, graph_of
from rlix.flow.workers.flow_worker import FlowWorker
from rlix.protocol.errors import SpecError


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a flow.

    Args:
        after: the parts whose items it gets; of several, tuples with one of each. None: the step's own items.
        kwargs: of the worker's `__init__`.
        unit, most, chunk, cpu_ranks: as of `rlix.flow.planner.Component`.
    """

    name: str
    worker: type[FlowWorker]
    method: str
    after: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    unit: int = 1
    most: int | None = None
    chunk: int = 1
    cpu_ranks: int = 0


class Flow:
    """Parts in the order of their data, and the size of a step. `sample(n)` makes n items, for profiling.

    Raises:
        SpecError: names are used twice, or a part needs one that does not stand before it.
    """

    def __init__(
        self, name: str, parts: Sequence[Part], items: int, sample: Callable[[int], Sequence[Any]] | None = None
    ) -> None:
        self.name, self.parts, self.items = name, tuple(parts), items
        self._sample = sample
        known: set[str] = set()
        for part in parts:
            if part.name in known:
                raise SpecError(f"flow {name}: two parts are called {part.name!r}")
            if missing := [other for other in part.after if other not in known]:
                raise SpecError(f"flow {name}: {part.name} comes after {missing}, which no part before it is called")
            if not hasattr(part.worker, part.method):
                raise SpecError(f"flow {name}: {part.worker.__name__} has no method {part.method!r} for {part.name}")
            known.add(part.name)

    @property
    def edges(self) -> list[Edge]:
        return [Edge(before, part.name) for part in self.parts for before in part.after]

    def sample(self, count: int) -> Sequence[Any]:
        if self._sample is None:
            raise SpecError(f"flow {self.name} cannot be profiled: give it `sample`, which makes items")
        return self._sample(count)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def graph(self, profile: Profile) -> Graph:
        shapes: dict[str, dict[str, int | None]] = {
            part.name: {"unit": part.unit, "most": part.most, "chunk": part.chunk, "cpu_ranks": part.cpu_ranks}
            for part in self.parts
        }
        return graph_of(profile, shapes, self.edges)

    def plan(
        self, profile: Profile, devices: int, *, device_bytes: float = float("inf"), mode: Mode | None = None
    ) -> Planned:
        """Raises SpecError: a part was not profiled, or there is no plan."""
        return make_plan(self.graph(profile), self.items, devices, device_bytes=device_bytes, mode=mode)
