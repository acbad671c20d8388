"""Tools that an environment offers: a call that fails or hangs is something to tell the agent, not a failure."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlix.pipeline.sources.environments.base import Message, ToolCall

Tool = Callable[[str], Awaitable[str]]


class ToolError(Exception):
    """Raised by a tool that cannot do what it was asked; the agent gets to read the message."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`text` for the agent to read; `ok` is False when it says what went wrong."""

    text: str
    ok: bool = True


class Toolbox:
    """Calls tools by name, each call bounded by `timeout_s`."""

    def __init__(self, tools: Mapping[str, Tool], timeout_s: float) -> None:
        self._tools = dict(tools)
        self._timeout_s = timeout_s

    async def call(self, call: ToolCall) -> ToolResult:
        """What the tool said, or why it said nothing: unreadable, unknown, refused (`ToolError`), out of time.

        Anything else a tool raises is a defect of the environment and passes through.
        """
        if call.problem is not None:
            return ToolResult(call.problem, ok=False)
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"no tool {call.name!r}; there are: {', '.join(sorted(self._tools))}", ok=False)
        try:
            return ToolResult(await asyncio.wait_for(tool(call.argument), self._timeout_s))
        except ToolError as error:
            return ToolResult(str(error), ok=False)
        except TimeoutError:
            return ToolResult(f"{call.name} did not answer within {self._timeout_s:g} s", ok=False)

    async def answers(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """Of all calls of a turn, made side by side: messages for the agent to read, in their order."""
        results = await asyncio.gather(*map(self.call, calls))
        return tuple(
            {"role": "tool", "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        )


def as_tool(function: Callable[..., Any]) -> Tool:
    """A function, plain or a coroutine, as a tool that is called with a JSON object of its keyword arguments.

    Arguments that do not fit are something to tell the agent. A plain function runs on a thread; one that does not
    return in time is left behind there.
    """

    async def tool(argument: str) -> str:
        arguments = json.loads(argument)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{error}") from error
        if inspect.iscoroutinefunction(function):
            result = function(**arguments)
        else:  # on a thread: while it computes, or hangs, the others' time goes on
            result = await asyncio.to_thread(function, **arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, default=str)

    return tool
