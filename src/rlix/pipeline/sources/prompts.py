"""Samples from prompts: one answer each, judged by the task's reward as soon as it is there."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rlix.pipeline.batch import Row
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import Sample, Turn, by_table, mean
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import Group, Seat, Source, Surroundings, ended
from rlix.pipeline.sources.making import Making
from rlix.pipeline.sources.place import Place
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.tasks.base import Prompt, Task
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Demand


@dataclass(frozen=True, slots=True)
class Judged(Sample):
    """`answered`: when its last token was there, in Unix seconds."""

    answered: float = field(default=0.0, compare=False)


class PromptSource(Source):
    """An episode is an answer to a prompt, and its reward. Rewards run while other answers are still generated."""

    what = "reward"
    waits_between_turns = False

    def __init__(self, task: Task, around: Surroundings) -> None:
        super().__init__(None, around)
        self._task = task
        self._drawn = lru_cache(maxsize=8)(lambda step: task.prompts(around.seed, step, around.groups))
        self._generating = 0

    @property
    def longest(self) -> int:
        return self.around.sampling.max_new_tokens

    @property
    def different(self) -> int | None:
        return self._task.different

    def group(self, step: int, number: int) -> Group:
        drawn = self._drawn(step)
        if number >= len(drawn):
            raise RlixError(f"the task gave {len(drawn)} prompts for step {step}, not {self.around.groups}")
        return Group(drawn[number].id, Place(self.around.split), drawn[number])

    async def episode(self, seat: Seat) -> Judged:
        prompt: Prompt = seat.group.about
        trajectory = Trajectory(
            seat.id, prompt.prompt_ids, stream_seed(self.around.seed, seat.id), self.around.sampling
        )
        self._generating += 1
        try:
            answer, end = ended(await self.generated(seat.step, trajectory), self.around.ends)
        finally:
            self._generating -= 1
        answered = time.time()
        verdict = await self._task.judge(prompt, answer.token_ids, seat.number)
        turns = (Turn(prompt.prompt_ids, answer),)
        made = Judged(seat.id, turns, 0.0, False, end, table=prompt.table, answered=answered)
        if not isinstance(verdict, Reward):
            return replace(made, error=verdict)
        reward, exact, parts, said = verdict.reward, verdict.exact, verdict.parts, verdict.answer
        return replace(made, reward=reward, exact=exact, parts=parts, answer=said)

    def demand(self) -> Demand:
        """What waits for its reward needs no device."""
        return Demand(self._generating, self._generating * self.longest)

    def own_metrics(self, samples: Sequence[Any], making: Making) -> dict[str, float]:
        """Where there are several rewards, the mean of each; where there are several tables, the outcome of each."""
        last = max((sample.answered for sample in making.samples), default=making.ended)
        parts: dict[str, list[float]] = {}
        for name, value in (part for sample in samples for part in sample.parts):
            parts.setdefault(f"reward_{name}", []).append(value)
        return {
            "rollout_s": last - making.began,
            "reward_s": making.ended - last,
            "reward_failed": float(sum(sample.failed for sample in samples)),
            **{name: mean(values) for name, values in parts.items()},
            **by_table(samples),
        }

    def supervised(self, step: int, size: int) -> list[Row]:
        examples = self._task.supervised(self.around.seed, step, size)
        return [
            ((*e.prompt_ids, *e.answer_ids), (False,) * len(e.prompt_ids) + (True,) * len(e.answer_ids))
            for e in examples
        ]

    async def end(self) -> None:
        await self._task.close()
