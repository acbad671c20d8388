"""What a source is: episodes of a step, made on whatever devices the job has at the moment."""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlix.pipeline.batch import Row
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import Answer, End, Sample, Samples, measured, per_s
from rlix.pipeline.sources.loop import LoopThread
from rlix.pipeline.sources.making import Making, chosen
from rlix.pipeline.sources.place import TRAIN, Place
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import Demand

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlix.pipeline.ends import Ends

logger = logging.getLogger(__name__)

_HOPELESS_STEPS = 3
_POLL_S = 0.2
_GRACE_S = 60.0

S = TypeVar("S", bound=Sample)
T = TypeVar("T")
_asked_by_me: "ContextVar[list[Trajectory] | None]" = ContextVar("what this sample had generated", default=None)


class SourceFailedError(RlixError):
    """Every sample failed: there is nothing to learn from."""


class Generator(Protocol):
    """What generates trajectories: a `RolloutManager`. `purpose` is that of the trajectories that are meant."""

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]": ...

    @property
    def devices_s(self) -> float: ...

    def expect(self, demand: Demand, purpose: str = "") -> None: ...

    def abandon(self, reason: Exception, purpose: str | None = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a source knows of its job.

    Args:
        groups: how many a step begins, and `group_size` how many samples each.
        spare: so many of them are not learnt from: those whose longest sample is longest.
        context: tokens that the model can see at once.
        ends: where answers end.
        timeout_s: longest that a step's samples may take, in seconds in which there are devices (`devices_s`).
        stop: set when the job should end.
        generator: where trajectories go to be generated.
        split: what its samples are for: to be learnt from, or held out.
        steps: of the whole job; what is of steps beyond is spare.
        resample_rounds: how often a group whose rewards do not differ is replaced by another.
        shared: what sources of one job have in common.
    """

    job: str
    seed: int
    groups: int
    group_size: int
    sampling: Sampling
    context: int
    tokenizer: "PreTrainedTokenizerBase"
    ends: "Ends"
    timeout_s: float
    stop: threading.Event
    generator: Callable[[], Generator]
    spare: int = 0
    split: str = TRAIN
    steps: int = 0
    resample_rounds: int = 0
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """What the samples of a group have in common. `about`: what its source drew for it."""

    task: str
    place: Place
    about: Any = None


@dataclass(frozen=True, slots=True)
class Seat:
    """A sample that is to be made: that of this number in its group."""

    step: int
    group: Group
    number: int

    @property
    def id(self) -> str:
        return f"{self.group.task}/{self.number}"


class Source(ABC):
    """Where samples come from: a group of episodes for each of the step's tasks, on one event loop on a thread of its
    own. A prompt with a reward is an episode of one turn. Everything is drawn from the job's seed and the step, so that
    neither resuming nor sharing changes it.

    Args:
        failure_reward: of a sample that failed; None: it does not count.
    """

    generates = True
    """Whether the policy makes them."""
    what = "sample"
    """Who makes them, as messages name it."""
    stuck_hint = ""
    """What to do when the thread does not answer."""
    waits_between_turns = True
    """Whether more is to be generated than what is submitted."""

    def __init__(self, options: Any, around: Surroundings, failure_reward: float | None = None) -> None:
        self.options, self.around = options, around
        self._failure_reward = failure_reward
        self._loop = self.make_loop()
        self._patience = Patience(around.job, self.what, paid=failure_reward is not None)
        self._asked: list[tuple[int, Trajectory, asyncio.Future[Future[Trajectory]]]] = []
        self._under_way = 0

    # ---- what a source of yours writes -----------------------------------------------------------------------

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens that the policy can generate in one sample."""

    @abstractmethod
    async def episode(self, seat: Seat) -> Sample:
        """One sample, from beginning to reward. What fails in it is the sample's `error`; what this raises ends the
        step."""

    def group(self, step: int, number: int) -> Group:
        """What that group of the step is about; steps beyond the job's last are spare ones."""
        place = Place(self.around.split, step * self.around.groups + number, self.around.seed)
        return Group(f"episodes/{step}/{number}", place)

    def supervised(self, step: int, size: int) -> list[Row]:
        """The right answers of one warm-up step."""
        raise SpecError(f"warmup: {type(self).__name__} has no right answers to learn from; remove the section warmup")

    @property
    def different(self) -> int | None:
        """How many groups a step can have before the same comes again; None: there is always another."""
        return None

    def demand(self) -> Demand:
        """What is still to be generated for all that is open."""
        return Demand(self._under_way, self._under_way * self.longest)

    def own_metrics(self, samples: Sequence[Any], making: Making) -> dict[str, float]:
        """Beside those of every source. `samples`: without those that were drawn in place of others."""
        return {}

    def make_loop(self) -> LoopThread:
        """What they are made on."""
        return LoopThread()

    def expire(self) -> None:
        """Called several times a second: end what takes too long."""

    async def end(self) -> None:
        """The job ends: the last on the loop."""

    # ---- called by schedules ---------------------------------------------------------------------------------

    def begin(self, step: int, groups: int | None = None) -> Making:
        """Start to make the samples of step `step`, or of the first `groups` of its groups, beside whatever else runs.

        What can be generated at once is submitted when this returns.
        """
        spare = self.around.spare if groups is None else 0
        making = Making(step, self.around.resample_rounds, time.time(), self.around.generator().devices_s, spare)
        making.made = self._answer(self._loop.submit(self._begin(making, groups or self.around.groups)), making)
        return making

    def finish(self, making: Making) -> Samples:
        """Wait for what `begin` started.

        Raises:
            WaitTimeoutError: it took too long. InterruptedError: the job was asked to stop.
        """
        self._answer(making.made, making)
        every = making.samples
        self._patience.look_at(every)
        first = [sample for group in making.rounds[0] for sample in group]
        seconds, tokens = making.ended - making.began, sum(sample.generated for sample in every)
        metrics = {"rollout_s": seconds, "tokens": float(tokens), **self.own_metrics(first, making)}
        metrics["tokens_per_s"] = per_s(tokens, metrics["rollout_s"])
        groups, replaced = chosen(making.rounds)
        if self.around.resample_rounds:
            metrics["resampled"] = float(replaced)
        samples = [sample for group in groups for sample in group]
        return Samples(samples, self.around.group_size, measured(first, metrics))

    def close(self) -> None:
        """Stop what was started."""
        self._loop.close(self.end())

    # ---- for sources -----------------------------------------------------------------------------------------

    async def generated(self, step: int, trajectory: Trajectory) -> Trajectory:
        """What the policy answers, on whatever devices the scheduler grants. What episodes ask for in one turn of the
        loop is submitted together."""
        loop = asyncio.get_running_loop()
        if (mine := _asked_by_me.get()) is not None:
            mine.append(trajectory)
        if not self._asked:
            loop.call_soon(self._submit)
        submitted: asyncio.Future[Future[Trajectory]] = loop.create_future()
        self._asked.append((step, trajectory, submitted))
        try:
            answer = await asyncio.shield(submitted)
        except asyncio.CancelledError:  # its episode was ended: nothing is to be generated for it
            submitted.add_done_callback(lambda done: done.result().cancel())
            raise
        return await asyncio.wrap_future(answer)

    def _submit(self) -> None:
        asked, self._asked = self._asked, []
        for step in dict.fromkeys(step for step, _, _ in asked):
            mine = [(trajectory, submitted) for at, trajectory, submitted in asked if at == step]
            answers = self.around.generator().submit(step, [trajectory for trajectory, _ in mine])
            for (_, submitted), answer in zip(mine, answers, strict=True):
                submitted.set_result(answer)

    # ---- below: on the loop, but for `_answer` ---------------------------------------------------------------

    def _answer(self, made: "Future[T]", making: Making) -> T:
        """It comes in time by itself, unless something blocks the thread of all."""
        generator, limit_s = self.around.generator(), self.around.timeout_s + _GRACE_S
        while not wait([made], timeout=_POLL_S).done:
            if generator.devices_s - making.looked_at > limit_s:
                raise WaitTimeoutError(
                    f"the thread of the {self.what}s did not answer within {limit_s:g} s{self.stuck_hint}"
                )
        return made.result()

    async def _begin(self, making: Making, groups: int) -> "Future[None]":
        try:
            for _ in range(groups):
                self._open(making, 0)
        except BaseException:  # raised again
            making.cancel()
            raise
        await asyncio.sleep(0)  # they begin
        self._submit()
        return self._loop.submit(self._play(making, groups))

    def _open(self, making: Making, further: int) -> int:
        """Begin a group of that round; its number there."""
        number = len(making.rounds[further])
        step = making.step + further * self.around.steps
        group = self.group(step, number)
        seats = [Seat(step, group, k) for k in range(self.around.group_size)]
        asked: list[list[Trajectory]] = [[] for _ in seats]
        begun = [self._episode(seat, of_one) for seat, of_one in zip(seats, asked, strict=True)]
        making.open[further, number] = {
            seat.id: asyncio.ensure_future(one) for seat, one in zip(seats, begun, strict=True)
        }
        if further == 0:
            making.asked[number] = asked
        making.rounds[further].append([])
        return number

    async def _episode(self, seat: Seat, asked: list[Trajectory]) -> Sample:
        _asked_by_me.set(asked)
        self._under_way += 1
        try:
            return judged(await self.episode(seat), self._failure_reward)
        finally:
            self._under_way -= 1

    async def _play(self, making: Making, groups: int) -> None:
        waiting = {asyncio.ensure_future(self._group(making, 0, number)) for number in range(groups)}
        deadline, pending = making.looked_at + self.around.timeout_s, waiting
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                for group in done:
                    group.result()  # an episode does not raise for its player: what does is ours
                making.give_up_stragglers()
                self._look(making, deadline)
            making.leave_out_spare()
            making.ended = time.time()
        except BaseException as error:  # raised again
            reason = error if isinstance(error, Exception) else RlixError("the job is ending")
            self.around.generator().abandon(reason)
            raise
        finally:
            for group in waiting:
                group.cancel()
            await asyncio.gather(*waiting, *making.cancel(), return_exceptions=True)

    async def _group(self, making: Making, further: int, number: int) -> None:
        """Until its samples are there, and those of a group in its place when their rewards do not differ."""
        try:
            samples = await asyncio.gather(*making.open[further, number].values())
        except asyncio.CancelledError:
            if further or number not in making.given_up:
                raise
            return
        making.rounds[further][number] = samples
        if making.needs_another(further, samples):
            await self._group(making, further + 1, self._open(making, further + 1))

    def _look(self, making: Making, deadline: float) -> None:
        generator, demand = self.around.generator(), self.demand()
        making.looked_at = generator.devices_s
        if self.around.stop.is_set():
            raise InterruptedError("the job was asked to stop")
        if demand.trajectories and making.looked_at > deadline:
            late = making.late
            raise WaitTimeoutError(
                f"step {making.step}: {len(late)} episodes did not end within {self.around.timeout_s:g} s with "
                f"devices: {', '.join(late[:8])}"
            )
        self.expire()
        if self.waits_between_turns:
            generator.expect(self.demand())


def ended(trajectory: Trajectory, ends: "Ends") -> tuple[Answer, End]:
    """What was generated, up to the first string that ends it, and whether it ended by itself."""
    kept = ends.kept(trajectory.token_ids)
    ids, logprobs = tuple(trajectory.token_ids[:kept]), tuple(trajectory.logprobs[:kept])
    cut_off = kept is None and trajectory.finish_reason == "length"
    answer = Answer(ids, logprobs, tuple(trajectory.versions[:kept]), cut_off)
    return answer, End.LENGTH if cut_off else End.DONE


def judged(sample: S, failure_reward: float | None) -> S:
    """A failed sample with the reward for that, or one that does not count."""
    if not sample.failed:
        return sample
    if failure_reward is None:
        return replace(sample, counts=False)
    turns = tuple(replace(turn, reward=0.0) for turn in sample.turns)  # what it got before it failed is not paid
    return replace(sample, turns=turns, reward=failure_reward, counts=True)


@dataclass(slots=True)
class Patience:
    """Notices when everything fails: at once, or where a failure is a reward that is learnt from (`paid`), when that
    goes on for steps."""

    job: str
    what: str
    paid: bool = False
    failed: int = field(default=0)

    def look_at(self, samples: Sequence[Sample]) -> None:
        """Raises SourceFailedError when every sample of a step has failed, or `paid`, of `_HOPELESS_STEPS` in a row."""
        if not all(sample.failed for sample in samples):
            self.failed = 0
            return
        self.failed += 1
        reason = f"the first, {samples[0].id}: {samples[0].error}"
        if not self.paid:
            raise SourceFailedError(f"every {self.what} of a step failed, {reason}")
        logger.warning("%s: every %s of a step failed, %s", self.job, self.what, reason)
        if self.failed >= _HOPELESS_STEPS:
            raise SourceFailedError(f"every {self.what} of {self.failed} steps in a row failed, {reason}")
