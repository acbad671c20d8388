"""Several rewards at once: weighted, side by side, each call of a user's own in a process and within its time."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlix.pipeline.sources.judge import FAILURES, Verdict, Waiting, attempted
from rlix.pipeline.sources.processes import Child, ProcessError, Processes
from rlix.pipeline.sources.rewards import TEXT_REWARDS, Reward, as_reward, token_match
from rlix.pipeline.sources.tasks.base import Prompt
from rlix.pipeline.spec.section import apart
from rlix.pipeline.spec.source import RewardSpec

logger = logging.getLogger(__name__)

_AT_ONCE = ("token_match", *TEXT_REWARDS)  # quick and safe: in this process
_PROCESSES = 4
_COROUTINES = 64
_HUNG_PER_CALL = 4
_GRACE_S = 5.0  # for a process to say that a coroutine was late


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion to judge, as text without special tokens and token by token. `number`: in its group."""

    prompt: Prompt
    completion: str
    completion_ids: Sequence[int]
    number: int = 0


class Panel:
    """Judges completions by all rewards of a job, each as soon as it is there. Lives on one event loop.

    A completion's reward is the sum by weight; whether it is right, and what it says, is the first reward's word. What
    fails, or takes longer than its `timeout_s`, costs the sample and is said.

    Args:
        group_size: how many completions of a prompt there will be.
        stop: once it is set, no reward of the user's is asked any more.
    """

    def __init__(self, rewards: Sequence[RewardSpec], group_size: int = 1, stop: threading.Event | None = None) -> None:
        self._names = apart([spec.name.rpartition(":")[2] for spec in rewards])
        own = [spec.target for spec in rewards if spec.name not in _AT_ONCE]
        self._processes = Processes(own)
        stop = stop or threading.Event()
        self._judges = [
            _Shipped(spec) if spec.name in _AT_ONCE else _Own(spec, group_size, self._processes, stop)
            for spec in rewards
        ]

    async def judge(self, asked: Asked) -> Verdict:
        verdicts = await asyncio.gather(*(judge.judge(asked) for judge in self._judges))
        if (failed := next((v for v in verdicts if isinstance(v, str)), None)) is not None:
            return failed
        given = [v for v in verdicts if isinstance(v, Reward)]
        total = sum(judge.spec.weight * reward.reward for judge, reward in zip(self._judges, given, strict=True))
        parts = tuple(zip(self._names, (reward.reward for reward in given), strict=True)) if len(given) > 1 else ()
        return Reward(total, given[0].exact, parts, given[0].answer)

    async def close(self) -> None:
        await self._processes.close()


class _Shipped:
    """A reward that answers there and then."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec

    async def judge(self, asked: Asked) -> Verdict:
        return attempted(_source(self.spec, asked.prompt), lambda: self._reward(asked))

    def _reward(self, asked: Asked) -> float | Reward:
        if self.spec.name == "token_match":
            return token_match(asked.completion_ids, asked.prompt.answer_ids)
        return TEXT_REWARDS[self.spec.name](asked.prompt.text, asked.completion, asked.prompt.answer)


@dataclass(slots=True)
class _Group:
    """Completions of one prompt, as they come; judged together when the last is there."""

    asked: list[Asked] = field(default_factory=list)
    verdicts: "asyncio.Future[dict[int, Verdict]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Own:
    """A reward in processes: a plain function has one to itself for each call, the calls of a coroutine share one."""

    def __init__(self, spec: RewardSpec, group_size: int, processes: Processes, stop: threading.Event) -> None:
        self.spec = spec
        self._group_size, self._processes, self._stop = group_size, processes, stop
        self._groups: dict[str, _Group] = {}
        self._starting = asyncio.Lock()
        self._shared: Child | None = None
        self._turns: asyncio.Semaphore | None = None  # known when it is known what the function is
        self._most = 1
        self._under_way = 0  # calls, with those that wait for their turn
        self._waiting: Waiting | None = None  # of a plain function whose user says no concurrency
        self._asked = 0  # calls so far
        self._hung = 0  # in a row
        self._given_up = 0  # calls up to this number are not made any more

    async def judge(self, asked: Asked) -> Verdict:
        if self.spec.per == "sample":
            (verdict,) = await self._judged([asked], asked.completion)
            return verdict
        group = self._groups.setdefault(asked.prompt.id, _Group())
        group.asked.append(asked)
        if len(group.asked) == self._group_size:
            del self._groups[asked.prompt.id]
            every = sorted(group.asked, key=lambda one: one.number)
            verdicts = await self._judged(every, [one.completion for one in every])
            group.verdicts.set_result({one.number: v for one, v in zip(every, verdicts, strict=True)})
        try:
            return (await group.verdicts)[asked.number]
        except asyncio.CancelledError:  # the same prompt may be asked again, and is not to find what is left of this
            if self._groups.get(asked.prompt.id) is group:
                del self._groups[asked.prompt.id]
            raise

    async def _judged(self, asked: Sequence[Asked], completion: str | list[str]) -> list[Verdict]:
        prompt, source = asked[0].prompt, _source(self.spec, asked[0].prompt)
        request = {
            "function": self.spec.target,
            "given": [prompt.text, completion, prompt.answer],
            "columns": dict(prompt.columns),
            "options": self.spec.options,
        }
        self._asked, self._under_way = self._asked + 1, self._under_way + 1
        try:
            problem = await self._call(request, self._asked)
        finally:
            self._under_way -= 1
        if isinstance(problem, list):
            return [self._checked(found, source, one) for found, one in zip(problem, asked, strict=True)]
        if isinstance(problem, str):
            return [f"{source} was not asked: {problem}"] * len(asked)
        reason = FAILURES.note(
            f"reward {self.spec.name}", f"{source} failed: {problem}", _texts(asked[0]), problem.trace
        )
        return [reason] * len(asked)

    def _checked(self, found: Sequence[Any], source: str, asked: Asked) -> Verdict:
        value, exact, answer = found
        try:
            return as_reward(value if exact is None else Reward(value, exact, answer=answer), source)
        except ValueError as error:  # not a finite number
            return FAILURES.note(f"reward {self.spec.name}", str(error), _texts(asked), "")

    async def _call(self, request: Mapping[str, Any], number: int) -> list[Any] | str | ProcessError:
        """Rewards; or why it was not asked; or how it failed."""
        if self._stop.is_set():
            return "the job is to stop"
        try:
            turns = self._turns or await self._begin(number)
            async with turns:
                if self._stop.is_set():
                    return "the job is to stop"
                if number <= self._given_up:  # or a step would take hours
                    return f"{self._hung} calls in a row had not returned in time"
                found = await self._in_process(request)
        except ProcessError as error:
            return error
        if found is None:
            self._hung += 1
            if self._hung >= _HUNG_PER_CALL * self._most:
                self._given_up = self._asked
            return ProcessError(f"it did not return within {self.spec.timeout_s:g} s")
        self._hung = 0
        return found

    async def _begin(self, number: int) -> asyncio.Semaphore:
        """Start the first process, which says what the function is. Who stands in the queue for that does not try for
        as long again, one after the other."""
        async with self._starting:
            if self._turns is None:
                if number <= self._given_up:
                    raise ProcessError("its process had not started")
                try:
                    child = await self._processes.take()
                except ProcessError:
                    self._given_up = self._asked
                    raise
                shares = child.loaded.get("asynchronous", {}).get(self.spec.target, False)
                self._shared = child if shares else None
                if not shares:
                    await self._processes.give_back(child)
                self._most = self.spec.concurrency or (_COROUTINES if shares else _PROCESSES)
                if not shares and self.spec.concurrency is None:
                    self._waiting = Waiting(self.spec.name, self._most)
                self._turns = asyncio.Semaphore(self._most)
            return self._turns

    async def _in_process(self, request: Mapping[str, Any]) -> list[Any] | None:
        """None: it was late."""
        if self._shared is None:
            child = await self._processes.take()
            try:
                return await self._answer(child, request, self.spec.timeout_s)
            finally:
                await self._processes.give_back(child)
        async with self._starting:
            if not self._shared.is_alive:
                await self._processes.give_back(self._shared, failed=True)
                self._shared = await self._processes.take()
            child = self._shared
        return await self._answer(child, request, self.spec.timeout_s + _GRACE_S)

    async def _answer(self, child: Child, request: Mapping[str, Any], limit_s: float) -> list[Any] | None:
        try:
            found = await asyncio.wait_for(child.ask("reward", timeout_s=self.spec.timeout_s, **request), limit_s)
        except TimeoutError:
            await (
                child.kill()
            )  # one that is shared blocks its loop: whoever else waits for it is told that it has ended
            return None
        if self._waiting is not None and self._under_way > self._most and (slow := self._waiting.note(*found["spent"])):
            logger.warning("%s", slow)
        return None if "late" in found else list(found["rewards"])


def _source(spec: RewardSpec, prompt: Prompt) -> str:
    return f"reward {spec.name} for prompt {prompt.id}"


def _texts(asked: Asked) -> dict[str, str]:
    return {"prompt": asked.prompt.text, "completion": asked.completion, "answer": asked.prompt.answer}
