"""Samples that are given, not generated: conversations to learn to go on with, or pairs of which one is preferred."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlix.pipeline.batch import Row
from rlix.pipeline.chat import template_of
from rlix.pipeline.ends import Ends
from rlix.pipeline.samples import Answer, End, Sample, Turn
from rlix.pipeline.sources.base import Group, Seat, Source, Surroundings
from rlix.pipeline.sources.place import Place
from rlix.pipeline.sources.tables import Shuffled, read_table, usable
from rlix.pipeline.spec.columns import missing_columns
from rlix.pipeline.spec.source import ChatSpec, ConversationsSpec
from rlix.pipeline.tokenizer import encoded
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Demand

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[Mapping[str, Any]]


class Conversations:
    """A table whose rows are samples, or `pairs` of one that is chosen and one that is rejected. What the policy learns
    to say are the messages of the role `assistant`, each up to its end token.

    Args:
        at: where the job says it, for messages.

    Raises:
        SpecError: the table has no such columns, or rows that cannot be used; the first few are named.
    """

    def __init__(
        self,
        spec: ConversationsSpec,
        chat: ChatSpec,
        tokenizer: "PreTrainedTokenizerBase",
        ends: Ends,
        context: int,
        *,
        pairs: bool,
        at: str = "source.conversations",
    ) -> None:
        self._spec, self._chat, self._tokenizer, self._ends = spec, chat, tokenizer, ends
        self._template = template_of(tokenizer, chat)
        needed = spec.needed(pairs=pairs)
        self._answers = tuple(needed.values())[: 1 + pairs]
        rows = read_table(at, spec.table)
        if problems := list(missing_columns(at, spec.table, rows.column_names, needed)):
            raise SpecError("\n".join(f"{p.field}: {p.message}" for p in problems))

        def length(number: int, where: str) -> int:
            every = (self.turns((where, rows[number]), k) for k in range(len(self._answers)))
            return max(sum(map(_length, turns)) for turns in every)

        fix = "use a model with a longer context"
        self.table = Shuffled(rows, usable(spec.path, len(rows), context, length, what="row", fix=fix))

    def turns(self, named: tuple[str, Mapping[str, Any]], number: int, version: int = 0) -> tuple[Turn, ...]:
        """Of a row, and what to call it: its sample, or of a pair that of the number."""
        return self._turns(named[1], self._answers[number], named[0], version)

    def _turns(self, row: Mapping[str, Any], column: str, where: str, version: int = 0) -> tuple[Turn, ...]:
        given, asked = row.get(column), row.get(self._spec.prompt)
        if not given or not (asked or isinstance(given, list)):
            raise SpecError(f"{where}: column {column if not given else self._spec.prompt!r} is empty")
        for name, one in ((column, given), (self._spec.prompt, asked or "")):
            text = isinstance(one, str) and name != self._spec.messages
            if not (text or (isinstance(one, list) and all(isinstance(m, Mapping) for m in one))):
                raise SpecError(f"{where}: column {name!r} holds neither a text nor a list of messages: {one!r:.80}")
        if isinstance(given, str) and isinstance(asked, str) and self._template is None:
            eos = int(self._tokenizer.eos_token_id or 0)
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
            ends = self._ends.token_ids
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
        return encoded(self._tokenizer, text, where, special=special)


class ConversationSource(Source):
    """A sample is a row, or of groups of two the one that is chosen and the one that is rejected; seen in epochs."""

    generates = False
    what = "row"
    waits_between_turns = False

    def __init__(self, spec: ConversationsSpec, around: Surroundings, chat: ChatSpec) -> None:
        super().__init__(spec, around)
        pairs = around.group_size == 2
        self._given = Conversations(spec, chat, around.tokenizer, around.ends, around.context, pairs=pairs)

    @property
    def longest(self) -> int:
        return self.around.context

    @property
    def different(self) -> int:
        return len(self._given.table)

    def group(self, step: int, number: int) -> Group:
        position = step * self.around.groups + number
        row = self._given.table.row("prompts", self.around.seed, position)
        return Group(f"given/{step}/{number}", Place(self.around.split), row)

    async def episode(self, seat: Seat) -> Sample:
        """The first of a pair is the one that was chosen."""
        turns = self._given.turns(seat.group.about, seat.number, version=seat.step)
        return Sample(seat.id, turns, float(seat.number == 0), None, End.DONE)

    def demand(self) -> Demand:
        return Demand(0, 0)

    def supervised(self, step: int, size: int) -> list[Row]:
        found = [self._given.table.row("supervised", self.around.seed, step * size + i) for i in range(size)]
        samples = [Sample(row[0], self._given.turns(row, 0), 1.0, None, End.DONE) for row in found]
        return [(sample.token_ids, sample.from_policy) for sample in samples]


def _answer(ids: Sequence[int], version: int) -> Answer:
    return Answer(tuple(ids), (0.0,) * len(ids), (version,) * len(ids))


def _length(turn: Turn) -> int:
    return len(turn.observation_ids) + len(turn.answer.token_ids)
