"""Samples that somebody plays turn by turn, beside whatever else the job does."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rlix.pipeline.samples import Sample, Samples, mean, measured, per_s
from rlix.pipeline.sources.base import Patience, Source, Surroundings, done_at
from rlix.pipeline.sources.environments.loop import LoopThread
from rlix.pipeline.sources.place import Place
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.messages import Demand

_POLL_S = 0.2
_GRACE_S = 60.0

S = TypeVar("S", bound=Sample)


@dataclass(frozen=True, slots=True)
class Begun(Generic[S]):
    done: "Future[list[S]]"
    time: float
    done_at: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Seat:
    """A sample that is to be played; `task` and `place` are its group's."""

    id: str
    task: str
    place: Place


class PlayedSource(Source, Generic[S]):
    """A group of samples for each of the step's tasks, played on one event loop on a thread of its own.

    Args:
        what: who plays, as messages name it.
        failure_reward: of a sample whose player failed; None: it does not count.
    """

    stuck_hint = ""
    """What to do when the thread does not answer."""

    def __init__(self, options: Any, around: Surroundings, what: str, failure_reward: float | None) -> None:
        super().__init__(options, around)
        self._what = what
        self._failure_reward = failure_reward
        self._loop = self.make_loop()
        self._patience = Patience(around.job, what, paid=failure_reward is not None)

    def make_loop(self) -> LoopThread:
        """What they are played on."""
        return LoopThread()

    @abstractmethod
    def opened(
        self, step: int, seats: Sequence[Seat]
    ) -> "AbstractAsyncContextManager[Mapping[str, asyncio.Future[S]]]":
        """The samples in the making, by id. Leaving it ends those that are not done."""

    @abstractmethod
    def demand(self) -> Demand:
        """What is still to be generated for all that is open."""

    @abstractmethod
    def own_metrics(self, played: Sequence[S]) -> dict[str, float]:
        """Beside those of every source."""

    def expire(self) -> None:
        """Called several times a second: end what takes too long."""

    def begin(self, step: int, groups: int | None = None) -> Begun[S]:
        start, done = time.time(), self._loop.submit(self._play(step, groups or self.around.groups))
        return Begun(done, start, done_at(done))

    def finish(self, begun: Begun[S]) -> Samples:
        """It ends in time by itself, unless something blocks the thread of all."""
        generator, limit_s = self.around.generator(), self.around.timeout_s + _GRACE_S
        deadline = generator.devices_s + limit_s
        while not wait([begun.done], timeout=_POLL_S).done:
            if generator.devices_s > deadline:
                raise WaitTimeoutError(
                    f"the thread of the {self._what}s did not answer within {limit_s:g} s{self.stuck_hint}"
                )
        played = begun.done.result()
        self._patience.look_at(played)
        seconds, tokens = begun.done_at() - begun.time, sum(sample.generated for sample in played)
        metrics = {
            "rollout_s": seconds,
            "tokens": float(tokens),
            "tokens_per_s": per_s(tokens, seconds),
            "turns": mean([len(sample.turns) for sample in played]),
            **self.own_metrics(played),
        }
        samples = [judged(sample, self._failure_reward) for sample in played]
        return Samples(samples, self.around.group_size, measured(samples, metrics))

    async def _play(self, step: int, groups: int) -> list[S]:
        places = [self.around.place(step * self.around.groups + i) for i in range(groups)]
        tasks = [(f"episodes/{step}/{i}", place) for i, place in enumerate(places)]
        seats = [Seat(f"{task}/{k}", task, place) for task, place in tasks for k in range(self.around.group_size)]
        async with self.opened(step, seats) as open_:
            try:
                await self._until_done(step, open_)
                return [sample.result() for sample in open_.values()]
            except BaseException as error:  # raised again
                reason = error if isinstance(error, Exception) else RlixError("the job is ending")
                self.around.generator().abandon(reason)
                raise

    async def _until_done(self, step: int, open_: "Mapping[str, asyncio.Future[S]]") -> None:
        generator, pending = self.around.generator(), set(open_.values())
        deadline = generator.devices_s + self.around.timeout_s
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for sample in done:
                sample.result()  # who plays does not raise here: what does is ours
            if self.around.stop.is_set():
                raise InterruptedError("the job was asked to stop")
            if generator.devices_s > deadline:
                names = ", ".join([id for id, sample in open_.items() if sample in pending][:8])
                raise WaitTimeoutError(
                    f"step {step}: {len(pending)} episodes did not end within {self.around.timeout_s:g} s with "
                    f"devices: {names}"
                )
            self.expire()
            generator.expect(self.demand())

    def close(self) -> None:
        self._loop.close()


def judged(sample: S, failure_reward: float | None) -> S:
    """A failed sample with the reward for that, or one that does not count."""
    if not sample.failed:
        return sample
    if failure_reward is None:
        return replace(sample, counts=False)
    turns = tuple(replace(turn, reward=0.0) for turn in sample.turns)  # what it got before it failed is not paid
    return replace(sample, turns=turns, reward=failure_reward, counts=True)
