"""What a user might write in a file of theirs: a task, an algorithm, a source, a schedule, a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rlix.pipeline import Trainer
from rlix.pipeline.algorithms import Algorithm, Estimate
from rlix.pipeline.samples import Answer, End, Sample, Samples, Turn
from rlix.pipeline.schedules import Schedule
from rlix.pipeline.sources import Seat, Source
from rlix.pipeline.sources.tasks import Prompt, Task


def plays(call: Any, more: int) -> float:
    """An agent."""
    return float(more)


def talks(call: Any) -> float:
    """An agent that asks once, and likes long answers."""
    asked = {"messages": [{"role": "user", "content": str(call.seed % 10)}]}
    headers = {"Authorization": f"Bearer {call.api_key}"}
    answer = httpx.post(f"{call.base_url}/chat/completions", json=asked, headers=headers, timeout=300)
    return float(len(answer.raise_for_status().json()["choices"][0]["message"]["content"]))


class Count(Task):
    def __init__(self, tokenizer: Any, *, up_to: int = 3) -> None:
        self._tokenizer, self._up_to = tokenizer, up_to

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        ids = tuple(self._tokenizer.encode(f"{self._up_to}>"))
        return [Prompt(f"count/{step}/{i}", f"{self._up_to}>", ids, "", ()) for i in range(n)]

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float:
        return min(len(completion_ids), self._up_to) / self._up_to


class RefusesStepOne(Count):
    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        if step == 1:
            raise ValueError("no prompts today")
        return super().prompts(seed, step, n)


@dataclass(frozen=True)
class BestOptions:
    sharpness: float
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0


class Best(Algorithm):
    Options = BestOptions

    def estimate(self, samples: Samples, batch: Any) -> Estimate:
        groups = self.rewards(samples).view(-1, samples.group_size) * self.options.sharpness
        return Estimate((groups.softmax(dim=1) - 1 / samples.group_size).flatten())


class BreaksInStepOne(Best):
    steps = 0

    def estimate(self, *given: Any) -> Estimate:
        self.steps += 1
        return super().estimate(*given)

    def policy_loss(self, *given: Any) -> Any:
        if self.steps == 2:
            raise RuntimeError("no loss today")
        return super().policy_loss(*given)


class Fixed(Source):
    """The same answers, whatever the policy."""

    longest = 2

    async def episode(self, seat: Seat) -> Sample:
        answer = Answer((4 + seat.number, 2), (-1.0, -1.0), (0, 0))
        return Sample(seat.id, (Turn((1, 5), answer),), float(seat.number), False, End.DONE)

    def supervised(self, step: int, size: int) -> Any:
        return [((1, 5, 6), (False, True, True))] * size


class Twice(Schedule):
    """Learns from every other step's samples twice."""

    def samples(self, step: int) -> Samples:
        if step % 2 == 0:
            self._kept = self.supply.source.finish(self.supply.source.begin(step))
        return self._kept


class Noted(Trainer):
    @dataclass(frozen=True)
    class Options:
        note: float = 0.0

    def step(self, step: int) -> Any:
        return {**super().step(step), "note": self.options.note}
