"""Prompts from the user's own files, in an order that depends on the job's seed alone."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from rlix.pipeline.chat import template_of
from rlix.pipeline.sources.judge import Verdict
from rlix.pipeline.sources.panel import Asked, Panel
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.tables import Mixture, Row, Rows, Shuffled, Streamed, Table, usable
from rlix.pipeline.sources.tasks.base import Prompt, Task
from rlix.pipeline.spec.rows import SHOWN, place
from rlix.pipeline.spec.source import ChatSpec, DataSpec, RewardSpec, TableSpec
from rlix.pipeline.tokenizer import encoded
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class DataTask(Task):
    """The task over tables with a prompt and an answer in each row.

    Every epoch is a new shuffle of all rows that are used; step k continues where step k-1 ended. Prompts go through
    the tokenizer's chat template when it has one.

    Args:
        tables: one for each of `data.tables`: rows by number, or a stream.
        longest_prompt: rows with more tokens are left out.
        longest_answer: rows whose answers have more tokens are told of, where only the whole answer is right.
        stop: set when the job should end.
        group_size: how many completions of each prompt are judged.

    Raises:
        SpecError: rows that cannot be used, the first few of them by file and line, or none that can be; `chat` is for
            a tokenizer with a template.
    """

    def __init__(
        self,
        data: DataSpec,
        tables: Sequence[Any],
        rewards: Sequence[RewardSpec],
        tokenizer: "PreTrainedTokenizerBase",
        longest_prompt: int | None = None,
        stop: threading.Event | None = None,
        chat: ChatSpec | None = None,
        longest_answer: int | None = None,
        group_size: int = 1,
    ) -> None:
        self._data, self._tokenizer, self._longest = data, tokenizer, longest_prompt
        self._chat, self._skipped = chat or ChatSpec(), 0
        self._template = template_of(tokenizer, self._chat)
        if self._template is None and (self._chat.system is not None or self._chat.options):
            given = "options" if self._chat.system is None else "system"
            raise SpecError(
                f"source.chat.{given}: is not used, for the model's tokenizer has no chat template: the prompts are "
                "read as they are; remove this, or give a template with source.chat.template"
            )
        exact = bool(rewards) and all(reward.name == "exact_match" for reward in rewards)
        self._longest_answer = longest_answer if exact else None
        self._mixture = Mixture(data.weights)
        self._tables = [self._table(number, data.tables[number], rows) for number, rows in enumerate(tables)]
        self._panel = Panel(rewards, group_size, stop)

    @property
    def different(self) -> int | None:
        """Not known of streams, nor where tables are mixed by weight."""
        first, *others = self._tables
        return len(first) if isinstance(first, Shuffled) and not others else None

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._take("prompts", seed, step, n)

    def supervised(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._take("supervised", seed, step, n)

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> Reward:
        raise NotImplementedError("rewards of data are asked with 'judge'")

    async def judge(self, prompt: Prompt, completion_ids: Sequence[int], number: int = 0) -> Verdict:
        text = cast(str, self._tokenizer.decode(list(completion_ids), skip_special_tokens=True))
        return await self._panel.judge(Asked(prompt, text, completion_ids, number))

    async def close(self) -> None:
        await self._panel.close()

    def _table(self, number: int, spec: TableSpec, rows: Any) -> Table:
        if spec.streaming:
            return Streamed(rows, partial(self._can_use, spec), spec.path, number)
        return Shuffled(rows, self._usable(spec, rows), number)

    def _usable(self, spec: TableSpec, rows: Rows) -> list[int]:
        too_long = set[int]()

        def length(number: int, where: str) -> int:
            prompt = self._prompt("", spec, where, rows[number])
            if self._longest_answer is not None and len(prompt.answer_ids) - 1 > self._longest_answer:
                too_long.add(number)
            return len(prompt.prompt_ids)

        fix = "raise source.data.max_prompt_tokens, lower rollout.max_new_tokens, or use another model"
        used = usable(spec.path, len(rows), self._longest, length, what="prompt", fix=fix)
        if late := [number for number in used if number in too_long]:
            logger.warning(
                "%s: %s of %s can hardly be exact: the answer has more than the %s tokens of max_new_tokens; raise it",
                place(spec.path, late[0]),
                f"this row and {len(late) - 1} others" if len(late) > 1 else "this row",
                len(rows),
                self._longest_answer,
            )
        return used

    def _can_use(self, spec: TableSpec, name: str, row: Row) -> bool:
        """Of a stream, whose rows are seen only when their turn has come."""
        if (problem := self._problem(spec, f"{spec.path}: {name}", row)) is None:
            return True
        self._skipped += 1
        if self._skipped <= SHOWN:
            logger.warning("left out: %s", problem)
        return False

    def _problem(self, spec: TableSpec, where: str, row: Row) -> str | None:
        try:
            length = len(self._prompt("", spec, where, row).prompt_ids)
        except SpecError as error:
            return str(error)
        if self._longest is None or length <= self._longest:
            return None
        return f"{where}: its prompt has {length} tokens, more than {self._longest}"

    def _take(self, stream: str, seed: int, step: int, n: int) -> list[Prompt]:
        result = []
        for i in range(n):
            number, position = self._mixture.place(stream, seed, step * n + i)
            name, row = self._tables[number].row(stream, seed, position)
            prompt = self._prompt(f"{stream}/{step}/{i}", self._data.tables[number], name, row)
            result.append(replace(prompt, table=self._data.names[number]))
        return result

    def _prompt(self, id: str, spec: TableSpec, where: str, values: Row) -> Prompt:
        given = values.get(spec.prompt)
        answer = "" if spec.answer is None else values.get(spec.answer)
        if not given:
            raise SpecError(f"{where}: column {spec.prompt!r} is empty")
        if answer is None:
            raise SpecError(f"{where}: column {spec.answer!r} is empty")
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        answer_ids: tuple[int, ...] = ()
        if spec.answer is not None:
            ids = encoded(self._tokenizer, _text(answer), where, special=False)
            answer_ids = (*ids, int(self._tokenizer.eos_token_id))
        others = {k: v for k, v in values.items() if k not in (spec.prompt, spec.answer)}
        prompt_ids = self._encode_prompt(given, where, spec.prompt)
        return Prompt(id, text, prompt_ids, _text(answer), answer_ids, others)

    def _encode_prompt(self, given: Any, where: str, column: str) -> tuple[int, ...]:
        if self._template is None:
            if not isinstance(given, str):
                raise SpecError(
                    f"{where}: column {column!r} holds a {type(given).__name__}, and "
                    "the model's tokenizer has no chat template; give the prompt as text"
                )
            return encoded(self._tokenizer, given, where, special=True)
        system = [] if self._chat.system is None else [{"role": "system", "content": self._chat.system}]
        messages = [*system, {"role": "user", "content": given}] if isinstance(given, str) else given
        text = self._template.render(messages, f"{where}: column {column!r}")
        return encoded(self._tokenizer, text, where, special=False)  # the template has put the special tokens in


def _text(answer: Any) -> str:
    """As it was most likely written: reading JSON made 1 a 1.0 when another row has a fraction, and a day a moment."""
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        return str(int(answer))
    if isinstance(answer, datetime) and answer.time() == time():
        return answer.date().isoformat()
    return str(answer)
