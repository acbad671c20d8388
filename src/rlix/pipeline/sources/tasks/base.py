"""What a task is: prompts, a reward, and examples for a supervised warm-up."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.judge import Verdict, attempted
from rlix.pipeline.sources.rewards import Reward


@dataclass(frozen=True, slots=True)
class Prompt:
    """`id` is unique within a job. `answer_ids` ends with the end-of-sequence token; it is empty without an answer.
    `columns`: what else the row holds; `table`: that it is from, by name, where there are several."""

    id: str
    text: str
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""


class Task(ABC):
    """Everything here is a pure function of its arguments, so that neither resuming nor sharing changes the data."""

    @property
    def different(self) -> int | None:
        """How many prompts there are before the same come again; None: there is always another, or nobody knows."""
        return None

    @abstractmethod
    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        """The `n` prompts of training step `step`."""

    @abstractmethod
    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float | Reward:
        """`completion_ids` includes the end-of-sequence token when the model produced it. What it raises costs the
        sample."""

    def supervised(self, seed: int, step: int, n: int) -> list[Prompt]:
        """The `n` examples of warm-up step `step`: the model learns `answer_ids` after `prompt_ids`."""
        raise NotImplementedError(f"{type(self).__name__} has no 'supervised': remove the section warmup, or add it")

    async def judge(self, prompt: Prompt, completion_ids: Sequence[int], number: int = 0) -> Verdict:
        """The reward of the prompt's completion of this number, or why there is none; on a thread, in turn."""
        call = partial(attempted, f"reward for prompt {prompt.id}", partial(self.reward, prompt, completion_ids))
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self) -> None:
        """The job ends: end what was started."""

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "reward")


def random_stream(*key: str | int) -> random.Random:
    """A random source that depends on `key` alone: the same on every machine, in every process, in any order."""
    return random.Random(stream_seed(*key))
