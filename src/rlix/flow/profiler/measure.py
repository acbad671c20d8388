"""Measuring the parts of a flow: each for itself, in the order in which items go through them."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from statistics import median
from typing import Any

import ray

from rlix.control.program import Program
from rlix.flow.parts.items import Items
from rlix.flow.parts.local import LocalGroup, LocalWorker
from rlix.flow.parts.part_group import PartGroup
from rlix.flow.parts.ranks import Ranks
from rlix.flow.planner import Point
from rlix.flow.profiler.profile import PartProfile, Profile, machine
from rlix.flow.programs.pieces import Pieces, cut, shard, size
from rlix.flow.programs.streams import spread_batch
from rlix.flow.programs.wiring import Part, Wiring
from rlix.node.devices import usable
from rlix.protocol.errors import SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, DeviceKind
from rlix.protocol.types import Phase
from rlix.workers.counts import is_count
from rlix.workers.group import START_TIMEOUT_S
from rlix.workers.launch import DEFAULT_TIMEOUT_S
from rlix.workers.placement import place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: ranks, items of a whole call, and how often, of which the median counts."""

    widths: Sequence[int]
    batches: Sequence[int]
    repeats: int = 3

    def __post_init__(self) -> None:
        lists = isinstance(self.widths, Sequence) and isinstance(self.batches, Sequence)
        if not (lists and self.widths and self.batches) or not all(
            map(is_count, (*self.widths, *self.batches, self.repeats))
        ):
            raise SpecError(f"{self}: needs one width or more and one batch or more, all whole numbers from 1 on")


def profile(
    flow: Wiring,
    devices: Sequence[Device],
    grid: Grid,
    *,
    job: Program | None = None,
    cluster: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Profile:
    """Run every part alone on each width that the devices allow and on each batch size.

    Items come from `flow.sample`; what a part makes of the largest batch is what the next one is measured with.
    `job`: whose gang `cluster` has these devices. For each width of a part it asks for those that this needs, behind
    every other gang, and gives them back. `timeout_s`: for each call of a part, and for it to start, which has three
    minutes at least.

    Raises:
        SpecError: a part, which is named, can be measured on none of the devices, or with none of the batches.
        WorkerError: a part raised or died.
        WaitTimeoutError: a part, which is named with its ranks, did not answer within `timeout_s`.
    """
    made: dict[str, Pieces] = {}
    largest = max(grid.batches)
    source = list(flow.sample(largest))
    first: Pieces = [(ray.put(Items(source)), 0, len(source))]
    parts, rooms = {}, list[float]()
    pool = _Pool(tuple(devices), job, cluster)
    for part in flow.parts:
        inputs = [made[name] for name in flow.before(part.name)] or [first]
        with _said(flow, part):
            parts[part.name], made[part.name] = _measure(part, inputs, pool, grid, timeout_s, rooms)
        logger.info("profiled %s", part.name)
    room = min(rooms)
    if room < inf and any(device.kind is DeviceKind.CUDA for device in devices):
        room = usable(int(room), sum(not part.cpu_ranks for part in flow.parts))  # all processes stay
    return Profile(flow.name, machine(), parts, device_bytes=room)


@contextlib.contextmanager
def _said(flow: Wiring, part: Part) -> Iterator[None]:
    """What a part raises says that it was measured, and with what it may not be used to."""
    try:
        yield
    except (WorkerError, WaitTimeoutError) as error:
        once = any({part.name, *flow.before(part.name)} & set(circle.parts) for circle in flow.circles)
        items = ", with items that went round once" if once else ""
        error.args = (f"flow {flow.name}, while it is measured{items}: {error}",)
        raise


@dataclass(frozen=True, slots=True)
class _Pool:
    devices: tuple[Device, ...]
    job: Program | None
    cluster: str

    @contextlib.contextmanager
    def held(self, group: Ranks, count: int) -> Iterator[None]:
        """The group has the first `count` devices, for as long as one slice of the measurements takes."""
        if self.job is None or not count:
            yield
            return
        job, cluster = self.job, self.cluster

        def named() -> None:
            job.name_holders(cluster, dict(enumerate(group.processes.values())))

        if isinstance(group, LocalGroup):
            group.worker.named = named
        named()
        mine = [device.id for device in self.devices[:count]]
        lease = self.job.client.acquire(self.cluster, Phase.VALUE_COMPUTE, devices=mine)
        group.lease = self.job.client.fence(lease)
        try:
            yield
        except BaseException:  # raised again, when nothing of the group is there any more
            group.close()
            raise
        finally:
            self.job.client.release(lease)


def _measure(
    part: Part, inputs: list[Pieces], pool: _Pool, grid: Grid, timeout_s: float, rooms: list[float]
) -> tuple[PartProfile, Pieces]:
    largest = max(grid.batches)
    most = part.ranks(len(pool.devices), largest)
    widths = [most] if part.cpu_ranks else sorted({min(width, most) for width in grid.widths})
    points, loads, offloads = [], [], []
    kept: Pieces = []
    for width in widths:
        made: Pieces = []
        used = 0 if part.cpu_ranks else width * part.unit
        with contextlib.ExitStack() as until_measured:
            group = until_measured.enter_context(start(part, width, pool.devices, timeout_s=timeout_s))
            if isinstance(group, LocalGroup):
                group.worker.measured = True
                with pool.held(group, used):  # an engine does not come back under a lease that it has left
                    group.onload()  # the first time, it may be built
                    group.offload()
            until_measured.enter_context(pool.held(group, used))
            rooms += group.ask("room")
            loads.append(_timed(group.onload))
            resident = max(now for now, _ in _memory(group, part))
            for batch in sorted(grid.batches):
                given = [cut(pieces, 0, batch) for pieces in inputs]
                if batch < width or batch % (part.chunk or largest) or any(size(pieces) < batch for pieces in given):
                    continue
                if not made:
                    _once(group, part, given)  # the first call warms up
                seconds, made = _repeat(group, part, given, grid.repeats)
                peak = max(peak for _, peak in _memory(group, part))
                points.append(Point(width, batch, seconds, peak, resident))
            kept = made or kept
            offloads.append(_timed(group.offload))
    if not points:
        there = min(size(pieces) for pieces in inputs)
        raise SpecError(
            f"profile: {part.name} takes multiples of {part.chunk or largest} item(s), at least one for each rank, "
            f"and there are {there}: of widths {widths} and batches {list(grid.batches)} nothing is left"
        )
    return PartProfile(tuple(points), median(loads), median(offloads), part.measured), kept


def start(
    part: Part,
    ranks: int,
    devices: Sequence[Device],
    first: int = 0,
    name: str = "",
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Ranks:
    """The part's group on devices from number `first` on.

    `timeout_s`: of each of its calls, and, if it is longer than what any group has for that, until it is there.
    """
    own = [[first + i * part.unit + j for j in range(part.unit)] for i in range(ranks)]
    placement: list[list[int]] = [[]] * ranks if part.cpu_ranks else own
    kwargs, name = dict(part.kwargs), name or part.name
    if issubclass(part.worker, LocalWorker):
        mine = [devices[number] for numbers in own for number in numbers]
        return LocalGroup(part.worker(**kwargs), mine, name, timeout_s)
    limit = max(timeout_s, START_TIMEOUT_S)  # a pool that is cold starts processes slowly, whatever they are asked then
    return PartGroup(
        part.worker,
        name=name,
        placements=place(placement, devices),
        kwargs=kwargs,
        timeout_s=timeout_s,
        start_timeout_s=limit,
    )


def _memory(group: Ranks, part: Part) -> list[tuple[float, float]]:
    """Of each rank, as `FlowWorker.memory` says."""
    found = group.ask("memory")
    for said in found:
        if not (isinstance(said, tuple | list) and len(said) == 2 and all(isinstance(n, Real) for n in said)):
            raise SpecError(
                f"profile: {part.name}: memory() returned {said!r}; it returns two numbers, bytes on the fullest "
                "device now and at most"
            )
    return found


def _repeat(group: Ranks, part: Part, inputs: list[Pieces], repeats: int) -> tuple[float, Pieces]:
    runs = [_once(group, part, inputs) for _ in range(repeats)]
    return median(seconds for seconds, _ in runs), runs[-1][1]


def _once(group: Ranks, part: Part, inputs: list[Pieces]) -> tuple[float, Pieces]:
    began = time.monotonic()
    if part.each is not None:
        made = spread_batch(group, part.method, part.each, inputs)
        return time.monotonic() - began, made
    refs, call = group.part(part.method, shard(inputs, group.world_size))
    counts = group.counts(call)
    took = time.monotonic() - began
    return took, [(ref, 0, count) for ref, count in zip(refs, counts, strict=True) if count]


def _timed(action: Any) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began
