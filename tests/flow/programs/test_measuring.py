"""Measuring parts whose workers are plain objects: with which batches, how long, and what counts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray

from rlix.flow.parts.part_group import PartGroup
from rlix.flow.profiler import measure as measure_module
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.wiring import Circle, Part
from rlix.protocol.errors import SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import DeviceKind
from rlix.workers.group import START_TIMEOUT_S, WorkerGroup
from tests.flow.programs.pretended import ITEMS, POOL, Adds

pytestmark = pytest.mark.usefixtures("no_ray")
START = measure_module.start


def test_parts_are_measured_with_whole_batches_of_what_there_is() -> None:
    parts = [
        Part("ones", Adds, "add", kwargs={"number": 1}, chunk=4),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}),
    ]
    grid = measure_module.Grid(widths=(1, 2), batches=(8, 4, 2, 10), repeats=1)
    flow = Flow("measured", parts, ITEMS, sample=lambda count: list(range(count)))
    known = measure_module.profile(flow, POOL, grid)
    assert known.parts["ones"].measured == "Adds.add on ranks of 1 device(s)"
    assert known.device_bytes == 80.0
    assert [(p.width, p.items) for p in known.parts["ones"].points] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert {p.items for p in known.parts["tens"].points} == {2, 4, 8}  # of 10, 8 were made
    wide = measure_module.profile(flow, POOL, measure_module.Grid((8,), (8,)))
    assert {p.width for p in wide.parts["ones"].points} == {2}  # 8 items are 2 chunks
    with pytest.raises(SpecError, match="ones takes multiples of 4 item"):
        measure_module.profile(flow, POOL, measure_module.Grid((1,), (2,)))


@pytest.mark.parametrize(("kind", "room"), [(DeviceKind.CPU, 80.0 * 2**30), (DeviceKind.CUDA, 76.0 * 2**30)])
def test_of_a_gpu_plans_have_what_the_processes_of_all_parts_leave(kind: DeviceKind, room: float) -> None:
    big = type("Big", (Adds,), {"room": lambda _: 80.0 * 2**30})
    parts = [Part("ones", big, "add", kwargs={"number": 1}), Part("tens", Adds, "add", kwargs={"number": 1})]
    parts += [Part("cpu", Adds, "add", kwargs={"number": 1}, cpu_ranks=1)]
    pool = [replace(device, kind=kind) for device in POOL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adds, "room", lambda _: float("inf"))
        flow = Flow("sums", parts, 4, lambda n: [0] * n)
        assert measure_module.profile(flow, pool, measure_module.Grid((1,), (4,), repeats=1)).device_bytes == room


@pytest.mark.parametrize("said", ["much", None, (1.0,), ("now", "peak")])
def test_a_part_that_says_no_memory_is_named(said: object) -> None:
    worker = type("Says", (Adds,), {"memory": lambda _: said})
    flow = Flow("sums", [Part("ones", worker, "add", kwargs={"number": 1})], 4, lambda n: [0] * n)
    with pytest.raises(SpecError, match=r"profile: ones: memory\(\) returned .*; it returns two numbers"):
        measure_module.profile(flow, POOL, measure_module.Grid((1,), (4,), repeats=1))


def test_a_part_that_hangs_while_it_is_measured_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def started(group: Any, worker_cls: type, *, start_timeout_s: float, **how: Any) -> None:
        waits.append(start_timeout_s)
        group.name, group.worker_cls, group.placements, group.lost = how["name"], worker_cls, how["placements"], {0}

    def wait(_: object, method: str, ranks: Any, futures: list[Any], timeout_s: float) -> list[Any]:
        waits.append(timeout_s)
        if method == "add":
            raise WaitTimeoutError("ones: rank(s) 0 did not answer add()")
        return [(0.0, 0.0)]

    fakes = {"__init__": started, "_wait": wait, "submit": lambda *_, **__: [], "close": lambda _: None}
    fakes |= {"check_usable": lambda *_: None, "handles": (MagicMock(),)}
    for name, fake in fakes.items():
        monkeypatch.setattr(WorkerGroup, name, fake)
    monkeypatch.setattr(PartGroup, "_note", lambda _, call: call)
    monkeypatch.setattr(measure_module, "start", START)
    flow = Flow("sums", [Part("ones", Adds, "add", kwargs={"number": 1})], ITEMS, lambda count: [0] * count)
    with pytest.raises(WaitTimeoutError, match="ones: rank"):
        measure_module.profile(flow, POOL, measure_module.Grid((1,), (4,)), timeout_s=0.5)
    assert waits == [START_TIMEOUT_S, *[0.5] * 5]  # its start, twice, its room, its onload, its memory, and itself


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


@pytest.mark.parametrize("rounds", [0, 3])
def test_what_a_part_raises_while_it_is_measured_says_so(rounds: int) -> None:
    """And that the items went round its circle once, if there is one."""

    class Wants(Adds):
        def add(self, items: list[int]) -> list[int]:
            raise WorkerError("too few rounds")

    parts = [Part(name, Adds, "add", kwargs={"number": 1}) for name in ("act", "world")]
    parts.append(Part("judge", Wants, "add", kwargs={"number": 1}))
    circles = [Circle(("act", "world"), rounds)] if rounds else []
    flow = Flow("sums", parts, 4, lambda n: [0] * n, circles)
    what = ", with items that went round once" if rounds else ""
    with pytest.raises(WorkerError, match=f"^flow sums, while it is measured{what}: too few rounds$"):
        measure_module.profile(flow, POOL, measure_module.Grid((1,), (4,), repeats=1))
