"""Prompts from the user's own files, in an order that depends on the job's seed alone."""

import json
import logging
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlix.pipeline.sources.judge import Verdict
from rlix.pipeline.sources.panel import Asked, Panel
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.tasks.base import Prompt, Task, random_stream
from rlix.pipeline.spec.columns import PARQUET, column_problems
from rlix.pipeline.spec.source import DataSpec, RewardSpec
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SHOWN = 5


class Rows(Protocol):
    """Rows by number; a `datasets.Dataset`, or a list of dicts."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class DataTask(Task):
    """The task over a table with a prompt and an answer in each row.

    Every epoch is a new shuffle of all rows that are used; step k continues where step k-1 ended. Prompts go through
    the tokenizer's chat template when it has one.

    Args:
        longest_prompt: rows with more tokens are left out.
        stop: set when the job should end.

    Raises:
        SpecError: rows that cannot be used, the first few of them by number, or none that can be.
    """

    def __init__(
        self,
        data: DataSpec,
        rows: Rows,
        rewards: Sequence[RewardSpec],
        tokenizer: "PreTrainedTokenizerBase",
        longest_prompt: int | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._data, self._rows, self._tokenizer = data, rows, tokenizer
        self._used = self._usable(longest_prompt)
        self._panel = Panel(rewards, stop=stop)
        self._shuffled = lru_cache(maxsize=4)(self._shuffle)

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._take("prompts", seed, step, n)

    def supervised(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._take("supervised", seed, step, n)

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> Reward:
        (verdict,) = self.judge([(prompt, completion_ids)])
        if isinstance(verdict, Reward):
            return verdict
        raise ValueError(verdict)

    def judge(self, answers: Sequence[tuple[Prompt, Sequence[int]]]) -> list[Verdict]:
        texts = self._tokenizer.batch_decode([list(ids) for _, ids in answers], skip_special_tokens=True)
        return self._panel.judge([Asked(p, text, ids) for (p, ids), text in zip(answers, texts, strict=True)])

    def close(self) -> None:
        self._panel.close()

    def _usable(self, longest_prompt: int | None) -> list[int]:
        """Numbers of the rows that are not too long; every row is looked at before anything starts."""
        used, problems = [], []
        for row in range(len(self._rows)):
            try:
                length = len(self._prompt("", row).prompt_ids)
            except SpecError as error:
                problems.append(str(error))
                if len(problems) == _SHOWN:
                    break
                continue
            if longest_prompt is None or length <= longest_prompt:
                used.append(row)
        if problems:
            raise SpecError("\n".join(problems))
        if left_out := len(self._rows) - len(used):
            logger.warning(
                "%s: %d rows of %d are left out: their prompts have more than %s tokens",
                self._data.path,
                left_out,
                len(self._rows),
                longest_prompt,
            )
        if not used:
            raise SpecError(
                f"{self._data.path}: every prompt has more than {longest_prompt} tokens; raise "
                "source.data.max_prompt_tokens, lower rollout.max_new_tokens, or use another model"
            )
        return used

    def _take(self, stream: str, seed: int, step: int, n: int) -> list[Prompt]:
        result = []
        for i in range(n):
            epoch, position = divmod(step * n + i, len(self._used))
            result.append(self._prompt(f"{stream}/{step}/{i}", self._shuffled(stream, seed, epoch)[position]))
        return result

    def _shuffle(self, stream: str, seed: int, epoch: int) -> list[int]:
        order = list(self._used)
        random_stream("data", stream, seed, epoch).shuffle(order)
        return order

    def _prompt(self, id: str, row: int) -> Prompt:
        values = self._rows[row]
        given = values.get(self._data.prompt)
        answer = "" if self._data.answer is None else values.get(self._data.answer)
        if not given:
            raise SpecError(f"{self._data.path}: row {row}: column {self._data.prompt!r} is empty")
        if answer is None:
            raise SpecError(f"{self._data.path}: row {row}: column {self._data.answer!r} is empty")
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        answer_ids: list[int] = []
        if self._data.answer is not None:
            answer_ids = [*self._encode(str(answer), row, special=False), self._tokenizer.eos_token_id]
        others = {k: v for k, v in values.items() if k not in (self._data.prompt, self._data.answer)}
        return Prompt(id, text, tuple(self._encode_prompt(given, row)), str(answer), tuple(answer_ids), others)

    def _encode_prompt(self, given: Any, row: int) -> list[int]:
        if self._tokenizer.chat_template is None:
            if not isinstance(given, str):
                raise SpecError(
                    f"{self._data.path}: row {row}: column {self._data.prompt!r} holds a {type(given).__name__}, and "
                    "the model's tokenizer has no chat template; give the prompt as text"
                )
            return self._encode(given, row, special=True)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._encode(str(text), row, special=False)  # the template has put the special tokens in

    def _encode(self, text: str, row: int, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            raise SpecError(
                f"{self._data.path}: row {row}: the model's tokenizer does not know every character of {text!r}; "
                "add them to model.alphabet, or use another model"
            )
        return ids


def load_rows(data: DataSpec) -> Rows:
    """The table at `data.path`, memory-mapped. Raises SpecError when it cannot be read or lacks what the spec names."""
    if problems := list(column_problems(data)):
        raise SpecError("\n".join(f"{p.field}: {p.message}" for p in problems))
    import datasets

    path = Path(data.path)
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
            rows = loaded[data.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            read = datasets.Dataset.from_parquet if path.suffix in PARQUET else datasets.Dataset.from_json
            rows = read(str(path))
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise SpecError(f"source.data.path: {path} cannot be read as a table: {error.__cause__ or error}") from error
    if len(rows) == 0:
        raise SpecError(f"source.data.path: {path} holds no rows")
    result: Rows = rows
    return result
