import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.pipeline.sources.rewards import Reward, as_reward, exact_match, number_match, token_match
from rlix.pipeline.spec.named import import_object
from rlix.protocol.errors import SpecError

END = 2


@pytest.mark.parametrize(
    ("completion", "reward", "exact"),
    [
        ((7, 8, 9, END), 1.0, True),
        ((7, 8, 9), 0.375, False),  # never ended
        ((7, 8, 9, END, END), 0.5, False),  # went on after the end
        ((7, 0, 9, END), 0.375, False),
        ((8, 9, END), 0.0, False),  # right tokens in the wrong places
        ((), 0.0, False),
    ],
)
def test_token_match(completion: tuple[int, ...], reward: float, exact: bool) -> None:
    assert token_match(completion, (7, 8, 9, END)) == Reward(reward, exact)


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5), min_size=1))
def test_token_match_is_a_share_and_one_only_when_exact(completion: list[int], answer: list[int]) -> None:
    result = token_match(completion, answer)
    assert 0 <= result.reward <= 1
    assert (result.reward == 1) == result.exact == (completion == answer)


def test_text_rewards() -> None:
    assert exact_match("", " Paris\n", "Paris").exact
    assert exact_match("", "paris", "Paris") == Reward(0.0, False)
    assert number_match("", "so 3 * 400 = 1,200.", "#### 1200").exact
    assert number_match("", "-2.50", "-2.5").exact
    assert not number_match("", "2", "-2").exact
    assert not number_match("", "none", "none").exact


def test_what_a_function_returns_is_checked() -> None:
    assert as_reward(1, "f") == Reward(1.0, True)
    assert as_reward(0.5, "f") == Reward(0.5, False)
    assert as_reward(Reward(0.2, True), "f") == Reward(0.2, True)
    assert as_reward(np.float32(1), "f") == as_reward(torch.tensor(1), "f") == Reward(1.0, True)
    assert as_reward(Reward(np.float64(0.5), np.bool_(True)), "f") == Reward(0.5, True)  # type: ignore[arg-type]
    for wrong in (None, "1", 1j, 10**400, -1e39, torch.ones(2), math.nan, math.inf):
        with pytest.raises(ValueError, match="f returned"):
            as_reward(wrong, "f")  # type: ignore[arg-type]


def test_import_object() -> None:
    assert import_object("math:sqrt") is math.sqrt
    for name, message in {
        "math": "not of the form",
        "math:nothing": "has no 'nothing'",
        "no_such_module:f": "cannot be imported",
    }.items():
        with pytest.raises(SpecError, match=message):
            import_object(name)
