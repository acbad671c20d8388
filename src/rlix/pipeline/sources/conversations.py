"""Samples that are given, not generated: conversations to learn to go on with, or pairs of which one is preferred."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlix.pipeline.batch import Row
from rlix.pipeline.chat import template_of
from rlix.pipeline.samples import Answer, End, Sample, Turn
from rlix.pipeline.sources.base import Group, Seat, Source, Surroundings
from rlix.pipeline.sources.place import Place
from rlix.pipeline.sources.tables import Shuffled, read_table, usable
from rlix.pipeline.spec.source import ChatSpec, ConversationsSpec, TableSpec
from rlix.pipeline.tokenizer import encoded
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Demand
from rlix.protocol.spec_file import nearest

logger = logging.getLogger(__name__)

Messages = list[Mapping[str, Any]]
_WHERE = "source.conversations"


class ConversationSource(Source):
    """A row is a sample, or, where groups are of two, the one that is chosen and the one that is rejected; a table is
    seen in epochs. What the policy learns to say are the messages of the role `assistant`, each up to its end token.

    Raises:
        SpecError: the table has no such columns, or rows that cannot be used; the first few are named.
    """

    generates = False
    what = "row"
    waits_between_turns = False

    def __init__(self, spec: ConversationsSpec, around: Surroundings, chat: ChatSpec) -> None:
        super().__init__(spec, around)
        self._spec, self._chat = spec, chat
        self._template = template_of(around.tokenizer, chat)
        self._columns = (spec.chosen, spec.rejected) if around.group_size == 2 else (spec.answer or spec.messages,)
        rows = read_table(_WHERE, TableSpec(path=spec.path, config=spec.config, split=spec.split))
        self._check_columns(rows.column_names)
        self._table = Shuffled(rows, self._usable(rows))

    @property
    def longest(self) -> int:
        return self.around.context

    @property
    def different(self) -> int:
        return len(self._table)

    def group(self, step: int, number: int) -> Group:
        position = step * self.around.groups + number
        return Group(
            f"given/{step}/{number}",
            Place(self.around.split),
            self._table.row("prompts", self.around.seed, position),
        )

    async def episode(self, seat: Seat) -> Sample:
        """The first of a pair is the one that was chosen."""
        name, row = seat.group.about
        turns = self._turns(row, self._columns[seat.number], name, version=seat.step)
        return Sample(seat.id, turns, float(seat.number == 0), None, End.DONE)

    def demand(self) -> Demand:
        return Demand(0, 0)

    def supervised(self, step: int, size: int) -> list[Row]:
        found = [self._table.row("supervised", self.around.seed, step * size + i) for i in range(size)]
        samples = [Sample(name, self._turns(row, self._columns[0], name), 1.0, None, End.DONE) for name, row in found]
        return [(sample.token_ids, sample.from_policy) for sample in samples]

    # ---- rows --------------------------------------------------------------------------------------------------

    def _check_columns(self, columns: Sequence[str]) -> None:
        wanted = self._columns if self._columns == (self._spec.messages,) else (*self._columns, self._spec.prompt)
        for column in wanted:
            if column not in columns and not (column == self._spec.prompt and len(self._columns) == 2):
                there = f"{nearest(column, columns)} (it has {', '.join(columns)})"
                raise SpecError(f"{_WHERE}: {self._spec.path} has no column {column!r}{there}")

    def _usable(self, rows: Any) -> list[int]:
        def length(number: int, where: str) -> int:
            return max(sum(map(_length, self._turns(rows[number], column, where))) for column in self._columns)

        fix = "use a model with a longer context"
        return usable(self._spec.path, len(rows), self.around.context, length, what="row", fix=fix)

    def _turns(self, row: Mapping[str, Any], column: str, where: str, version: int = 0) -> tuple[Turn, ...]:
        given, asked = row.get(column), row.get(self._spec.prompt)
        if not given or not (asked or isinstance(given, list)):
            raise SpecError(f"{where}: column {column if not given else self._spec.prompt!r} is empty")
        if isinstance(given, str) and isinstance(asked, str) and self._template is None:
            eos = int(self.around.tokenizer.eos_token_id or 0)
            answer = (*self._encode(given, where), eos)
            return (Turn(self._encode(asked, where, special=True), _answer(answer, version)),)
        said = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
        before: Messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked or ())
        if self._chat.system is not None:
            before = [{"role": "system", "content": self._chat.system}, *before]
        return self._of_messages(before + list(said) if column != self._spec.messages else list(given), where, version)

    def _of_messages(self, messages: Messages, where: str, version: int) -> tuple[Turn, ...]:
        turns, done, carried = list[Turn](), "", tuple[int, ...]()
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, whole = (
                self._render(messages[:number], True, where),
                self._render(messages[: number + 1], False, where),
            )
            if not (before.startswith(done) and whole.startswith(before)):
                raise SpecError(
                    f"{where}: the model's chat template changes what was said before, so that turns cannot be told "
                    "apart; give a template of your own with source.chat.template"
                )
            read = (*carried, *self._encode(before[len(done) :], where))
            ids = self._encode(whole[len(before) :], where)
            ends = self.around.ends.token_ids
            end = next((at + 1 for at, id in enumerate(ids) if id in ends), len(ids))
            turns.append(Turn(read, _answer(ids[:end], version)))
            done, carried = whole, ids[end:]
        if not turns:
            raise SpecError(f"{where}: nobody has the role 'assistant', so there is nothing to learn")
        return tuple(turns)

    def _render(self, messages: Messages, asked: bool, where: str) -> str:
        if self._template is None:
            raise SpecError(f"{where}: messages need a chat template, and the model's tokenizer has none")
        return self._template.render(messages, where, asked=asked)

    def _encode(self, text: str, where: str, *, special: bool = False) -> tuple[int, ...]:
        return encoded(self.around.tokenizer, text, where, special=special)


def _answer(ids: Sequence[int], version: int) -> Answer:
    return Answer(tuple(ids), (0.0,) * len(ids), (version,) * len(ids))


def _length(turn: Turn) -> int:
    return len(turn.observation_ids) + len(turn.answer.token_ids)
