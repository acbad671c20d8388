"""Calls of a training engine that do not reach every rank, or that end in an odd way; without ranks."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rlix.engine.life_cycle import Residency
from rlix.engine.residency import ResidentSet
from rlix.engine.time_limits import loading_s
from rlix.engine.train import checkpoint, lifecycle
from rlix.engine.train.engine import TrainEngine, _say_items
from rlix.engine.train.evacuation import Evacuated
from rlix.engine.train.last_call import LastCall
from rlix.engine.train.layout import Layout
from rlix.engine.train.lifecycle import StartedAs
from rlix.engine.train.materialize import ModuleSpec
from rlix.engine.train.random_state import random_state
from rlix.engine.train.state_calls import say_what_spills
from rlix.engine.train.worker import TrainWorker
from rlix.protocol.errors import RlixError, WorkerError
from rlix.protocol.messages import Device, DeviceKind, Process
from rlix.workers.group import WorkerGroup
from tests.engine.training_models import Policy, policy


class Ranks:
    """Two ranks as `TrainWorker` counts their calls; what is not a number cannot be sent to the second one."""

    world_size = 2

    def __init__(self) -> None:
        self.workers = [object.__new__(TrainWorker) for _ in range(2)]
        for rank, worker in enumerate(self.workers):
            worker._calls, worker.ctx = 0, SimpleNamespace(group="ranks", rank=rank)  # type: ignore[assignment]
            worker._last = LastCall(torch.nn.Module())
            worker.ping = lambda *given: given  # type: ignore[assignment, method-assign]

    def call(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for rank, worker in enumerate(self.workers):
            if rank and not all(isinstance(given, int | str) for given in args):
                raise TypeError("could not serialize the argument")
            answers.append(getattr(worker, method)(*args))
        return answers

    def results(self, _: str, called: list[Any], **__: Any) -> list[Any]:
        return called


def test_an_argument_that_cannot_be_sent_costs_its_own_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    recovered: list[str] = []
    monkeypatch.setattr(lifecycle, "settled", lambda *_: recovered.append("asked") or True)
    engine = TrainEngine(policy())
    engine._group = Ranks()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="could not serialize"):
        engine._run("ping", object(), timeout_s=1.0)
    assert recovered == ["asked"]  # whether the rank that was called waits for the other
    assert engine._run("ping", 3, timeout_s=1.0) == [(3,), (3,)]


def test_arguments_divided_among_ranks_that_others_replaced_reach_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change how the ranks are laid out while a call waits for its turn; two ranks stay two."""
    monkeypatch.setattr(lifecycle, "settled", lambda *_: True)
    engine, ranks = TrainEngine(policy()), Ranks()
    engine._group, engine._layout = ranks, Layout(sequence=2)  # type: ignore[assignment]
    with pytest.raises(RlixError, match=r"laid out otherwise .* no rank was called"):
        engine._run("ping", 3, timeout_s=1.0, split_for=Layout(data=2))
    assert [worker._calls for worker in ranks.workers] == [0, 0]
    assert engine._run("ping", 3, timeout_s=1.0, split_for=engine._layout) == [(3,), (3,)]


def test_a_method_that_leaves_the_program_leaves_its_rank_alive() -> None:
    def leave(*_: Any) -> None:
        raise SystemExit(3)

    worker = object.__new__(TrainWorker)
    worker._guard = lambda _: None  # type: ignore[method-assign]
    worker._module = object()  # type: ignore[assignment]
    worker._executor = SimpleNamespace(run=leave, settle=lambda _: None)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"train_step\(\) was left by SystemExit\(3\)"):
        worker.call("train_step", (), {}, None, only_first=False)


def test_a_step_that_has_begun_is_a_change_though_no_parameter_shows_it() -> None:
    """Moments are written first, and fused kernels do not count what they write."""

    class Asked(torch.optim.AdamW):
        def step(self, *_: Any) -> None:  # type: ignore[override]
            midway.append(worker.changes(1))
            super().step()

    midway: list[int] = []
    worker = object.__new__(TrainWorker)
    worker._calls, worker._module = 0, torch.nn.Linear(2, 1)  # type: ignore[assignment]
    worker._last = LastCall(worker._module)
    optimizer = Asked(worker._module.parameters(), fused=True)
    worker.ping = lambda: worker._module(torch.ones(2)).backward() or optimizer.step()  # type: ignore[assignment, func-returns-value, method-assign, return-value]
    worker.do(1, 1, "ping")
    assert midway[0]
    assert worker.changes(1)
    worker.ping = lambda: 0  # type: ignore[method-assign]
    worker.do(2, 1, "ping")
    assert worker.changes(1), "another thread still waits for the first call"
    assert worker.changes(2) == worker.changes(3) == 0


def test_state_is_handed_over_beside_what_reads_it_and_not_where_a_pass_begins_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards, last = [3], LastCall(torch.nn.Linear(2, 1))
    captured = SimpleNamespace(tensors={}, shared="", random_state="")
    monkeypatch.setattr(checkpoint, "capture", lambda *_, **__: captured)
    worker = object.__new__(TrainWorker)
    worker._calls, worker.ctx = 0, SimpleNamespace(group="ranks", rank=0)  # type: ignore[assignment]
    worker._module, worker._executor = last._module, SimpleNamespace(settle=lambda _: None)  # type: ignore[assignment]
    worker._resident = ResidentSet("a rank", lambda: (), torch.device("cpu"))
    worker._last, last._count_shards = last, lambda: shards[0]  # type: ignore[method-assign]
    for method in ("save", "save_state", "publish"):
        setattr(worker, method, worker.hand_over)
        assert worker.do(worker._calls + 1, 1, method, None) is not None
    monkeypatch.setattr(checkpoint, "capture", lambda *_, **__: shards.__setitem__(0, 2) or captured)
    with pytest.raises(RlixError, match="a forward pass is not through"):
        worker.do(worker._calls + 1, 1, "save", None)


def test_looking_at_random_generators_begins_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begun = torch.cuda.is_initialized()  # on a machine with GPUs another test may have
    assert ("cuda" in random_state(), torch.cuda.is_initialized()) == (begun, begun)


def test_a_call_that_has_changed_no_weights_is_undone_in_random_generators_too() -> None:
    last = LastCall(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(last._module.parameters())
    before = random_state()
    with last.runs(1, 1, leaves_bytes=True):
        torch.rand(3)
    with last.runs(2, 1, leaves_bytes=True):
        torch.rand(3)
        assert last.random_state(1) == before != last.random_state(2) != last.random_state(3) == random_state()
        optimizer.step()
        assert last.random_state(1) == last.random_state(2) == random_state() != before


def test_whatever_a_rank_fails_with_is_its_error() -> None:
    """Ray makes a RuntimeError that is none of its own out of a StopIteration."""
    group = object.__new__(WorkerGroup)
    group.name = "ranks"
    failed, good = Future[Any](), Future[Any]()
    failed.set_exception(RuntimeError("generator raised StopIteration"))
    good.set_result(1)
    with pytest.raises(
        WorkerError, match=r"ranks: rank 1 failed in step\(\): RuntimeError: generator raised"
    ) as caught:
        group._collect("step", [0, 1], [good, failed], [1], timeout_s=3600.0)
    assert isinstance(caught.value, RuntimeError)


def test_weights_that_rays_store_does_not_hold_are_said_to_go_by_a_disk(caplog: pytest.LogCaptureFixture) -> None:
    def node(address: str, room: float, *, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"object_store_memory": room}}

    nodes = [node("203.0.113.1", 2e9), node("203.0.113.2", 1.9e9), node("203.0.113.3", 1.0, alive=False)]
    say_what_spills("train-1", 2 * 10**9, nodes)
    (said,) = caplog.messages
    assert "train-1 publishes 2.0 GB of weights, and Ray's object store on 203.0.113.2 holds 1.9 GB" in said


def test_a_state_of_something_else_than_tensors_is_refused() -> None:
    with pytest.raises(TypeError, match="no tensors in the state given: a, c"):
        TrainEngine(policy()).load_state_dict({"a": 3, "b": torch.zeros(1), "c": "x"})  # type: ignore[dict-item]


def test_an_engine_whose_only_worker_has_ended_says_what_is_lost() -> None:
    class Dead:
        world_size, name = 1, "train"
        closed = False

        def call(self, *_: Any) -> list[Any]:
            return []

        def results(self, *_: Any, **__: Any) -> list[Any]:
            raise WorkerError("rank 0 failed in ping()") from ActorUnavailableError("connection reset", None)

        def submit(self, *_: Any, **__: Any) -> list[Any]:
            died: Future[Any] = Future()
            died.set_exception(ActorDiedError())
            return [SimpleNamespace(future=lambda: died)]

        def close(self, **_: Any) -> None:
            self.closed = True

    engine, group = TrainEngine(policy()), Dead()
    engine._group = group  # type: ignore[assignment]
    with pytest.raises(WorkerError, match=r"its only worker has ended, and its state is lost\nbuild\(\)"):
        engine._run("ping", timeout_s=1.0)
    assert group.closed
    assert "its only worker has ended" in engine.life.failure
    with pytest.raises(RlixError, match=r"given up after an error: its only worker has ended"):
        engine.train_step([[1]])


class Group:
    """Workers that answer at once; `during` is called when they are to answer a method of the engine's ranks."""

    world_size, name = 2, "train"

    def __init__(self, during: Callable[[str], object] = lambda _: None) -> None:
        self.during, self.closed, self.processes = during, False, dict[int, Process]()

    def call(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def results(self, method: str, *_: Any, **__: Any) -> list[Any]:
        self.during(method)
        return [None, None]

    def close(self, **_: Any) -> None:
        self.closed = True


def failed_engine(monkeypatch: pytest.MonkeyPatch, old: Group, new: Group) -> TrainEngine:
    """On `old`, whose state `new` takes over."""
    engine = TrainEngine(policy())
    engine._group = old  # type: ignore[assignment]
    engine._layout = Layout(data=2)
    engine._started_as = StartedAs(None, ModuleSpec(Policy), None, "fork", 1.0, 1.0, None)  # type: ignore[arg-type]
    engine._configured = [("use_sgd", (0.5,), {})]
    monkeypatch.setattr(engine, "_start", lambda *_: new)
    monkeypatch.setattr(lifecycle, "settled", lambda *_: False)
    engine._moved(Residency.DEVICE)
    return engine


def test_nobody_can_call_new_workers_before_they_have_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    old, new = Group(), Group(lambda method: seen.append((method, engine._group is old)))
    engine = failed_engine(monkeypatch, old, new)
    engine._part_bytes = 10**11
    limits: list[float] = []

    def evacuated(_: Any, *waits: float, **__: Any) -> Evacuated:
        limits.extend(waits)
        return Evacuated(("a", "b"), agree=True)

    monkeypatch.setattr(lifecycle, "evacuate", evacuated)
    lost, _ = engine._recover(old, "train_step")  # type: ignore[arg-type]
    assert "started anew with their weights" in lost
    assert limits == [lifecycle.SETTLE_TIMEOUT_S, loading_s(10**11, lifecycle.HAND_OVER_TIMEOUT_S)]
    assert seen == [("use_sgd", True), ("take_over", True)]
    assert (engine._group, engine._calls, old.closed) == (new, 2, True)


def test_workers_that_do_not_take_the_state_are_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise WorkerError("rank 1 failed")

    old, new = Group(), Group(fail)
    engine = failed_engine(monkeypatch, old, new)
    with pytest.raises(WorkerError, match="rank 1 failed"):
        engine._rebuild(old, ("a", "b"), (), Layout(data=2), None)
    assert (engine._group, old.closed, new.closed) == (old, False, True)
    new.during = lambda _: engine.close()
    with pytest.raises(RlixError, match="was closed meanwhile"):
        engine._rebuild(old, ("a", "b"), (), Layout(data=2), None)
    assert engine._group is None


def test_workers_that_have_ended_are_not_asked_where_the_bytes_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a move that failed the handle asks its workers where they are, once it has to know."""
    old, new = Group(), Group()
    engine = failed_engine(monkeypatch, old, new)
    monkeypatch.setattr(lifecycle, "evacuate", lambda *_, **__: Evacuated(("a", "b"), agree=True))
    monkeypatch.setattr(engine, "_ask_workers", lambda: pytest.fail("they have ended"))
    engine._known = False
    lost, _ = engine._recover(old, "acquire", late=True)  # type: ignore[arg-type]
    assert "started anew with their weights" in lost
    assert engine._group is new


def test_a_recovery_that_is_left_gives_the_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(_: str) -> None:
        raise KeyboardInterrupt

    old, new = Group(), Group(leave)
    engine = failed_engine(monkeypatch, old, new)
    monkeypatch.setattr(lifecycle, "evacuate", lambda *_, **__: Evacuated(("a", "b"), agree=True))
    with pytest.raises(KeyboardInterrupt):
        engine._recover(old, "train_step")  # type: ignore[arg-type]
    assert (engine._group, new.closed) == (None, True)
    with pytest.raises(RlixError, match=r"given up after an error: new workers could not take its state"):
        engine.train_step([[1]])


def test_workers_that_were_built_meanwhile_are_not_those_that_a_recovery_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, others = Group(), Group(), Group()
    engine = failed_engine(monkeypatch, old, new)
    built = threading.Thread(target=lambda: engine._adopt(others, (), Layout(data=2), None))  # type: ignore[arg-type]

    def closed_and_built(*_: Any, **__: Any) -> Evacuated:
        engine.close()
        built.start()
        return Evacuated(("a", "b"), agree=True)

    monkeypatch.setattr(engine, "_start", lambda *_: pytest.fail("for an engine that was closed"))
    monkeypatch.setattr(lifecycle, "evacuate", closed_and_built)
    lost, _ = engine._recover(old, "train_step")  # type: ignore[arg-type]
    built.join(300.0)
    assert "closed meanwhile" in lost
    assert (engine._group, others.closed) == (others, False)
    assert not engine.life.failure


def test_two_threads_that_find_workers_failed_replace_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, evacuations = Group(), Group(), list[Any]()
    begun, both = threading.Event(), threading.Event()
    engine = failed_engine(monkeypatch, old, new)

    def evacuated(group: Any, *_: Any, **__: Any) -> Evacuated:
        evacuations.append(group)
        begun.set()
        assert both.wait(300.0)
        return Evacuated(("a", "b"), agree=True)

    monkeypatch.setattr(lifecycle, "evacuate", evacuated)
    said: list[tuple[str, str]] = []
    threads = [threading.Thread(target=lambda: said.append(engine._recover(old, "step"))) for _ in range(2)]  # type: ignore[arg-type]
    threads[0].start()
    assert begun.wait(300.0)
    threads[1].start()
    both.set()
    for thread in threads:
        thread.join(300.0)
    assert evacuations == [old]
    assert engine._group is new
    assert said[0] == said[1]
    assert "started anew with their weights" in said[0][0]


def test_a_call_that_was_interrupted_is_under_way_until_all_ranks_have_come_back() -> None:
    """Its caller is gone, so nobody knows what it has changed when the next one fails."""
    firsts, ranks = list[int](), [Future[Any](), Future[Any]()]

    class Asked(Group):
        def call(self, _: str, number: int, first: int, *__: Any) -> list[Any]:
            firsts.append(first)
            return [SimpleNamespace(future=lambda mine=rank: mine) for rank in ranks]

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    engine, group = TrainEngine(policy()), Asked(interrupt)
    engine._group = group  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        engine._run("ping", timeout_s=1.0)
    group.during = lambda _: None
    for rank in ranks:
        engine._run("ping", timeout_s=1.0)
        rank.set_result(None)
    engine._run("ping", timeout_s=1.0)
    assert firsts == [1, 1, 1, 4]


def test_an_engine_is_idle_while_no_call_is_under_way() -> None:
    engine, begun, ends = TrainEngine(policy()), threading.Event(), threading.Event()
    engine._ran = lambda *_, **__: [begun.set(), ends.wait(300.0)]  # type: ignore[method-assign]
    engine._last_ended = time.monotonic() - 100.0
    assert engine.idle_s > 99.0
    call = threading.Thread(target=lambda: engine._run("ping", timeout_s=1.0))
    call.start()
    assert begun.wait(300.0)
    assert engine.idle_s == 0.0
    ends.set()
    call.join(300.0)
    assert 0.0 < engine.idle_s < 99.0
    seen: list[float] = []
    engine._replace = lambda *_: seen.append(engine.idle_s)  # type: ignore[method-assign]
    engine._check_readable = lambda: None  # type: ignore[method-assign]
    engine.resize(devices=[Device(0, "node", "203.0.113.9", 0, DeviceKind.CPU)])
    assert seen == [0.0]


def test_an_error_names_the_items_of_its_rank_each_once() -> None:
    for items, said in (((3, 5, 5), "2 items from 3 to 5"), ((4, 5, 5), "items 4 to 5")):
        error = WorkerError("rank 1 raised")
        error.rank = 1  # type: ignore[attr-defined]
        _say_items(error, ((0, 1, 2), items), [0, 1])
        assert str(error) == f"rank 1 raised ({said} of the split batch)"
