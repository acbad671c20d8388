"""Running a flow with workers that are plain objects: what follows from drift, and that every mode makes the same."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray

from rlix.flow.planner import Mode, Point
from rlix.flow.profiler import measure as measure_module
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.flow.programs import running as running_module
from rlix.flow.programs.drift import WINDOW
from rlix.flow.programs.flow import Circle, Flow, Part
from rlix.flow.programs.pieces import Pieces
from rlix.flow.programs.running import Running
from rlix.flow.programs.segment import SegmentRun
from rlix.flow.workers import launch
from rlix.flow.workers.flow_worker import FlowWorker
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, DeviceKind
from rlix.protocol.types import Phase

ITEMS, DEVICES = 16, 4
START = measure_module.start
POOL = [Device(i, "here", "::1", i, DeviceKind.CPU) for i in range(DEVICES)]


class Adds(FlowWorker):
    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def add(self, items: list[int]) -> list[int]:
        self.calls += 1
        return [item + self.number for item in items]

    def short(self, items: list[int]) -> list[int]:
        return items[1:]

    def memory(self) -> tuple[float, float]:
        return 1.0, 2.0

    def save(self) -> int:
        return self.calls

    def restore(self, state: int) -> None:
        self.calls = state


class Joins(FlowWorker):
    def pairs(self, pairs: list[Any]) -> list[Any]:
        return pairs

    def join(self, pairs: list[tuple[int, int]]) -> list[int]:
        return [1000 * first + second for first, second in pairs]


class Group:
    """As `rlix.flow.workers.launch.Group`, of objects in this process."""

    def __init__(self, part: Part, ranks: int, first: int, name: str) -> None:
        self.name, self.first = name, first
        self.members = [part.worker(**part.kwargs) for _ in range(ranks)]
        self.workers = SimpleNamespace(world_size=ranks, processes={})
        self.lease = None

    def call(self, method: str, *args: Any) -> Any:
        return SimpleNamespace(wait=lambda *_: [getattr(member, method)(*args) for member in self.members])

    def on(self, rank: int) -> Any:
        return SimpleNamespace(
            call=lambda method: SimpleNamespace(wait=lambda *_: [getattr(self.members[rank], method)()])
        )

    def part(self, method: str, inputs: Sequence[Sequence[Pieces]]) -> tuple[list[Any], Any]:
        made = [member._rlix_part(method, lists)[0] for member, lists in zip(self.members, inputs, strict=True)]
        return made, SimpleNamespace(wait=lambda *_: [len(m) for m in made])

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(part: Part, ranks: int, _: Sequence[Device], first: int = 0, name: str = "", **__: float) -> Group:
        return Group(part, ranks, first, name)

    for module in (running_module, measure_module):
        monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    yield


def flow(**first: Any) -> Flow:
    parts = [
        Part("ones", Adds, "add", kwargs={"number": 1}, **first),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}),
        Part("more", Adds, "add", ("tens",), kwargs={"number": 100}),
    ]
    return Flow("sums", parts, ITEMS)


def profile(**each: float) -> Profile:
    parts = {
        name: PartProfile(tuple(Point(w, w * load, 0.01 + each[name] * load) for w in (1, 4) for load in (1, 4, 16)))
        for name in each
    }
    return Profile("sums", "here", parts)


@pytest.mark.parametrize("mode", [*Mode, "auto"])
def test_every_mode_makes_the_same(mode: Mode | str) -> None:
    with Running(flow(), POOL, plan=mode, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        if isinstance(mode, Mode):
            assert running.plan.mode is mode
        for chunk in (None, 5, 1):
            for segment in range(len(running.plan.segments)):
                if chunk is not None:
                    running.set_chunk(chunk, segment)
            assert running.step(list(range(ITEMS))) == [n + 111 for n in range(ITEMS)]


@pytest.mark.parametrize("mode", Mode)
def test_a_part_after_two_others_gets_one_item_of_each(mode: Mode) -> None:
    parts = [
        Part("ones", Adds, "add", kwargs={"number": 1}),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}),
        Part("more", Joins, "join", ("ones", "tens")),
    ]
    known = profile(ones=0.1, tens=0.2, more=0.3)
    with Running(Flow("sums", parts, ITEMS), POOL, plan=mode, profile=known) as running:
        for chunk in (None, 5):
            for segment in range(len(running.plan.segments)):
                if chunk is not None:
                    running.set_chunk(chunk, segment)
            assert running.step(list(range(ITEMS))) == [1000 * (n + 1) + n + 11 for n in range(ITEMS)]


def test_parts_get_multiples_of_their_chunk_only() -> None:
    with Running(flow(chunk=4), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        with pytest.raises(ValueError, match="a chunk of segment 0 is a multiple of 4 item"):
            running.set_chunk(6)
        with pytest.raises(ValueError, match="a chunk of segment 0 is a multiple of 4 item"):
            running.set_chunk(8.0)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="sums: ones takes multiples of 4 items, not 15"):
            running.step([0] * 15)
        running.set_chunk(8)
        assert running.step([0] * ITEMS) == [111] * ITEMS


class Pool:
    """As a job of the pool: what is asked for and given back, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.client = self

    def acquire(self, cluster: str, phase: Phase, *, devices: Sequence[int], giving: Sequence[Any]) -> Any:
        self.said.append(f"{cluster}: {list(devices)} for {[lease.devices for lease in giving]}")
        return SimpleNamespace(devices=list(devices))

    def release(self, *leases: Any) -> None:
        self.said.append(f"back: {[lease.devices for lease in leases]}")

    def fence(self, lease: Any) -> Any:
        return lease

    def name_holders(self, cluster: str, processes: Any) -> None: ...


def test_a_segment_holds_the_devices_that_it_uses_and_passes_them_on_without_a_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One question between two segments; nobody is asked for more devices than work, and nobody for none."""
    job: Any = Pool()
    for move in ("onload", "offload"):
        monkeypatch.setattr(Group, move, lambda group, move=move: job.said.append(f"{group.name} {move}"))
    parts = [
        Part("ones", Adds, "add", kwargs={"number": 1}),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}, most=1),
        Part("more", Adds, "add", ("tens",), kwargs={"number": 100}, cpu_ranks=2),
    ]
    known = profile(ones=0.1, tens=0.2, more=0.3)
    sums = Flow("sums", parts, ITEMS)
    with Running(sums, POOL, plan=Mode.COLLOCATED, profile=known, job=job, cluster="gang") as running:
        assert running.step(list(range(ITEMS))) == [n + 111 for n in range(ITEMS)]
    assert job.said == [
        "gang: [0, 1, 2, 3] for []",
        "sums/ones onload",
        "sums/ones offload",
        "gang: [0] for [[0, 1, 2, 3]]",
        "sums/tens onload",
        "sums/tens offload",
        "back: [[0]]",
        "sums/more onload",
        "sums/more offload",
    ]


def test_what_drifts_is_planned_anew_and_goes_on_from_what_it_saved() -> None:
    """A part that can use one device only becomes slow: from then on it works beside the others."""
    with Running(flow(most=1), POOL, profile=profile(ones=0.02, tens=0.2, more=0.2)) as running:
        running.step([0] * ITEMS)
        before = running.plan
        calls = {name: group.members[0].calls for name, group in running.groups.items()}  # type: ignore[attr-defined]
        running._drift = type(running._drift).of(before)
        sizes = {part.name: (segment.chunk, part.seconds) for segment in before.segments
                 for stage in segment.stages for part in stage.parts}  # fmt: skip
        for _ in range(WINDOW):
            running._drift.saw({n: [(c, s * (8 if n == "ones" else 1))] for n, (c, s) in sizes.items()})
        running._look_for_drift()
        assert running.replanned == 1
        assert running.plan.shape != before.shape
        assert running.plan.mode is not Mode.COLLOCATED
        assert running.profile is not None
        assert running.profile.parts["ones"].points[0].seconds == pytest.approx(8 * 0.03)
        assert {n: g.members[0].calls for n, g in running.groups.items()} == calls  # type: ignore[attr-defined]
        assert running.step([0] * ITEMS) == [111] * ITEMS


def test_parts_that_died_go_on_from_what_was_kept() -> None:
    with Running(flow(), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        running.step([0] * ITEMS)
        running.keep()
        kept = {name: group.members[0].calls for name, group in running.groups.items()}  # type: ignore[attr-defined]
        running.step([0] * ITEMS)
        groups = dict(running.groups)
        running.restart("tens")
        assert running.groups["tens"] is not groups["tens"]
        assert running.groups["ones"] is groups["ones"]
        calls = {name: group.members[0].calls for name, group in running.groups.items()}  # type: ignore[attr-defined]
        assert calls == {name: 2 * count if name != "tens" else count for name, count in kept.items()}
        running.restart()
        calls = {name: group.members[0].calls for name, group in running.groups.items()}  # type: ignore[attr-defined]
        assert calls == kept
        assert running.step([0] * ITEMS) == [111] * ITEMS


def test_a_part_that_moves_without_what_it_has_learnt_says_so(caplog: pytest.LogCaptureFixture) -> None:
    parts = [Part("ones", Joins, "pairs"), Part("tens", Adds, "add", ("ones",), kwargs={"number": 10})]
    known, sums = profile(ones=0.1, tens=0.1), Flow("sums", parts, ITEMS)
    apart = sums.plan(known, DEVICES, mode=Mode.DISAGGREGATED).best
    with Running(sums, POOL, plan=Mode.COLLOCATED, profile=known) as running:
        running.switch(apart)
        assert running.step([0] * ITEMS) == [10] * ITEMS
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "sums: ones moves and begins anew, for its class has no `save`"
    ]


def test_a_part_that_loses_items_is_an_error() -> None:
    parts = [Part("ones", Adds, "short", kwargs={"number": 1}), Part("tens", Adds, "add", ("ones",), {"number": 1})]
    known = profile(ones=0.1, tens=0.1)
    with (
        Running(Flow("sums", parts, ITEMS), POOL, plan=Mode.DISAGGREGATED, profile=known) as running,
        pytest.raises(WorkerError, match=r"ones made \d+ items of \d+"),
    ):
        running.step([0] * ITEMS)
    with pytest.raises(ValueError, match="needs a profile"):
        Running(flow(), POOL)


def test_parts_are_measured_with_whole_batches_of_what_there_is() -> None:
    parts = [
        Part("ones", Adds, "add", kwargs={"number": 1}, chunk=4),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}),
    ]
    grid = measure_module.Grid(widths=(1, 2), batches=(8, 4, 2, 10), repeats=1)
    flow = Flow("measured", parts, ITEMS, sample=lambda count: list(range(count)))
    known = measure_module.profile(flow, POOL, grid)
    assert [(p.width, p.items) for p in known.parts["ones"].points] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert {p.items for p in known.parts["tens"].points} == {2, 4, 8}  # of 10, 8 were made
    with pytest.raises(SpecError, match=r"ones runs on at most 4 rank\(s\) here, and the grid has \[8\]"):
        measure_module.profile(flow, POOL, measure_module.Grid((8,), (8,)))
    with pytest.raises(SpecError, match="ones takes multiples of 4 item"):
        measure_module.profile(flow, POOL, measure_module.Grid((1,), (2,)))


def test_a_part_that_hangs_while_it_is_measured_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def results(method: str, refs: list[Any], *, timeout_s: float, ranks: Any) -> list[Any]:
        waits.append(timeout_s)
        if method == "add":
            raise WaitTimeoutError("ones: rank(s) 0 did not answer add()")
        return [(0.0, 0.0)]

    workers: Any = SimpleNamespace(
        call=lambda *_, **__: [],
        results=results,
        check_usable=lambda _: None,
        handles=(MagicMock(),),
        world_size=1,
        close=lambda: None,
    )
    group = launch.Group(workers)

    def launched(*_: object, start_timeout_s: float, **__: object) -> launch.Group:
        waits.append(start_timeout_s)
        return group

    monkeypatch.setattr(measure_module, "launch", launched)
    monkeypatch.setattr(measure_module, "start", START)
    flow = Flow("sums", [Part("ones", Adds, "add", kwargs={"number": 1})], ITEMS, lambda count: [0] * count)
    with pytest.raises(WaitTimeoutError, match="ones: rank"):
        measure_module.profile(flow, POOL, measure_module.Grid((1,), (4,)), timeout_s=0.5)
    assert waits == [0.5] * 4  # its start, its onload, its memory, and itself
    part = launch.Group(workers, timeout_s=0.25).on(0)
    part.memory().wait()
    part.memory().wait(2.0)
    assert waits[4:] == [0.25, 2.0]


def test_what_handing_items_on_takes_is_measured_with_the_part_that_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def get(refs: list[list[int]], timeout: float | None = None) -> list[list[int]]:
        now[0] += 0.5 * sum(map(len, refs))
        return refs

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(measure_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = [Part("ones", Adds, "add", kwargs={"number": 1}), Part("tens", Adds, "add", ("ones",), {"number": 10})]
    known = measure_module.profile(
        Flow("sums", parts, 4, lambda n: [0] * n), POOL, measure_module.Grid((1,), (4,), repeats=1)
    )
    assert [known.parts[name].points[0].seconds for name in ("ones", "tens")] == [2.0, 2.0]


def test_a_rank_that_computes_is_not_brought_off() -> None:
    """When another rank has failed, the turn is over, and its peers may be at it still."""
    began, may_end, order = threading.Event(), threading.Event(), []

    class Slow(FlowWorker):
        def work(self, items: list[int]) -> list[int]:
            began.set()
            assert may_end.wait(60)
            order.append("worked")
            return items

        def offload(self) -> None:
            order.append("left")

    worker = Slow()
    locks = SimpleNamespace(acquire=lambda *_: None, release=lambda: order.append("unlocked"))
    worker.ctx = SimpleNamespace(device_locks=lambda: locks, fence=lambda lease: lease)  # type: ignore[assignment]
    worker._rlix_onload(None)
    with ThreadPoolExecutor(2) as threads:
        part = threads.submit(worker._rlix_part, "work", [[]])
        assert began.wait(60)
        gone = threads.submit(worker._rlix_offload)
        assert order == []
        may_end.set()
        assert part.result(60) == ([], 0)
        gone.result(60)
    assert order == ["worked", "left", "unlocked"]


def test_what_went_wrong_first_is_what_a_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise WorkerError("rank 1 died")

    job: Any = Pool()
    known = profile(ones=0.1, tens=0.1, more=0.1)
    with Running(flow(), POOL, profile=known, job=job, cluster="gang") as running:
        monkeypatch.setattr(Group, "part", fails)
        monkeypatch.setattr(Group, "offload", lambda _: (_ for _ in ()).throw(WaitTimeoutError("does not leave")))
        with pytest.raises(WorkerError, match="rank 1 died"):
            running.step(list(range(ITEMS)))
    assert job.said == ["gang: [0, 1, 2, 3] for []", "back: [[0, 1, 2, 3]]"]


def test_what_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed = running_module.start, []

    def start(part: Part, *args: Any, **kwargs: Any) -> Group:
        if part.name == "more":
            raise WorkerError("no room for it")
        return begun(part, *args, **kwargs)  # type: ignore[return-value]

    monkeypatch.setattr(running_module, "start", start)
    monkeypatch.setattr(Group, "close", lambda group: closed.append(group.name))
    with pytest.raises(WorkerError, match="no room"):
        Running(flow(), POOL, profile=profile(ones=0.1, tens=0.1, more=0.1))
    assert closed == ["sums/ones", "sums/tens"]


class Walks(FlowWorker):
    """A policy that adds, or a world that doubles; what happened is in the item."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def go(self, items: list[tuple[int, str]]) -> list[tuple[int, str]]:
        return [(n + 1 if self.kind == "a" else 2 * n, said + self.kind) for n, said in items]

    def short(self, items: list[tuple[int, str]]) -> list[tuple[int, str]]:
        return items[len(items) // 2 :]


def circular(**more: Any) -> Flow:
    parts = [
        Part("begin", Joins, "pairs"),
        Part("act", Walks, "go", ("begin",), kwargs={"kind": "a"}),
        Part("world", Walks, "go", ("act",), kwargs={"kind": "w"}, **more),
        Part("both", Joins, "pairs", ("begin", "world")),
    ]
    return Flow("sums", parts, ITEMS, circles=[Circle(("act", "world"), 3)])


@pytest.mark.parametrize("cpu_ranks", [0, 2])
def test_a_circle_goes_round_as_often_as_it_says(cpu_ranks: int) -> None:
    known = profile(begin=0.1, act=0.2, world=0.2, both=0.1)
    with Running(circular(cpu_ranks=cpu_ranks), POOL, plan="auto", profile=known) as running:
        (loop,) = [loop for segment in running.plan.segments for stage in segment.stages for loop in stage.loops]
        assert (loop.parts, loop.rounds, loop.slices > 1) == (("act", "world"), 3, cpu_ranks > 0)
        begin = [(n, "") for n in range(ITEMS)]
        expected = [((n, ""), (8 * n + 14, "awawaw")) for n in range(ITEMS)]
        for chunk in (None, 5, 1):  # fives are not cut in slices
            for segment in range(len(running.plan.segments)):
                if chunk is not None:
                    running.set_chunk(chunk, segment)
            assert running.step(begin) == expected


class Uneven(FlowWorker):
    """A policy that loses an item of all slices but the first, whose world waits until that is known."""

    known = threading.Event()

    def act(self, items: list[int]) -> list[int]:
        return items[items[0] > 0 :]

    def world(self, items: list[int]) -> list[int]:
        if not self.known.wait(60):
            raise WaitTimeoutError("nobody stopped the first slice")
        return items


def test_a_slice_that_fails_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: SegmentRun, error: BaseException) -> None:
        stop(run, error)
        Uneven.known.set()

    stop = SegmentRun.fail
    monkeypatch.setattr(SegmentRun, "fail", fail)
    parts = [Part("act", Uneven, "act", most=1), Part("world", Uneven, "world", ("act",), cpu_ranks=2)]
    flow = Flow("sums", parts, ITEMS, circles=[Circle(("act", "world"), 3)])
    with Running(flow, POOL, plan="auto", profile=profile(act=0.2, world=0.2)) as running:
        (loop,) = running.plan.segments[0].stages[0].loops
        assert loop.slices > 1
        with pytest.raises(WorkerError, match=r"act made \d items of \d"):
            running.step(list(range(ITEMS)))


def test_what_makes_no_sense_is_refused_before_anybody_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("nobody should start")

    monkeypatch.setattr(running_module, "start", start)
    known = profile(ones=0.1, tens=0.2, more=0.3)
    plan = flow().plan(known, DEVICES).best
    with pytest.raises(SpecError, match="plan='fast' must be auto, collocated, disaggregated, hybrid, or a plan"):
        Running(flow(), POOL, plan="fast", profile=known)
    with pytest.raises(SpecError, match="`job` and `cluster`, its gang of these devices, go together"):
        Running(flow(), POOL, profile=known, cluster="flow")
    with pytest.raises(SpecError, match=r"the plan is for 4 device\(s\), and there are 2"):
        Running(flow(), POOL[:2], plan=plan)
    endless = replace(plan, segments=(replace(plan.segments[0], chunk=0), *plan.segments[1:]))
    with pytest.raises(SpecError, match=r"chunks of 0 items, and its parts take multiples of 1"):
        Running(flow(), POOL, plan=endless)
    other = Flow("f", [Part("ones", Adds, "add", kwargs={"number": 1})], ITEMS)
    with pytest.raises(SpecError, match=r"of parts \['more', 'ones', 'tens'\], and the flow has \['ones'\]"):
        Running(other, POOL, plan=plan)


def test_nobody_goes_on_with_what_is_closed() -> None:
    with Running(flow(), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        with pytest.raises(SpecError, match="flow sums has no part hundreds"):
            running.restart("hundreds")
        with pytest.raises(ValueError, match="the plan has segments 0 to"):
            running.set_chunk(4, -1)
        with running._stepping, pytest.raises(RlixError, match="a step is running in another thread"):
            running.step([0] * ITEMS)
        assert running.step([0] * ITEMS) == [111] * ITEMS
        assert running.planned is not None
        running.switch(running.planned.others[0])
        assert running.explain() == running.planned.others[0].explain()  # what runs, and not what was planned
    again = (lambda: running.step([]), running.keep, running.restart, lambda: running.switch(running.plan))
    for call in again:
        with pytest.raises(RlixError, match="flow sums is closed"):
            call()
    assert running.groups == {}
