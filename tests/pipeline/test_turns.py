"""What becomes of those who wait for a turn when there is none, and when a turn does not end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlix.pipeline.holdings import Holdings
from rlix.pipeline.turns import Turns
from rlix.protocol.errors import RlixError
from rlix.protocol.types import Phase

WAIT_S = 300.0


class Gang:
    def __init__(self) -> None:
        self.held: list[Phase] = []
        self.refuses = False

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[None]:
        if self.refuses:
            raise RlixError("no gang today")
        self.held.append(phase)
        yield


def test_a_gang_that_cannot_be_held_is_told_to_those_who_wait_and_to_nobody_after() -> None:
    gang = Gang()
    turns = Turns(gang.hold)
    gang.refuses = True
    with (
        pytest.raises(RlixError, match="no gang today"),
        turns.turn("a", Phase.ACTOR_TRAINING, threading.Event()),
    ):
        raise AssertionError("there was no turn")
    gang.refuses = False
    with turns.turn("a", Phase.ACTOR_TRAINING, threading.Event()):
        assert gang.held == [Phase.ACTOR_TRAINING]
    turns.close()


def test_who_waits_when_it_closes_is_let_go() -> None:
    turns = Turns(Gang().hold)
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(InterruptedError), turns.turn("b", Phase.ACTOR_TRAINING, threading.Event()):
            raise AssertionError("there was no turn")
        told.append("b")

    with turns.turn("a", Phase.ACTOR_TRAINING, threading.Event()):
        waiter = threading.Thread(target=wait)
        waiter.start()
        closer = threading.Thread(target=turns.close)
        closer.start()
        waiter.join(WAIT_S)
        assert told == ["b"]
    closer.join(WAIT_S)
    assert not closer.is_alive()


def test_a_turn_that_hangs_holds_up_nobody_who_is_stopped() -> None:
    turns, stop = Turns(Gang().hold), threading.Event()
    with turns.turn("a", Phase.ACTOR_TRAINING, threading.Event()):
        stop.set()
        with (
            pytest.raises(InterruptedError, match="asked to stop"),
            turns.turn("b", Phase.ACTOR_TRAINING, stop),
        ):
            raise AssertionError("there was no turn")
    turns.close()


def test_code_hangs_that_asks_nothing_of_the_engine_whose_devices_it_holds() -> None:
    class Engine:
        idle_s = 90.0

        def acquire(self, lease: object) -> None: ...

        def release(self, epoch: int) -> None: ...

    now, engine = [0.0], Engine()
    holdings = Holdings(60.0, lambda: now[0])
    with holdings.hold("actor_train for actor_training", engine):
        assert holdings.hang("job") is None  # it was idle before, too
        now[0] = 60.5
        error = holdings.hang("job")
        assert str(error).startswith(
            "job holds actor_train for actor_training and has asked nothing of its engine for 60 s "
            f"(training.timeout_s: 60); it hangs at {__file__}:"
        )
        engine.idle_s = 0.0  # a call, which ends by itself
        now[0] = 9000.0
        assert holdings.hang("job") is None
        engine.idle_s = 61.0
        assert holdings.hang("job") is not None
    assert holdings.hang("job") is None
    with holdings.hold("actor_train for actor_training", engine):
        now[0] += 61.0
        assert str(holdings.hang("job", -1)).endswith("it hangs at an unknown line: its thread has ended")
    with holdings.hold("actor_train for initialization", None):
        now[0] = 20000.0
        assert holdings.hang("job") is None
