"""Verifiable rewards: how good a completion is, and whether it is exactly right."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Reward:
    """`parts`: the rewards that it is the weighted sum of, by name, when there are several; `answer`: what was judged
    in the completion, in one spelling, None where nothing was found: completions with the same answer agree."""

    reward: float
    exact: bool
    parts: tuple[tuple[str, float], ...] = ()
    answer: str | None = field(default=None, compare=False)


TextReward = Callable[[str, str, str], float | Reward]
"""(prompt, completion, answer) -> a number or a Reward. A plain number of at least 1.0 counts as exactly right."""

FLOAT32_MAX = 3.4028234663852886e38
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def token_match(completion_ids: Sequence[int], answer_ids: Sequence[int]) -> Reward:
    """Half for the share of answer tokens that stand in their place, half for being the answer, no more and no less.

    Both include the end-of-sequence token, so stopping in time is part of the answer.
    """
    right = sum(a == b for a, b in zip(completion_ids, answer_ids, strict=False))
    exact = tuple(completion_ids) == tuple(answer_ids)
    return Reward(0.5 * right / len(answer_ids) + 0.5 * exact, exact, answer=" ".join(map(str, completion_ids)))


def exact_match(prompt: str, completion: str, answer: str) -> Reward:
    """1 when the completion is the answer, white space at its ends aside."""
    given = completion.strip()
    exact = given == answer.strip()
    return Reward(float(exact), exact, answer=given)


def number_match(prompt: str, completion: str, answer: str) -> Reward:
    """1 when the last number in the completion equals the last number in the answer ("in all 1,200" is 1200)."""
    found, wanted = _last_number(completion), _last_number(answer)
    exact = found is not None and found == wanted
    return Reward(float(exact), exact, answer=None if found is None else repr(found))


TEXT_REWARDS: dict[str, TextReward] = {"exact_match": exact_match, "number_match": number_match}


def as_reward(value: float | Reward, source: str) -> Reward:
    """What a reward function returned, checked: it must be a finite number (or a Reward that holds one)."""
    given = value.reward if isinstance(value, Reward) else value
    if (reward := finite(given)) is None:
        raise ValueError(f"{source} returned {value!r}; a reward must be a finite number or a rlix Reward")
    if isinstance(value, Reward):
        return replace(value, reward=reward, exact=bool(value.exact))
    return Reward(reward, reward >= 1.0)


def finite(value: object) -> float | None:
    """A number of Python's, numpy's or torch's that is finite in float32, too, as training has it; None: it is none."""
    found = number(value)
    return found if found is not None and abs(found) <= FLOAT32_MAX else None  # which NaN is not


def number(value: object) -> float | None:
    """As `finite`, of any number."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several in one array, or too large for a float
        return None


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
