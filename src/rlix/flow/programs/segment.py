"""One segment of a step: its stages, each a thread, hand chunks on to each other."""

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager

from rlix.flow.locks.lock import DeviceLock
from rlix.flow.planner import SegmentPlan, StagePlan
from rlix.flow.programs.flow import Flow, Part
from rlix.flow.programs.pieces import Pieces, cut, shard, size
from rlix.flow.workers.launch import Group
from rlix.protocol.errors import WaitTimeoutError, WorkerError


class SegmentRun:
    """What has been made of which chunk. `chunk`, the items of those to come, may change at any time.

    `seconds`: items and duration of every call, by part.
    """

    def __init__(
        self,
        flow: Flow,
        plan: SegmentPlan,
        index: int,
        groups: Mapping[str, Group],
        lock: DeviceLock,
        source: Pieces,
        before: Mapping[str, Pieces],
        chunk: int,
        timeout_s: float,
    ) -> None:
        self.index, self.chunk = index, chunk
        self.seconds: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._flow, self._groups, self._lock = flow, groups, lock
        self._source, self._before, self._timeout_s = source, before, timeout_s
        self._mine = {part.name for stage in plan.stages for part in stage.parts}
        self._order = {part.name: i for i, part in enumerate(flow.parts)}
        self._made: dict[tuple[str, int], Pieces] = {}
        self._bounds: list[tuple[int, int]] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def stage(self, stage: StagePlan) -> None:
        """Do a stage's part of every chunk, in order. What goes wrong stops all stages, and `check` raises it."""
        index = 0
        try:
            self._bring(stage)
            while (bounds := self._chunk(index)) is not None:
                for placed in sorted(stage.parts, key=lambda part: self._order[part.name]):
                    self._part(placed.name, stage, index, bounds)
                index += 1
        except BaseException as error:  # noqa: BLE001 (raised again by `check`, in the thread that asked for the step)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Stop all stages, at their next chunk at the latest."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def check(self) -> None:
        """When all stages have ended: raises what went wrong first."""
        if self._failure is not None:
            raise self._failure

    def outputs(self) -> dict[str, Pieces]:
        return {name: [piece for i in range(len(self._bounds)) for piece in self._made[name, i]] for name in self._mine}

    def _chunk(self, index: int) -> tuple[int, int] | None:
        """From which item to which chunk number `index` goes; the same for all stages, decided when the first asks."""
        with self._changed:
            if self._failure is not None:
                return None
            if index == len(self._bounds):
                begin = self._bounds[-1][1] if self._bounds else 0
                total = size(self._source)
                if begin == total:
                    return None
                self._bounds.append((begin, min(total, begin + self.chunk)))
            return self._bounds[index]

    def _bring(self, stage: StagePlan) -> None:
        """Load a stage that stays loaded while it waits for its first chunk, not after."""
        for placed in stage.parts if not stage.switch_s else ():
            with self._turn(placed.name, stage, -1):
                pass

    def _turn(self, name: str, stage: StagePlan, index: int) -> AbstractContextManager[object]:
        devices = range(stage.first, stage.first + stage.devices)
        order = (index, self._order[name])
        return self._lock.turn(self._groups[name], devices, order, timeout_s=self._timeout_s)

    def _part(self, name: str, stage: StagePlan, index: int, bounds: tuple[int, int]) -> None:
        part, group = self._flow.part(name), self._groups[name]
        inputs = [self._input(before, index, bounds) for before in part.after] or [cut(self._source, *bounds)]
        with self._turn(name, stage, index):
            began = time.monotonic()
            refs, call = group.part(part.method, shard(inputs, group.workers.world_size))
            counts = call.wait(self._timeout_s)
            took = time.monotonic() - began
        self._check_count(part, sum(counts), bounds)
        with self._changed:
            self.seconds[name].append((bounds[1] - bounds[0], took))
            self._made[name, index] = [(ref, 0, n) for ref, n in zip(refs, counts, strict=True) if n]
            self._changed.notify_all()

    def _input(self, name: str, index: int, bounds: tuple[int, int]) -> Pieces:
        if name not in self._mine:
            return cut(self._before[name], *bounds)
        with self._changed:
            there = self._changed.wait_for(
                lambda: (name, index) in self._made or self._failure is not None, self._timeout_s
            )
            if self._failure is not None:
                raise self._failure
            if not there:
                raise WaitTimeoutError(
                    f"{self._flow.name}: waited {self._timeout_s:g} s for {name} to make items {bounds[0]}–{bounds[1]}"
                )
            return self._made[name, index]

    def _check_count(self, part: Part, count: int, bounds: tuple[int, int]) -> None:
        needed = any(part.name in other.after for other in self._flow.parts)
        if needed and count != bounds[1] - bounds[0]:
            raise WorkerError(
                f"{self._flow.name}: {part.name} made {count} items of {bounds[1] - bounds[0]}; a part that others "
                "come after makes one of each"
            )
