"""What a task is: prompts, a reward, and examples for a supervised warm-up."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.rewards import Reward


@dataclass(frozen=True, slots=True)
class Prompt:
    """`id` is unique within a job. `answer_ids` ends with the end-of-sequence token; it is empty without an answer."""

    id: str
    text: str
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]


class Task(Protocol):
    """Everything here is a pure function of its arguments, so that neither resuming nor sharing changes the data."""

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        """The `n` prompts of training step `step`."""
        ...

    def supervised(self, seed: int, step: int, n: int) -> list[Prompt]:
        """The `n` examples of warm-up step `step`: the model learns `answer_ids` after `prompt_ids`."""
        ...

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> Reward:
        """`completion_ids` includes the end-of-sequence token when the model produced it."""
        ...


def random_stream(*key: str | int) -> random.Random:
    """A random source that depends on `key` alone: the same on every machine, in every process, in any order."""
    return random.Random(stream_seed(*key))
