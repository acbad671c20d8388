"""Calls that are made again where a connection, not the actor, was lost."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from rlix.control import rpc
from rlix.protocol.errors import RlixError, WaitTimeoutError


class Method:
    """Answers, or raises, one after the other."""

    def __init__(self, answers: Iterable[object]) -> None:
        self.answers: Iterator[object] = iter(answers)
        self.calls = 0

    async def remote(self) -> Any:
        self.calls += 1
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Actor:
    def __init__(self, *ready: object) -> None:
        self.__ray_ready__ = Method(ready)


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("connection reset", None)


def outlast(actor: Actor, asked: Method) -> Any:
    return asyncio.run(rpc.outlast(actor, asked.remote, what="the pipeline of job 1", patience_s=0.0))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_LONGEST_PAUSE_S", 0.0)


def test_a_lost_connection_is_no_death() -> None:
    asked = Method([unavailable(), unavailable(), "its end"])
    assert outlast(Actor(None, None), asked) == "its end"
    assert asked.calls == 3


def test_what_it_raised_itself_is_an_answer() -> None:
    """Also that somebody else was out of reach for it."""
    raised = RayTaskError("run", "its traceback", unavailable()).as_instanceof_cause()
    assert isinstance(raised, ActorUnavailableError)
    asked = Method([raised])
    with pytest.raises(ActorUnavailableError):
        outlast(Actor(), asked)
    assert asked.calls == 1


def test_a_death_is_one_while_it_is_asked_and_while_it_is_looked_for() -> None:
    for ready, answers in (((), [ActorDiedError()]), ((ActorDiedError(),), [unavailable()])):
        with pytest.raises(ActorDiedError):
            outlast(Actor(*ready), Method(answers))


def test_the_wait_is_bounded_and_says_for_whom() -> None:
    with pytest.raises(WaitTimeoutError, match="the pipeline of job 1 could not be reached for 0 s, although Ray"):
        outlast(Actor(unavailable()), Method([unavailable()]))


class Silent:
    """A connection on which answers are lost: the first ones."""

    def __init__(self, lost: int, answer: object = "its answer") -> None:
        self.asked, self._lost, self._answer = 0, lost, answer
        self.method = self

    def remote(self) -> "Silent":
        self.asked += 1
        return self

    def get(self) -> object:
        if self.asked <= self._lost:
            raise GetTimeoutError("nothing came")
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MagicMock()
    ray.get.side_effect = lambda ref, timeout: ref.get()
    ray.wait.side_effect = lambda refs, timeout: ([ref for ref in refs if ref.asked > ref._lost], [])
    monkeypatch.setattr(rpc, "ray", ray)
    monkeypatch.setattr(rpc, "_FIRST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("silent")
def test_who_does_not_answer_is_asked_again_for_a_while() -> None:
    actor = Silent(2)
    assert rpc.Patient(lambda: actor, "the scheduler").ask("method", timeout_s=1.0) == "its answer"
    assert actor.asked == 3
    gone = Silent(10)
    with pytest.raises(WaitTimeoutError, match=r"no answer within 1\.0 s: the scheduler's method"):
        rpc.Patient(lambda: gone, "the scheduler", patience_s=0.0).ask("method", timeout_s=1.0)
    assert gone.asked == 1


@pytest.mark.usefixtures("silent")
def test_who_has_left_ray_meanwhile_does_not_look_for_it_any_more() -> None:
    """That would join, or start, one anew."""

    class Leaving(Silent):
        def get(self) -> object:
            rpc.ray.is_initialized.return_value = False
            raise ActorDiedError

    looked: list[Leaving] = []

    def find() -> Leaving:
        looked.append(Leaving(1))
        return looked[-1]

    with pytest.raises(RlixError, match="the scheduler cannot be asked: this process has left Ray"):
        rpc.Patient(find, "the scheduler").ask("method", timeout_s=1.0)
    assert len(looked) == 1


@pytest.mark.usefixtures("silent")
def test_a_wait_that_ended_over_there_is_an_answer() -> None:
    actor = Silent(0, WaitTimeoutError("devices [0] were not granted within 1 s"))
    with pytest.raises(WaitTimeoutError, match="were not granted"):
        rpc.Patient(lambda: actor, "the scheduler").ask("method", timeout_s=1.0)
    assert actor.asked == 1
