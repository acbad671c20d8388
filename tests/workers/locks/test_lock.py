"""The lock that brings states on and off: by whom, when, and what becomes of the late and the stuck."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlix.protocol.errors import WaitTimeoutError, WorkerError
from rlix.workers.locks.lock import DeviceLock


class State:
    """A part's state; `broken` and `shy`: how often it will not go, and not come."""

    def __init__(self, name: str, log: list[str], broken: int = 0, shy: int = 0) -> None:
        self.name, self.log, self.broken, self.shy = name, log, broken, shy

    def onload(self) -> None:
        self.log.append(f"+{self.name}")
        if self.shy:
            self.shy -= 1
            raise WorkerError(f"{self.name} does not come")

    def offload(self) -> None:
        self.log.append(f"-{self.name}")
        if self.broken:
            self.broken -= 1
            raise WorkerError(f"{self.name} does not go")

    def end(self) -> None:
        self.log.append(f"!{self.name}")


def test_states_come_and_go_with_the_turns() -> None:
    log: list[str] = []
    a, b, c = (State(name, log) for name in "abc")
    lock = DeviceLock([frozenset("bc")])
    with lock.turn(a, {0, 1}), lock.turn(a, {1}):
        pass
    with lock.turn(a, {0, 1}):
        assert log == ["+a"]  # it stays until somebody else has its turn
    with lock.turn(b, {0}), lock.turn(c, {1}):
        assert log == ["+a", "-a", "+b", "+c"]
    with lock.turn(c, {0}):
        assert log[-1] == "+c"  # both fit
    lock.clear()
    assert sorted(log[4:]) == ["-b", "-c"]


def test_who_waits_too_long_says_for_whom_and_then_stands_in_nobodys_way() -> None:
    log: list[str] = []
    a, b = State("a", log), State("b", log)
    lock = DeviceLock()
    with (
        lock.turn(a, {0}),
        pytest.raises(WaitTimeoutError, match=r"b waited 0\.01 s for devices \[0\], for: a \(devices \[0\]\)"),
        lock.turn(b, {0}, timeout_s=0.01),
    ):
        pass
    with lock.turn(a, {0}, timeout_s=300):
        pass
    assert log == ["+a"]


def test_nothing_is_loaded_on_top_of_a_state_that_does_not_go() -> None:
    log: list[str] = []
    lock = DeviceLock()
    with lock.turn(State("a", log, broken=2), {0}):
        pass
    for _ in range(2):
        with pytest.raises(WorkerError, match="a does not go"), lock.turn(State("b", log), {0}):
            pass
    assert log == ["+a", "-a", "-a"]
    with lock.turn(State("b", log), {0}, timeout_s=300):
        assert log[3:] == ["-a", "+b"]


def test_a_state_that_came_only_in_part_is_brought_off() -> None:
    log: list[str] = []
    a, b = State("a", log, shy=1), State("b", log, shy=1)
    lock = DeviceLock()
    for part in (a, b):
        with pytest.raises(WorkerError, match="does not come"), lock.turn(part, {0}):
            pass
    with lock.turn(b, {0}):
        assert log == ["+a", "-a", "+b", "-b", "+b"]


def test_to_clear_asks_all_and_then_says_who_did_not_go() -> None:
    log: list[str] = []
    lock = DeviceLock()
    with lock.turn(State("a", log, broken=1), {0}), lock.turn(State("b", log), {1}):
        pass
    with pytest.raises(WorkerError, match="a does not go"):
        lock.clear()
    assert log == ["+a", "+b", "-a", "-b"]
    lock.clear()
    lock.clear()
    assert log[4:] == ["-a"]


def test_what_does_not_go_may_be_ended() -> None:
    log: list[str] = []
    lock = DeviceLock()
    with lock.turn(State("a", log, broken=2), {0}), lock.turn(State("b", log), {1}):
        pass
    with pytest.raises(WorkerError, match="a does not go"):
        lock.clear()
    lock.end()
    with lock.turn(State("c", log), {0}):
        assert log == ["+a", "+b", "-a", "-b", "!a", "+c"]


def test_many_threads_never_share_a_device() -> None:
    log: list[str] = []
    parts = [State(name, log) for name in "abcd"]
    places = [{0}, {1}, {0, 1}, {1, 2}]
    lock, busy, guard = DeviceLock(), set[int](), threading.Lock()

    def work(index: int) -> None:
        for n in range(30):
            with lock.turn(parts[index], places[index], (n,), timeout_s=300):
                with guard:
                    assert not busy & places[index]
                    busy.update(places[index])
                with guard:
                    busy.difference_update(places[index])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, index) for index in range(4)]:
            future.result(timeout=300)
    there: set[str] = set()
    for event in log:
        there.add(event[1:]) if event[0] == "+" else there.remove(event[1:])
    lock.clear()
