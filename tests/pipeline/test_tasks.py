import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rlix.pipeline.sources.choice import build_task
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.tasks.digits import copy_digits, sort_digits
from rlix.pipeline.spec.job import load_job
from rlix.pipeline.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789>=")
SORT, COPY = sort_digits(TOKENIZER, 4), copy_digits(TOKENIZER, 4)


def test_prompts_and_answers() -> None:
    (prompt,) = SORT.prompts(seed=0, step=0, n=1)
    digits = prompt.text[:-1]
    assert len(digits) == 4
    assert digits.isdigit()
    assert prompt.text.endswith(">")
    assert prompt.answer == "".join(sorted(digits))
    assert list(prompt.prompt_ids) == [1, *(4 + int(d) for d in digits), 14]
    assert list(prompt.answer_ids) == [*(4 + int(d) for d in prompt.answer), 2]
    (copied,) = COPY.prompts(seed=0, step=0, n=1)
    assert copied.answer == copied.text[:-1]


@given(st.integers(0, 1 << 40), st.integers(0, 10_000), st.integers(1, 20), st.integers(0, 20))
def test_prompts_depend_on_seed_and_step_alone(seed: int, step: int, n: int, more: int) -> None:
    assert SORT.prompts(seed, step, n) == sort_digits(TOKENIZER, 4).prompts(seed, step, n + more)[:n]


def test_streams_differ_by_seed_step_task_and_purpose() -> None:
    def texts(prompts: list) -> tuple[str, ...]:  # type: ignore[type-arg]
        return tuple(p.text for p in prompts)

    streams = [SORT.prompts(0, 0, 8), SORT.prompts(1, 0, 8), SORT.prompts(0, 1, 8), COPY.prompts(0, 0, 8)]
    streams.append(SORT.supervised(0, 0, 8))
    assert len({texts(s) for s in streams}) == 5
    assert len({p.id for step in range(3) for p in SORT.prompts(0, step, 8)}) == 24


def test_prompts_are_the_same_in_another_process() -> None:
    code = (
        "from rlix.pipeline.sources.tasks.base import random_stream;"
        "print(''.join(random_stream('sort_digits', 'prompts', 7, 3).choices('0123456789', k=4)))"
    )
    others = subprocess.check_output([sys.executable, "-c", code], text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert others.strip() == SORT.prompts(7, 3, 1)[0].text[:-1]


def test_reward() -> None:
    prompt = SORT.prompts(0, 0, 1)[0]
    assert SORT.reward(prompt, prompt.answer_ids) == Reward(1.0, True)
    assert SORT.reward(prompt, prompt.answer_ids[:-1]) == Reward(0.4, False)
    assert SORT.reward(prompt, ()) == Reward(0.0, False)


def test_a_job_builds_its_task() -> None:
    spec = load_job("copy_digits")
    assert spec.source.task is not None
    task = build_task(spec.source.task, TOKENIZER)
    assert task.prompts(spec.seed, 0, 4) == COPY.prompts(spec.seed, 0, 4)
