"""A worker's calls are carried out once, however often they are made."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlix.workers import once as once_module
from rlix.workers.once import CALL, Answers, once


class Counter:
    def __init__(self) -> None:
        self.calls = 0
        self.go = threading.Event()
        self._rlix_answers = Answers()

    @once
    def count(self, by: int = 1) -> int:
        self.calls += by
        return self.calls

    @once
    def fail(self) -> None:
        self.calls += 1
        raise ValueError(f"call {self.calls}")

    @once
    def wait(self) -> int:
        assert self.go.wait(300)
        self.calls += 1
        return self.calls


def test_a_call_that_is_made_again_is_not_carried_out_again() -> None:
    counter = Counter()
    assert [counter.count(2, **{CALL: "a"}), counter.count(2, **{CALL: "a"}), counter.count(by=3)] == [2, 2, 5]
    for _ in range(2):
        with pytest.raises(ValueError, match="call 6"):
            counter.fail(**{CALL: "b"})


def test_one_that_is_made_again_while_it_runs_waits_for_it() -> None:
    counter = Counter()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(counter.wait, **{CALL: "a"}) for _ in range(2)]
        counter.go.set()
        assert [each.result() for each in both] == [1, 1]


def test_one_that_took_longer_than_many_others_is_remembered_when_it_ends() -> None:
    counter = Counter()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(counter.wait, **{CALL: "long"})
        while "long" not in counter._rlix_answers._known:
            pass
        for number in range(once_module._REMEMBERED):
            counter.count(0, **{CALL: str(number)})
        counter.go.set()
        assert [long.result(), counter.wait(**{CALL: "long"})] == [1, 1]


def test_the_oldest_that_have_ended_are_forgotten() -> None:
    counter = Counter()
    for number in range(once_module._REMEMBERED + 1):
        counter.count(**{CALL: str(number)})
    assert len(counter._rlix_answers._known) == once_module._REMEMBERED
    assert counter.count(**{CALL: str(number)}) == number + 1
