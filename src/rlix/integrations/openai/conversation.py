"""One agent's conversation, token by token: what was generated is never tokenized again."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlix.pipeline.samples import Answer, Turn
from rlix.protocol.errors import RlixError

Message = Mapping[str, Any]

_ANSWER = "\ue000the answer\ue001"  # stands for what was generated while a template is rendered; never tokenized
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class RequestError(RlixError):
    """The client asks for something that the endpoint cannot do; the message is for the client."""


class ChatFormat:
    """Renders messages with a tokenizer's chat template.

    Args:
        ends: tokens that end an answer.
        template: instead of the tokenizer's.
        options: further variables of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Sequence[int],
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._template = template
        self._options = dict(options or {})

    def opening(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        return self.encode(self._render(messages, tools))

    def continuation(
        self, messages: Sequence[Message], answer_at: int, answered: Sequence[int], tools: Sequence[Any]
    ) -> tuple[int, ...]:
        """The tokens that follow `answered`, which is what was generated for the message `answer_at`."""
        marked = [*messages[:answer_at], {"role": "assistant", "content": _ANSWER}, *messages[answer_at + 1 :]]
        _, mark, after = self._render(marked, tools).rpartition(_ANSWER)
        if not mark:
            raise RequestError("the chat template leaves earlier answers out, so the conversation cannot be continued")
        ids = self.encode(after)
        ended = answered and answered[-1] in self._ends
        return ids[1:] if ended and ids[:1] == tuple(answered[-1:]) else ids

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without the token that ended it."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def _render(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        if self._template is None and not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("the model has no chat template: use /v1/completions, or give the job one")
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._options,
            )
        )


def reply_of(text: str, tools: Sequence[Any], id: str) -> dict[str, Any]:
    """The message for an answer. With tools, calls of the form <tool_call>{json}</tool_call> are taken out of it."""
    calls: list[dict[str, Any]] = []
    if tools:
        for found in _TOOL_CALL.findall(text):
            try:
                call = json.loads(found)
                function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
            except (ValueError, KeyError, TypeError):
                continue  # what is no call is text
            calls.append({"id": f"call-{id}-{len(calls)}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": calls}


@dataclass(frozen=True, slots=True)
class Heard:
    """A request that is not answered yet. `read`: what the policy reads after the turns that are kept."""

    turns: tuple[Turn, ...]
    read: tuple[int, ...]
    messages: tuple[Message, ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return (*_tokens(self.turns), *self.read)


@dataclass(slots=True)
class Conversation:
    """What was read and answered so far; one that is begun anew, or whose past is changed, starts again from nothing.

    A request changes nothing until it is answered, so that it can be made again. `branches`: how often it started
    again. An agent learns from its last branch.
    """

    chat: ChatFormat
    turns: tuple[Turn, ...] = ()
    branches: int = 0
    _messages: tuple[Message, ...] = ()  # up to the last answer, without it
    _reply: Message | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return _tokens(self.turns)

    def heard(self, messages: Sequence[Message], tools: Sequence[Any]) -> Heard:
        """Raises RequestError when the messages cannot be rendered."""
        before, given = len(self._messages), tuple(_plain(message) for message in messages)
        if self._reply is not None and given == self._messages:  # the client asks again, so it got no answer
            return Heard(self.turns[:-1], self.turns[-1].observation_ids, given)
        goes_on = len(given) > before and given[:before] == self._messages
        if self._reply is not None and goes_on and _same(given[before], self._reply):
            read = self.chat.continuation(given, before, self.turns[-1].answer.token_ids, tools)
            return Heard(self.turns, read, given)
        return Heard((), self.chat.opening(given, tools), given)

    def heard_tokens(self, token_ids: Sequence[int]) -> Heard:
        """The same for a plain prompt."""
        said, given = self.token_ids, tuple(token_ids)
        if said and given[: len(said)] == said and len(given) > len(said):
            return Heard(self.turns, given[len(said) :])
        return Heard((), given)

    def answered(self, heard: Heard, answer: Answer, reply: Message | None = None) -> None:
        self.branches += bool(self.turns) and len(heard.turns) < len(self.turns) - 1
        self.turns = (*heard.turns, Turn(heard.read, answer))
        self._messages = heard.messages
        self._reply = None if reply is None else _plain(reply)


def _tokens(turns: Sequence[Turn]) -> tuple[int, ...]:
    return tuple(id for turn in turns for id in turn.observation_ids + turn.answer.token_ids)


def _plain(message: Message) -> dict[str, Any]:
    """Without what clients add or leave out as they like."""
    kept = {key: value for key, value in message.items() if value not in (None, [], "")}
    if isinstance(content := kept.get("content"), list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise RequestError("only text is supported in messages")
        kept["content"] = "".join(part["text"] for part in content)
    return kept


def _same(message: Message, reply: Message) -> bool:
    """Whether the client gives back the answer that it got; arguments may have been written anew."""
    return (
        message.get("role") == "assistant"
        and (message.get("content") or "") == (reply.get("content") or "")
        and _calls(message) == _calls(reply)
    )


def _calls(message: Message) -> list[tuple[str, Any]]:
    found = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except (TypeError, ValueError):
            arguments = function["arguments"]
        found.append((str(function["name"]), arguments))
    return found
