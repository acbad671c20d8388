"""Tasks of the `reasoning-gym` package by name: one question and one answer, which the package judges."""

import json
import threading
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.environments.base import Action, Instance, Message, Transition
from rlix.pipeline.sources.environments.gym import in_thread
from rlix.pipeline.sources.place import EVALUATION, Place
from rlix.protocol.errors import SpecError

_HELD_OUT = 8  # of so many questions one
_drawing = threading.Lock()  # some data sets change themselves while they draw


class ReasoningEnvironment:
    """Rows of `reasoning_gym.create_dataset(dataset, size=rows, seed=seed, **options)`, in epochs.

    An eighth of all questions, by a hash of their text, are for evaluations, and the others are trained on: a question
    that the data set has twice is never on both sides.

    Args:
        system: which of the package's `SYSTEM_PROMPTS` comes first; they ask for the answer between tags, and nothing
            else is judged. None: no words of its own, and the whole text is the answer.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        dataset: str,
        rows: Annotated[int, Field(ge=1)] = 10_000,
        seed: int = 0,
        system: str | None = "default",
        **options: Any,
    ) -> None:
        self._place, self._rows, self._system = instance.place, rows, system
        self._key = (dataset, rows, seed, json.dumps(options, sort_keys=True))
        self._entry: dict[str, Any] = {}

    async def reset(self, seed: int) -> tuple[Message, ...]:
        self._entry = await in_thread(lambda: _drawn(self._key, self._place, self._rows))
        question = {"role": "user", "content": self._entry["question"]}
        if self._system is None:
            return (question,)
        return {"role": "system", "content": _package().utils.SYSTEM_PROMPTS[self._system]}, question

    async def step(self, action: Action) -> Transition:
        score = await in_thread(lambda: self._judged(action.text))
        return Transition("", score, done=True, exact=score >= 1.0)

    async def close(self) -> None: ...

    def _judged(self, text: str) -> float:
        answer = text.strip() if self._system is None else _package().utils.extract_answer(text)
        return float(_dataset(self._key).score_answer(answer, self._entry))


def _drawn(key: tuple[str, int, int, str], place: Place, rows: int) -> dict[str, Any]:
    """The place's row, or the next one that is of its split."""
    first = place.row(rows)
    for row in range(first, first + rows):
        with _drawing:
            entry: dict[str, Any] = _dataset(key)[row % rows]
        held_out = stream_seed("held out", entry["question"]) % _HELD_OUT == 0
        if held_out == (place.split == EVALUATION):
            return entry
    raise ValueError(f"none of the {rows} rows of {key[0]!r} is for the split {place.split!r}: give it more 'rows'")


@lru_cache(maxsize=32)
def _dataset(key: tuple[str, int, int, str]) -> Any:
    name, rows, seed, options = key
    return _package().create_dataset(name, size=rows, seed=seed, **json.loads(options))


def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise SpecError(
            "environment: needs the package reasoning-gym; run 'pip install rlix[reasoning-gym]'"
        ) from error
    return reasoning_gym
