"""What becomes of the ranks of a part that do not answer, do not go or have died: on workers that are pretended."""

import contextlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest
import ray
from ray.exceptions import ActorDiedError

from rlix.flow.parts import part_group
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.parts.part_group import PartGroup
from rlix.protocol.errors import WaitTimeoutError, WorkerError
from rlix.protocol.messages import Process
from rlix.workers import group as group_module
from rlix.workers.group import WorkerGroup


class Asked(NamedTuple):
    """An answer of a rank that does what it `says`."""

    says: str | None
    rank: int

    def future(self) -> Self:
        return self

    def done(self) -> bool:
        return self.says != "hangs"


class Pretended(PartGroup):
    """`says`: by rank what it does when it is asked; what is not there is an answer."""

    def __init__(self, **says: str) -> None:
        self.says, self.killed = dict[int, str](), list[int]()
        super().__init__(FlowWorker, name="flow/part", placements=((1,), (2,), ()), timeout_s=1.0)  # type: ignore[arg-type]
        self.says = {int(rank[1:]): what for rank, what in says.items()}

    def submit(self, method: str, *_: Any, ranks: Any = None, **__: Any) -> Any:
        return [Asked(self.says.get(rank), rank) for rank in (range(3) if ranks is None else ranks)]

    def _wait(self, method: str, ranks: Any, futures: Any, timeout_s: float) -> list[Any]:
        for says, rank in futures:
            if says == "dies":
                self.lost.add(rank)
                raise WorkerError("died") from ActorDiedError()
            if says == "raises":
                raise WorkerError("does not go")
            if says == "hangs":
                raise WaitTimeoutError(f"rank(s) {rank} did not answer")
        return [None for _ in futures]

    def kill(self, rank: int, *, timeout_s: float = 10.0) -> None:
        self.killed.append(rank)
        if self.says.get(rank) == "stays":
            raise WaitTimeoutError(f"rank {rank} did not end")


def starts_nobody(group: Any, worker_cls: type, *, name: str, placements: Any) -> None:
    group.name, group.worker_cls, group.placements, group.lost = name, worker_cls, placements, set()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup, "__init__", starts_nobody)
    monkeypatch.setattr(part_group, "wait", lambda *_: None)
    monkeypatch.setattr(part_group, "futures_of", lambda refs: [ref.future() for ref in refs])


def test_who_hangs_is_ended_and_who_has_died_is_gone() -> None:
    part = Pretended(_0="hangs", _1="dies")
    with pytest.raises(WaitTimeoutError, match=r"rank\(s\) 0 did not answer, and were ended"):
        part.offload()
    assert part.killed == [0] and part.lost == {0, 1}
    part.offload()  # nobody is asked who is gone


def test_who_does_not_go_is_ended_when_others_need_its_devices() -> None:
    part = Pretended()
    part.onload()
    part.says = {1: "raises", 2: "raises"}
    with pytest.raises(WorkerError, match="does not go"):
        part.offload()
    assert part.killed == []
    part.end()
    assert part.killed == [1]  # the other has no device


def test_who_hangs_when_it_is_brought_on_is_ended() -> None:
    part = Pretended(_2="hangs")
    with pytest.raises(WaitTimeoutError, match=r"rank\(s\) 2 did not answer, and were ended"):
        part.onload()
    assert part.killed == [2]


def test_devices_do_not_pass_on_while_a_process_that_was_ended_is_there() -> None:
    part = Pretended()
    part.onload()
    part.lost, part.says = {0, 1}, {0: "stays", 1: "stays"}  # Ray says that they died
    for _ in range(2):
        with pytest.raises(WaitTimeoutError, match="rank 0 did not end"):
            part.offload()
    part.end()
    with pytest.raises(WaitTimeoutError, match="rank 0 did not end"):
        part.offload()
    part.says = {}
    part.offload()
    assert part.killed == [0, 0, 0, 1, 0, 0, 1]
    part.offload()  # nobody is there
    assert len(part.killed) == 7


def test_devices_do_not_pass_on_while_the_process_of_who_died_as_it_went_is_there() -> None:
    part = Pretended()
    part.onload()
    part.says = {1: "dies"}
    part.offload()
    assert part.killed == [1] and part.lost == {1}
    part.offload()
    assert part.killed == [1]


def test_who_is_killed_again_is_gone_only_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started, living = Process("node", 11, 1, "child"), {10, 11}
    workers: Any = WorkerGroup.__new__(WorkerGroup)
    workers.name, workers._handles = "flow/part", [None]
    workers._named, workers._children = {0: Process("node", 10, 1, "rank")}, {}
    workers._processes = {0: SimpleNamespace(wait=lambda _: 10 not in living)}
    monkeypatch.setattr(ray, "kill", lambda _: living.discard(10))
    monkeypatch.setattr(group_module, "descendants", lambda _: (started,) if 10 in living else ())
    monkeypatch.setattr(group_module, "kill", lambda them, _: tuple(p for p in them if p.pid in living))
    for _ in range(2):
        with pytest.raises(WaitTimeoutError, match=r"rank 0 left process\(es\) 11"):
            workers.kill(0)
    living.clear()
    workers.kill(0)
    assert (workers._processes, workers._children) == ({}, {})


class Ref:
    """A result; `read`: whether somebody has asked for it, or Ray writes an error of it to the terminal."""

    def __init__(self, result: Future[int]) -> None:
        self.result, self.read = result, False

    def future(self) -> Future[int]:
        self.read = True
        return self.result


def usable(monkeypatch: pytest.MonkeyPatch, method: Any) -> Pretended:
    part = Pretended()
    monkeypatch.setattr(part, "_note", lambda call: call)
    monkeypatch.setattr(part, "_handles", [SimpleNamespace(_rlix_part=method)], raising=False)
    monkeypatch.setattr(part, "check_usable", lambda _: None)
    return part


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_is_read_from_both_results_and_what_was_made_stays_where_it_is(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: Future[int] = Future()
    made, counted = Ref(result), Ref(result)
    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: (made, counted)))
    part = usable(monkeypatch, method)
    part.part("add", [[]], ranks=[0])
    if fails:
        result.set_exception(LookupError())
    else:
        result.set_result(1)
    assert made.read is fails


def test_what_was_called_before_a_call_failed_is_of_a_turn_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[Any]()
    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *args: sent.append(args) or (ref, ref)))
    ref = Ref(Future())
    part = usable(monkeypatch, method)
    for says in ({}, {1: "raises"}, {1: "hangs"}, {}):
        part.part("add", [[]], ranks=[0])
        part.says = says  # type: ignore[assignment]
        call: Any = SimpleNamespace(method="add", futures=part.submit("add"), ranks=range(3), late=[1])
        with contextlib.suppress(WorkerError, WaitTimeoutError):
            part.answers(call)
    part.offload()
    part.part("add", [[]], ranks=[0])
    assert [turn for _, _, turn in sent] == [0, 0, 1, 2, 3]
