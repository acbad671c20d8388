"""Tasks on a few digits: small enough to learn in seconds on a CPU, real enough to need learning."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rlix.pipeline.sources.rewards import Reward, token_match
from rlix.pipeline.sources.tasks.base import Prompt, Task, random_stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_DIGITS = 32
Digits = Annotated[int, Field(ge=1, le=MOST_DIGITS)]
Spread = Annotated[float, Field(ge=0, le=2)]


class DigitsTask(Task):
    """The prompt is random digits and ">"; the answer is what `answer` makes of the digits, and the end token.

    Args:
        digits: of a prompt; with `spread`, their median.
        spread: sigma of their number's lognormal distribution, cut at 32; 0: always as many. A long tail has 1 or more.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[str], str],
        tokenizer: "PreTrainedTokenizerBase",
        digits: int = 4,
        spread: float = 0.0,
    ) -> None:
        self._name, self._answer, self._tokenizer, self._digits, self._spread = name, answer, tokenizer, digits, spread

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._draw("prompts", seed, step, n)

    def supervised(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._draw("supervised", seed, step, n)

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> Reward:
        return token_match(completion_ids, prompt.answer_ids)

    def _draw(self, stream: str, seed: int, step: int, n: int) -> list[Prompt]:
        source = random_stream(self._name, stream, seed, step)
        drawn = ["".join(source.choices("0123456789", k=self._count(source))) for _ in range(n)]
        texts, answers = [f"{digits}>" for digits in drawn], [self._answer(digits) for digits in drawn]
        prompt_ids = self._tokenizer(texts)["input_ids"]
        answer_ids = self._tokenizer(answers, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [
            Prompt(f"{stream}/{step}/{i}", texts[i], tuple(prompt_ids[i]), answers[i], (*answer_ids[i], end))
            for i in range(n)
        ]

    def _count(self, source: Random) -> int:
        if not self._spread:
            return self._digits
        return min(MOST_DIGITS, max(1, round(self._digits * source.lognormvariate(0.0, self._spread))))


def sort_digits(tokenizer: "PreTrainedTokenizerBase", digits: Digits = 4, spread: Spread = 0.0) -> DigitsTask:
    """4172> is answered by 1247."""
    return DigitsTask("sort_digits", lambda text: "".join(sorted(text)), tokenizer, digits, spread)


def copy_digits(tokenizer: "PreTrainedTokenizerBase", digits: Digits = 4, spread: Spread = 0.0) -> DigitsTask:
    """4172> is answered by 4172."""
    return DigitsTask("copy_digits", lambda text: text, tokenizer, digits, spread)
