"""Tools that an environment offers: a call that fails or hangs is something to tell the agent, not a failure."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

Tool = Callable[[str], Awaitable[str]]


class ToolError(Exception):
    """Raised by a tool that cannot do what it was asked; the agent gets to read the message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    argument: str


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
        """What the tool said, or why it said nothing: unknown, refused (`ToolError`), out of time.

        Anything else a tool raises is a defect of the environment and passes through.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"no tool {call.name!r}; there are: {', '.join(sorted(self._tools))}", ok=False)
        try:
            return ToolResult(await asyncio.wait_for(tool(call.argument), self._timeout_s))
        except ToolError as error:
            return ToolResult(str(error), ok=False)
        except TimeoutError:
            return ToolResult(f"{call.name} did not answer within {self._timeout_s:g} s", ok=False)
