"""The lock that brings states on and off: by whom, when, and what becomes of the dead and the late."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlix.flow.locks.lock import DeviceLock
from rlix.protocol.errors import WaitTimeoutError, WorkerError


class State:
    """A part's state, which must never be on a device with one that does not fit beside it."""

    def __init__(self, name: str, log: list[str], broken: bool = False) -> None:
        self.name, self.log, self.broken = name, log, broken

    def onload(self) -> None:
        self.log.append(f"+{self.name}")

    def offload(self) -> None:
        self.log.append(f"-{self.name}")
        if self.broken:
            raise WorkerError(f"{self.name} does not go")


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


def test_who_waits_too_long_says_for_whom_and_the_dead_let_go() -> None:
    log: list[str] = []
    a, b = State("a", log), State("b", log)
    lock = DeviceLock()
    with lock.turn(a, {0}):
        with (
            pytest.raises(WaitTimeoutError, match=r"b waited 0\.01 s for devices \[0\], for: a \(devices \[0\]\)"),
            lock.turn(b, {0}, timeout_s=0.01),
        ):
            pass
        lock.lose("a")
        with lock.turn(b, {0}, timeout_s=10):
            pass
    assert log == ["+a", "+b"]  # nobody brings off what is dead


def test_a_state_that_does_not_go_is_the_error_of_who_needs_its_place() -> None:
    log: list[str] = []
    lock = DeviceLock()
    with lock.turn(State("a", log, broken=True), {0}):
        pass
    with pytest.raises(WorkerError, match="a does not go"), lock.turn(State("b", log), {0}):
        pass
    with lock.turn(State("b", log), {0}, timeout_s=10):
        pass


def test_many_threads_never_share_a_device() -> None:
    log: list[str] = []
    parts = [State(name, log) for name in "abcd"]
    places = [{0}, {1}, {0, 1}, {1, 2}]
    lock, busy, guard = DeviceLock(), set[int](), threading.Lock()

    def work(index: int) -> None:
        for n in range(30):
            with lock.turn(parts[index], places[index], (n,), timeout_s=60):
                with guard:
                    assert not busy & places[index]
                    busy.update(places[index])
                with guard:
                    busy.difference_update(places[index])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, index) for index in range(4)]:
            future.result(timeout=100)
    there: set[str] = set()
    for event in log:
        there.add(event[1:]) if event[0] == "+" else there.remove(event[1:])
    lock.clear()
