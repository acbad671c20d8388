"""One agent's conversation, token by token: what was generated is never tokenized again."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlix.pipeline.chat import Chat
from rlix.pipeline.samples import Answer, Turn
from rlix.pipeline.spec.source import ChatSpec
from rlix.pipeline.tokenizer import read
from rlix.protocol.errors import RlixError

Message = Mapping[str, Any]

_TOOL_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


class RequestError(RlixError):
    """The client asks for something that the endpoint cannot do; the message is for the client."""

    status = 400
    code = "invalid_request_error"


class UnknownModelError(RequestError):
    status = 404
    code = "model_not_found"


class ContextFullError(RequestError):
    """Asking again would not help: clients know it by the code."""

    code = "context_length_exceeded"


class ChatFormat:
    """One model's messages and tokens, with whatever tools a request brings. Raises SpecError as `Chat` does.

    Args:
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, spec: ChatSpec, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._ends = tuple(ends)
        self._chats: dict[str, Chat] = {}

    def with_tools(self, tools: Sequence[Any]) -> Chat:
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._chats:
            self._chats[key] = Chat(self._tokenizer, self._spec, self._ends, tools)
        return self._chats[key]

    def reply(self, token_ids: Sequence[int], before: Sequence[int], tools: Sequence[Any], id: str) -> dict[str, Any]:
        """The message for an answer. With tools, the calls are taken out of it; what is no call is text."""
        text = self.decode(token_ids)
        found = self.with_tools(tools).action(token_ids, before).tool_calls if tools else ()
        calls = [
            {"id": f"call-{id}-{i}", "type": "function", "function": {"name": c.name, "arguments": c.argument}}
            for i, c in enumerate(call for call in found if call.problem is None)
        ]
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": calls}

    def readable(self, prompt: object) -> bool:
        """Whether a plain prompt is one text, or ids of tokens; replicas fail at others."""
        if not isinstance(prompt, list):
            return isinstance(prompt, str) and bool(prompt)
        return bool(prompt) and all(type(id) is int and 0 <= id < len(self._tokenizer) for id in prompt)

    def encode(self, text: str) -> tuple[int, ...]:
        return read(self._tokenizer, text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without the token that ended it."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))


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

    A request changes nothing until it is answered, so that it can be made again. An agent learns from its last branch;
    `abandoned` counts the answers that are on none.
    """

    chat: ChatFormat
    turns: tuple[Turn, ...] = ()
    _messages: tuple[Message, ...] = ()  # up to the last answer, without it
    _reply: Message | None = None
    abandoned: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return _tokens(self.turns)

    def heard(self, messages: Sequence[Message], tools: Sequence[Any]) -> Heard:
        """Raises RequestError or SpecError when the messages cannot be rendered."""
        before, given = len(self._messages), tuple(_plain(message) for message in messages)
        if self._reply is not None and given == self._messages:  # the client asks again, so it got no answer
            return Heard(self.turns[:-1], self.turns[-1].observation_ids, given)
        goes_on = len(given) > before + 1 and given[:before] == self._messages
        if self._reply is not None and goes_on and _same(given[before], self._reply):
            read = self.chat.with_tools(tools).go_on(given[before + 1 :], self.turns[-1].answer.token_ids[-1])
            return Heard(self.turns, read, given)
        return Heard((), self.chat.with_tools(tools).start(given), given)

    def heard_tokens(self, token_ids: Sequence[int]) -> Heard:
        """The same for a plain prompt."""
        said, given = self.token_ids, tuple(token_ids)
        if said and given[: len(said)] == said and len(given) > len(said):
            return Heard(self.turns, given[len(said) :])
        return Heard((), given)

    def answered(self, heard: Heard, answer: Answer, reply: Message | None = None) -> None:
        self.abandoned += len(self.turns) - len(heard.turns)
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
