"""Running a flow with workers that are plain objects: what follows from drift, and that every mode makes the same."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Mode, Point
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.flow.programs import running as running_module
from rlix.flow.programs.drift import WINDOW
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Part
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Cluster, Registration
from rlix.protocol.types import Phase
from tests.flow.programs.pretended import DEVICES, ITEMS, POOL, Adds, Group, Joins, Keeps, chunked, flow, profile

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.mark.parametrize("first", [{}, {"each": 3}])
@pytest.mark.parametrize("mode", [*Mode, "auto"])
def test_every_mode_makes_the_same(mode: Mode | str, first: dict[str, Any]) -> None:
    with Running(flow(**first), POOL, plan=mode, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        if isinstance(mode, Mode):
            assert running.plan.mode is mode
        for chunk in (None, 5, 1):
            if chunk is not None:
                running.switch(chunked(running.plan, chunk))
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
            if chunk is not None:
                running.switch(chunked(running.plan, chunk))
            assert running.step(list(range(ITEMS))) == [1000 * (n + 1) + n + 11 for n in range(ITEMS)]


def test_parts_get_multiples_of_their_chunk_only() -> None:
    with Running(flow(chunk=4), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        for wrong in (6, 8.0):
            with pytest.raises(SpecError, match=f"has chunks of {wrong} items, and its parts take multiples of 4"):
                running.switch(chunked(running.plan, wrong))  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="sums: ones takes multiples of 4 items, not 15"):
            running.step([0] * 15)
        running.switch(chunked(running.plan, 8))
        assert running.step([0] * ITEMS) == [111] * ITEMS


class Pool:
    """As a job of the pool: what is asked for and given back, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.client = self

    def registration(self) -> Registration:
        return Registration("job_1", "mine", (Cluster("gang", 1, tuple(range(DEVICES))),), "mine")

    def acquire(self, cluster: str, phase: Phase, *, devices: Sequence[int], giving: Sequence[Any]) -> Any:
        self.said.append(f"{cluster}: {list(devices)} for {[lease.devices for lease in giving]}")
        return SimpleNamespace(devices=list(devices))

    def release(self, *leases: Any) -> None:
        self.said.append(f"back: {[lease.devices for lease in leases]}")

    def give_back(self, lease: Any, devices: Sequence[int]) -> Any:
        self.said.append(f"back early: {list(devices)}")
        return SimpleNamespace(devices=[device for device in lease.devices if device not in devices])

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


class Gates(Pool):
    """Opens one after the other when something was given back."""

    def __init__(self, *gates: threading.Event) -> None:
        super().__init__()
        self.gates = list(gates)

    def release(self, *leases: Any) -> None:
        super().release(*leases)
        self.gates.pop().set()

    def give_back(self, lease: Any, devices: Sequence[int]) -> Any:
        left = super().give_back(lease, devices)
        self.gates.pop().set()
        return left


@pytest.mark.parametrize("seconds", [10.0, 0.01])
def test_a_stage_that_has_ended_gives_its_devices_back_unless_the_others_end_soon(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Every stage begins when what the one before it had is back; the last one needs no device."""
    begins = {name: threading.Event() for name in ("sums/ones", "sums/tens", "sums/more")}
    job: Any = Gates(*reversed(begins.values()))
    part, said = Group.part, job.said
    job.gates.pop().set()
    if seconds < 1:  # nobody gives anything back
        for begin in begins.values():
            begin.set()

    def late(group: Group, *args: Any) -> Any:
        assert begins[group.name].wait(300)
        return part(group, *args)

    monkeypatch.setattr(Group, "part", late)
    monkeypatch.setattr(Group, "offload", lambda group: said.append(f"{group.name} leaves"))
    parts = [
        Part("ones", Adds, "add", kwargs={"number": 1}),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}),
        Part("more", Adds, "add", ("tens",), kwargs={"number": 100}, cpu_ranks=2),
    ]
    known = profile(ones=seconds, tens=seconds, more=seconds)
    apart = Flow("sums", parts, ITEMS).plan(known, 2, mode=Mode.DISAGGREGATED).best
    with Running(Flow("sums", parts, ITEMS), POOL[:2], plan=chunked(apart, ITEMS), job=job, cluster="gang") as running:
        assert running.step(list(range(ITEMS))) == [n + 111 for n in range(ITEMS)]
    if seconds < 1:
        assert [line for line in said if "leaves" not in line] == ["gang: [0, 1] for []", "back: [[0, 1]]"]
    else:
        gone = ["sums/ones leaves", "back early: [0]", "sums/tens leaves", "back: [[1]]", "sums/more leaves"]
        assert said == ["gang: [0, 1] for []", *gone]


def drifted(running: Running, **factors: float) -> None:
    """As if parts had taken so many times as long as planned in the last steps; a part that is not named: once."""
    running._drift = type(running._drift).of(running.plan, running._drift.answered[:-1])
    planned = {part.name: (segment.chunk, part.seconds) for segment in running.plan.segments
               for stage in segment.stages for part in stage.parts}  # fmt: skip
    for _ in range(WINDOW):
        running._drift.saw({name: [(size, s * factors.get(name, 1.0))] for name, (size, s) in planned.items()})


def test_what_drifts_is_planned_anew_and_goes_on_from_what_it_saved() -> None:
    """A part that can use one device only becomes slow: from then on it works beside the others."""
    with Running(flow(most=1), POOL, profile=profile(ones=0.02, tens=0.2, more=0.2)) as running:
        running.step([0] * ITEMS)
        before = running.plan
        calls = {name: group.members[0].calls for name, group in running.groups.items()}  # type: ignore[attr-defined]
        drifted(running, ones=8.0)
        running._look_for_drift()
        assert running.replanned == 1
        assert running.plan.shape != before.shape
        assert running.plan.mode is not Mode.COLLOCATED
        assert running.profile is not None
        assert running.profile.parts["ones"].points[0].seconds == pytest.approx(8 * 0.03)
        assert {n: g.members[0].calls for n, g in running.groups.items()} == calls  # type: ignore[attr-defined]
        assert running.step([0] * ITEMS) == [111] * ITEMS


def test_nobody_starts_anew_for_a_plan_with_other_chunks() -> None:
    """Two parts beside each other, of which one costs by the call: when that is cheap, smaller chunks are faster."""
    parts = [Part(name, Adds, "add", kwargs={"number": 1}, most=1) for name in ("ones", "tens")]
    costs = {"ones": (0.001, 0.1), "tens": (1.0, 0.1)}
    known = Profile("sums", "here", {
        name: PartProfile(tuple(Point(1, n, fixed + each * n) for n in (1, 4, 16)))
        for name, (fixed, each) in costs.items()
    })  # fmt: skip
    with Running(Flow("sums", parts, ITEMS), POOL[:2], plan=Mode.DISAGGREGATED, profile=known) as running:
        running.step([0] * ITEMS)
        before, groups = running.plan, dict(running.groups)
        drifted(running, tens=0.3)
        assert running.step([0] * ITEMS) == [2] * ITEMS
        assert running.plan.segments[0].chunk < before.segments[0].chunk
        assert (running.replanned, running.groups) == (1, groups)
        assert [group.members[0].calls for group in groups.values()] == [  # type: ignore[attr-defined]
            ITEMS // before.segments[0].chunk + ITEMS // running.plan.segments[0].chunk
        ] * 2


def test_a_plan_that_stays_is_asked_for_again_when_times_are_new(caplog: pytest.LogCaptureFixture) -> None:
    """Not when all becomes slower and faster by turns: then it would be for ever. But answers that grow longer, always
    by a little, are new each time."""
    caplog.set_level(logging.INFO, "rlix.flow")
    with Running(flow(), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        before = running.plan
        for factor, answers in ((1.2, 1), (1 / 1.2, 1), (1.0, 1), (1.2, 2), (1.2, 3), (1.2, 4), (1 / 1.2**2, 4)):
            drifted(running, ones=factor, tens=factor, more=factor)
            running._look_for_drift()
            assert caplog.text.count("the plan stays") == answers
        assert "ones takes 1.20 times as long, tens takes 1.20 times as long" in caplog.text
        assert (running.replanned, running.plan.shape) == (0, before.shape)
        assert running.plan.seconds == pytest.approx(before.seconds * 1.2**4)


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
    parts = [Part("ones", Joins, "pairs"), Part("tens", Keeps, "add", ("ones",), kwargs={"number": 10}, chunk=1)]
    known, sums = profile(ones=0.1, tens=0.1), Flow("sums", parts, ITEMS)
    apart = sums.plan(known, DEVICES, mode=Mode.DISAGGREGATED).best
    with Running(sums, POOL, plan=Mode.COLLOCATED, profile=known) as running:
        running.switch(apart)
        assert running.step([0] * ITEMS) == [10] * ITEMS
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "sums: ones moves and begins anew, for its class has no `save`"
    ]


@pytest.mark.parametrize("mode", [Mode.COLLOCATED, Mode.DISAGGREGATED])
def test_what_learns_gets_all_items_of_a_step_at_once_unless_it_says_otherwise(mode: Mode) -> None:
    """Or a plan would choose how often it learns."""
    parts = [Part("ones", Adds, "add", kwargs={"number": 1}), Part("tens", Keeps, "add", kwargs={"number": 10})]
    with Running(Flow("sums", parts, ITEMS), POOL, plan=mode, profile=profile(ones=0.2, tens=0.1)) as running:
        running.step([0] * ITEMS)
        assert running.groups["tens"].ask("save") == [1] * len(running.groups["tens"].members)  # type: ignore[attr-defined]
    assert [part.chunk for part in parts] == [1, None]
    assert Part("ones", Keeps, "add", each=2).chunk == Part("ones", Keeps, "add", chunk=1).chunk == 1


def test_a_part_that_loses_items_is_an_error() -> None:
    parts = [Part("ones", Adds, "short", kwargs={"number": 1}), Part("tens", Adds, "add", ("ones",), {"number": 1})]
    known = profile(ones=0.1, tens=0.1)
    with (
        Running(Flow("sums", parts, ITEMS), POOL, plan=Mode.DISAGGREGATED, profile=known) as running,
        pytest.raises(WorkerError, match=r"ones made \d+ items of \d+"),
    ):
        running.step([0] * ITEMS)
    with pytest.raises(ValueError, match="needs a Profile"):
        Running(flow(), POOL)


def virtual(locks: Any) -> Any:
    """The context of a worker on a virtual device."""
    return SimpleNamespace(
        device_locks=lambda: locks, fence=lambda lease: lease, devices=POOL[:1], kind="cpu", group="p"
    )


def test_a_rank_that_computes_is_not_brought_off() -> None:
    """When another rank has failed, the turn is over, and its peers may be at it still."""
    began, may_end, order = threading.Event(), threading.Event(), []

    class Slow(FlowWorker):
        def work(self, items: list[int]) -> list[int]:
            began.set()
            assert may_end.wait(300)
            order.append("worked")
            return items

        def offload(self) -> None:
            order.append("left")

    worker = Slow()
    locks = SimpleNamespace(acquire=lambda *_: None, release=lambda: order.append("unlocked"))
    worker.ctx = virtual(locks)
    worker._rlix_onload(None)
    with ThreadPoolExecutor(2) as threads:
        part = threads.submit(worker._rlix_part, "work", [[]])
        assert began.wait(300)
        gone = threads.submit(worker._rlix_offload, 1)
        assert order == []
        may_end.set()
        assert part.result(300)[1] == (0, {})
        gone.result(300)
    assert order == ["worked", "left", "unlocked"]


def test_a_call_that_comes_too_late_is_not_made() -> None:
    """Of a turn that is over on this rank: brought off, or another one has begun."""
    worker = Adds(1)
    locks = SimpleNamespace(acquire=lambda *_: None, release=lambda: None)
    worker.ctx = virtual(locks)
    worker._rlix_onload(None)
    assert worker._rlix_part("add", [[]], 0)[1] == (0, {})
    worker._rlix_offload(1)
    with pytest.raises(RuntimeError, match=r"^add\(\) came too late: its turn is over$"):
        worker._rlix_part("add", [[]], 0)
    worker._rlix_onload(None)
    worker._rlix_part("add", [[]], 2)
    with pytest.raises(RuntimeError, match="came too late"):
        worker._rlix_part("add", [[]], 1)
    assert worker.calls == 2


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


def test_what_makes_no_sense_is_refused_before_anybody_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("nobody should start")

    monkeypatch.setattr(running_module, "start", start)
    known = profile(ones=0.1, tens=0.2, more=0.3)
    plan = flow().plan(known, DEVICES).best
    with pytest.raises(SpecError, match=r"the plan is for 4 device\(s\), and there are 2"):
        Running(flow(), POOL[:2], plan=plan)
    endless = replace(plan, segments=(replace(plan.segments[0], chunk=0), *plan.segments[1:]))
    with pytest.raises(SpecError, match=r"chunks of 0 items, and its parts take multiples of 1"):
        Running(flow(), POOL, plan=endless)
    other = Flow("f", [Part("ones", Adds, "add", kwargs={"number": 1})], ITEMS)
    with pytest.raises(SpecError, match=r"of parts \['more', 'ones', 'tens'\], and the flow has \['ones'\]"):
        Running(other, POOL, plan=plan)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"plan": "fast"}, "plan='fast' must be auto, collocated, disaggregated, hybrid, or a plan"),
        ({"plan": None}, "plan=None must be auto"),
        ({"plan": ["auto"]}, r"plan=\['auto'\] must be auto"),
        ({"profile": None}, "plan=auto needs a Profile, not None"),
        ({"profile": "sums.json"}, r"needs a Profile, not 'sums.json': .* Profile\.read\(path\)"),
        ({"cluster": "gang"}, "`job` and `cluster`, its gang of these devices, go together"),
        ({"job": Pool()}, "`job` and `cluster`, its gang of these devices, go together"),
        ({"job": Pool(), "cluster": "nope"}, "job 'mine' has no cluster 'nope'; it has: gang"),
        ({"job": Pool(), "cluster": "gang", "devices": [replace(POOL[0], id=9)]}, "were asked for: ask for some of"),
        ({"devices": []}, "devices is empty, and a flow needs one or more"),
        ({"devices": {0: POOL[0]}}, r"`client\.devices\(\)` of a job has them, by their numbers\) .* 0 is none"),
    ],
)
def test_a_mistake_is_told_before_anybody_starts(
    wrong: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "start", lambda *_, **__: pytest.fail("nobody should start"))
    given = {"devices": POOL, "profile": profile(ones=0.1, tens=0.2, more=0.3), **wrong}
    with pytest.raises(SpecError, match=said):
        Running(flow(), **given)


@pytest.mark.parametrize("items", ["abcd", b"ab", {1: 2}, None, 3, iter([1, 2])])
def test_a_step_takes_a_sequence_of_items(items: Any) -> None:
    with Running(flow(), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        with pytest.raises(SpecError, match=f"takes a sequence of items, such as a list, not {type(items).__name__}"):
            running.step(items)
        assert running.step((0,) * ITEMS) == [111] * ITEMS


def test_nobody_goes_on_with_what_is_closed() -> None:
    with Running(flow(), POOL, profile=profile(ones=0.1, tens=0.2, more=0.3)) as running:
        with pytest.raises(SpecError, match="flow sums has no part hundreds"):
            running.restart("hundreds")
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
