"""One segment of a step: its stages, each a thread, hand items on to each other."""

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager

from rlix.flow.parts.ranks import Ranks
from rlix.flow.planner import SegmentPlan, StagePlan
from rlix.flow.planner.plan import LoopPlan
from rlix.flow.programs.pieces import Made, Pieces, cut, shard, size
from rlix.flow.programs.streams import Bounds, Claims, spread, spread_batch
from rlix.flow.programs.watched import Note, Watched, timed
from rlix.flow.programs.wiring import Wiring
from rlix.protocol.errors import WorkerError
from rlix.workers.locks.lock import DeviceLock


class SegmentRun:
    """What has been made of which chunk.

    `seconds`: items and duration of every call, by part.
    """

    def __init__(
        self,
        flow: Wiring,
        plan: SegmentPlan,
        groups: Mapping[str, Ranks],
        lock: DeviceLock,
        source: Pieces,
        before: Mapping[str, Pieces],
        timeout_s: float,
        note: Note,
    ) -> None:
        self.seconds: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._flow, self._groups, self._lock = flow, groups, lock
        self._source, self._before, self._timeout_s, self._noted = source, before, timeout_s, note
        parts = [(stage, placed) for stage in plan.stages for placed in stage.parts]
        apart = {name for stage in plan.stages for loop in stage.loops if not loop.shared for name in loop.parts}
        self._devices = {
            p.name: range(p.first, p.first + p.devices)
            if p.name in apart
            else range(stage.first, stage.first + stage.devices)
            for stage, p in parts
        }
        self._mine = set(self._devices)
        self._order = {part.name: i for i, part in enumerate(flow.parts)}
        self._calling = {name: threading.Lock() for name in self._mine}  # slices of a chunk come one after the other
        self._made = {name: Made() for name in self._mine}
        self._bounds: list[Bounds] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._planned = plan
        self._left = dict.fromkeys(plan.stages, size(source))  # items, of stages that have not ended

    def stage(self, stage: StagePlan) -> None:
        """Do a stage's part of every chunk, in order; or of every item, as it comes, where it is one part that streams.

        What goes wrong stops all stages, and `check` raises it.
        """
        index, circles = 0, {loop.parts[0]: loop for loop in stage.loops}
        inside = {name for loop in stage.loops for name in loop.parts[1:]}
        names = sorted({part.name for part in stage.parts} - inside, key=self._order.__getitem__)
        try:
            self._bring(stage)
            if len(names) == 1 and names[0] not in circles and self._flow.part(names[0]).each is not None:
                self._stream(stage, names[0])
                return
            while (bounds := self._chunk(index)) is not None:
                with self._changed:
                    self._left[stage] = size(self._source) - bounds[0]
                for name in names:
                    if name in circles:
                        self._circle(circles[name], index, bounds)
                    else:
                        order, inputs = (index, self._order[name]), self._inputs(name, bounds)
                        self._note(name, bounds, self._call(name, order, inputs))
                index += 1
        except BaseException as error:  # noqa: BLE001 (raised again by `check`, in the thread that asked for the step)
            self.fail(error)
        finally:
            with self._changed:
                del self._left[stage]

    @property
    def left_s(self) -> float:
        """By the plan, how long the stages that have not ended still work, the chunk they are at counted whole."""
        with self._changed:
            each = (stage.seconds / self._planned.chunk * items for stage, items in self._left.items())
            return max(each, default=0.0)

    def fail(self, error: BaseException) -> None:
        """Stop all stages, at their next chunk at the latest."""
        with self._changed:
            if self._failure is None or isinstance(error, KeyboardInterrupt):
                self._failure = error
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        """When all stages have ended: raises what went wrong first."""
        if self._failure is not None:
            raise self._failure

    def outputs(self) -> dict[str, Pieces]:
        return {name: made.whole for name, made in self._made.items()}

    def _chunk(self, index: int) -> Bounds | None:
        """From which item to which chunk number `index` goes; the same for all stages, decided when the first asks."""
        with self._changed:
            if self._failure is not None:
                return None
            if index == len(self._bounds):
                begin = self._bounds[-1][1] if self._bounds else 0
                total = size(self._source)
                if begin == total:
                    return None
                self._bounds.append((begin, min(total, begin + self._planned.chunk)))
            return self._bounds[index]

    def _bring(self, stage: StagePlan) -> None:
        """Load a stage that stays loaded while it waits for its first chunk, not after."""
        if stage.stays:
            for placed in stage.parts:
                with self._turn(placed.name, (-1, self._order[placed.name])):
                    pass

    def _turn(self, name: str, order: tuple[int, ...]) -> AbstractContextManager[object]:
        occupant = Watched(name, self._groups[name], self._noted)
        return self._lock.turn(occupant, self._devices[name], order, timeout_s=self._timeout_s)

    def _circle(self, loop: LoopPlan, index: int, bounds: Bounds) -> None:
        """All rounds of a chunk, its slices beside each other."""
        begin, end = bounds
        multiple = self._flow.multiple(loop.parts)
        slices = loop.slices if (end - begin) % (loop.slices * multiple) == 0 else 1
        step = (end - begin) // slices
        cuts = [(begin + i * step, begin + (i + 1) * step) for i in range(slices)]
        with ThreadPoolExecutor(slices, f"{self._flow.name}:circle") as threads:
            rounds = [threads.submit(self._rounds, loop, index, cut) for cut in cuts]
            try:
                for ended in as_completed(rounds):
                    ended.result()
            except BaseException as error:  # raised again; the other slices stop at their next call
                self.fail(error)
                raise
        for name in loop.parts:
            self._note(name, bounds, [piece for one in rounds for piece in one.result()[name]])

    def _rounds(self, loop: LoopPlan, index: int, mine: Bounds) -> dict[str, Pieces]:
        """One slice of a chunk on its way: what each part of the circle made of it in the last round."""
        first, made = loop.parts[0], dict[str, Pieces]()
        for n in range(loop.rounds):
            for name in loop.parts:
                self.check()
                inputs = [made[loop.parts[-1]]] if n and name == first else self._inputs(name, mine, made)
                made[name] = self._call(name, (index, self._order[first], n, self._order[name]), inputs)
        return made

    def _stream(self, stage: StagePlan, name: str) -> None:
        """A part that has its devices for itself takes any item as it comes, until it has taken all."""
        part, left = self._flow.part(name), size(self._source)
        claims, share = Claims(0, left, part.each or 1), self._planned.chunk / max(1, left)

        def claim() -> Bounds | None:
            found: list[Bounds | None] = []

            def look() -> bool:
                if self._failure is not None or claims.over:
                    return True
                found.append(claims.take(lambda begin, end: self._ready(name, begin, end)))
                return found[-1] is not None

            with self._changed:
                self._changed.wait_for(look)
            return found[-1] if found else None

        def made(at: Bounds, pieces: Pieces) -> None:
            self._check_count(name, size(pieces), at[1] - at[0])
            self._note(name, at, pieces)
            with self._changed:
                self._left[stage] -= at[1] - at[0]

        def inputs(begin: int, end: int) -> list[Pieces]:
            return self._inputs(name, (begin, end))

        with self._turn(name, (0, self._order[name])), timed(name, "busy", self._noted):
            busy = spread(self._groups[name], part.method, claim, inputs, made, self.fail)
        with self._changed:
            self.seconds[name].append((self._planned.chunk, busy * share))

    def _inputs(self, name: str, at: Bounds, made: Mapping[str, Pieces] | None = None) -> list[Pieces]:
        """What a part gets of these items, when it is there; `made`: of these already."""
        here = made or {}
        return [here[before] if before in here else self._input(before, at) for before in self._flow.before(name)] or [
            cut(self._source, *at)
        ]

    def _call(self, name: str, order: tuple[int, ...], inputs: Sequence[Pieces]) -> Pieces:
        part, group, items = self._flow.part(name), self._groups[name], size(inputs[0])
        calling = self._calling[name]
        with calling:  # as long as the slice before it takes, whose waits have limits
            self.check()
            with self._turn(name, order), timed(name, "busy", self._noted):
                began = time.monotonic()
                if part.each is None:
                    refs, call = group.part(part.method, shard(inputs, group.world_size))
                    made = [(ref, 0, n) for ref, n in zip(refs, group.counts(call), strict=True) if n]
                else:
                    made = spread_batch(group, part.method, part.each, inputs, lambda: self.failed)
                took = time.monotonic() - began
        self.check()
        self._check_count(name, size(made), items)
        with self._changed:
            self.seconds[name].append((items, took))
        return made

    def _note(self, name: str, at: Bounds, made: Pieces) -> None:
        with self._changed:
            self._made[name].put(*at, made)
            self._changed.notify_all()

    def _ready(self, name: str, begin: int, end: int) -> bool:
        """Whether all is there that a part gets of these items."""
        return all(self._made[before].has(begin, end) for before in self._flow.before(name) if before in self._mine)

    def _input(self, name: str, bounds: Bounds) -> Pieces:
        """These items, of a part that stands before.

        There is no limit: whoever makes it has one for each of its waits, and fails with what it has waited for.
        """
        if name not in self._mine:
            return cut(self._before[name], *bounds)
        with self._changed:
            self._changed.wait_for(lambda: self._made[name].has(*bounds) or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._made[name].cut(*bounds)

    def _check_count(self, name: str, count: int, items: int) -> None:
        used = {before for part in self._flow.parts for before in self._flow.before(part.name)}
        used |= {inside for circle in self._flow.circles for inside in circle.parts}
        if name in used and count != items:
            raise WorkerError(
                f"{self._flow.name}: {name} made {count} items of {items}; a part that others come after makes one of "
                "each"
            )
