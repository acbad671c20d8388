"""Conversations as tokens: what the model said stays, token by token; only what is said to it is rendered and added.

Text that a model generated need not become the same tokens again. So a conversation is never rendered anew: the chat
template is shown a stand-in for what the model said, and what it puts after that is appended.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rlix.pipeline.sources.environments.base import Action, Message, ToolCall
from rlix.pipeline.spec.source import ChatSpec
from rlix.pipeline.tokenizer import read
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = "@@what the model said@@"
_THOUGHT = "@@what the model thought@@"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_HOW = "give a template of your own with source.chat.template"


class Template:
    """How one model is shown messages: by the job's chat template, or its tokenizer's. Raises SpecError without any."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", spec: ChatSpec) -> None:
        self._tokenizer, self._options = tokenizer, spec.options
        own: Any = tokenizer.chat_template
        if spec.template is not None:
            try:
                own = Path(spec.template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise SpecError(f"source.chat.template: {spec.template} cannot be read: {error}") from error
        if own is None:
            raise SpecError(f"source.chat: messages need a chat template, and the model's tokenizer has none; {_HOW}")
        self._text = str(own["default"] if isinstance(own, dict) else own)

    def render(self, messages: Sequence[Message], where: str, *, asked: bool = True, tools: Sequence[Any] = ()) -> str:
        """As text; `asked`: up to where the model answers. Raises SpecError, which begins with `where`."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) or None,
                    chat_template=self._text,
                    add_generation_prompt=asked,
                    tokenize=False,
                    **self._options,
                )
            )
        except (TemplateError, TypeError, AttributeError, ValueError) as error:
            told = messages if isinstance(messages, Sequence) else ()  # a row of a user's may hold anything
            roles = ", ".join(str(message.get("role")) for message in told if isinstance(message, Mapping))
            raise SpecError(
                f"{where}: the model's chat template does not render messages of {roles or 'no role'}: {error}; {_HOW}"
            ) from error


def template_of(tokenizer: "PreTrainedTokenizerBase", spec: ChatSpec) -> Template | None:
    """None where neither the job nor the tokenizer has one."""
    return None if tokenizer.chat_template is None and spec.template is None else Template(tokenizer, spec)


class Chat:
    """One model's conversations.

    Args:
        ends: tokens at which generation stops.
        tools: JSON schemas of what the model may call, as `apply_chat_template` takes them.

    Raises:
        SpecError: there are tools, and no template that can render their answers.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        spec: ChatSpec,
        ends: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer, self._spec, self._ends, self._tools = tokenizer, spec, ends, [dict(tool) for tool in tools]
        self._template = Template(tokenizer, spec)
        self._checked: set[str] = set()
        if self._tools:
            self._check("tool")

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation's beginning, up to where the model answers."""
        return self._encode(self._render(messages))

    def go_on(self, messages: Sequence[Message], last: int) -> tuple[int, ...]:
        """The tokens after an answer that ended with `last`: its end, where it has none, and the messages.

        Raises:
            SpecError: the template cannot say it without changing what was said before.
        """
        for message in messages:
            self._check(str(message.get("role")))
        ids = self._encode(self._after(messages))
        return ids[1:] if ids and ids[0] == last else ids

    def action(self, token_ids: Sequence[int], before: Sequence[int]) -> Action:
        """What the model said, and which tools it called."""
        ids = list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Action(text, tuple(ids), self._calls(text, ids, before) if self._tools else ())

    def _calls(self, text: str, ids: list[int], before: Sequence[int]) -> tuple[ToolCall, ...]:
        """As the tokenizer's own `response_template` reads them, else as Qwen and Hermes models write them."""
        if getattr(self._tokenizer, "response_template", None) is None:
            return tuple(map(_call, _CALL.findall(text)))
        try:
            parsed: Any = self._tokenizer.parse_response(ids, prefix=list(before), tools=self._tools)
            found = [call["function"] for call in (parsed or {}).get("tool_calls") or ()]
            return tuple(ToolCall(str(call["name"]), json.dumps(call.get("arguments") or {})) for call in found)
        except (ValueError, TypeError, KeyError) as error:
            return (ToolCall("", text, f"the call could not be read: {error}"),)

    def _check(self, role: str) -> None:
        """Whether a message of this role can follow without touching what the model said."""
        if role in self._checked:
            return
        message = {"role": role, "content": "?", "name": "tool"}
        thought = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"}
        rendered = self._render([{"role": "user", "content": "?"}, thought, message])
        if self._spec.history == "refuse" and _THOUGHT not in rendered:
            raise SpecError(
                f"source.chat: the model's chat template drops what it thought in earlier turns when a {role} message "
                f"follows, so tokens that were generated would not be those that are trained; {_HOW}, or keep "
                "everything that was said with 'source: {chat: {history: keep}}'"
            )
        after = self._encode(self._after([message]))
        if not after or after[0] not in self._ends:
            raise SpecError(
                f"source.chat: the model's chat template ends a turn with {self._tokenizer.decode(list(after[:1]))!r}, "
                "at which generation does not stop; add it to rollout.stop"
            )
        self._checked.add(role)

    def _after(self, messages: Sequence[Message]) -> str:
        """What the template puts after what the model said."""
        asked = {"role": "user", "content": "?"}
        rendered = self._render([asked, {"role": "assistant", "content": _SAID}, *messages])
        if rendered.count(_SAID) != 1:
            raise SpecError(f"source.chat: the model's chat template changes what the model said; {_HOW}")
        return rendered.partition(_SAID)[2]

    def _render(self, messages: Sequence[Message]) -> str:
        return self._template.render(messages, "source.chat", tools=self._tools)

    def _encode(self, text: str) -> tuple[int, ...]:
        return read(self._tokenizer, text, special=False)  # the template has put them in


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        return ToolCall(str(call["name"]), json.dumps(call.get("arguments") or {}, ensure_ascii=False))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return ToolCall("", text, f"the call is no JSON object with name and arguments: {error}")
