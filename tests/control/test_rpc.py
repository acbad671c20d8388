"""Calls that are made again where a connection, not the actor, was lost."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rlix.control import rpc
from rlix.protocol.errors import WaitTimeoutError


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


def test_a_death_is_one_while_it_is_asked_and_while_it_is_looked_for() -> None:
    for ready, answers in (((), [ActorDiedError()]), ((ActorDiedError(),), [unavailable()])):
        with pytest.raises(ActorDiedError):
            outlast(Actor(*ready), Method(answers))


def test_the_wait_is_bounded_and_says_for_whom() -> None:
    with pytest.raises(WaitTimeoutError, match="the pipeline of job 1 could not be reached for 0 s, although Ray"):
        outlast(Actor(unavailable()), Method([unavailable()]))
