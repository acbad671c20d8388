"""The process behind `Processes`: builds environments and calls rewards, as told by lines of JSON on its input."""

import asyncio
import contextlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any, cast

from rlix.pipeline.sources.place import Place
from rlix.pipeline.sources.rewards import Reward, number
from rlix.pipeline.spec.named import import_object, own_traceback, where_raised
from rlix.protocol.errors import SpecError

_LINE_LIMIT = 64 * 1024 * 1024  # bytes of one message


class Worlds:
    """The environment that is here."""

    def __init__(self) -> None:
        self._environment: Any = None

    async def make(self, factory: str, options: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, Any]:
        from rlix.pipeline.sources.environments.base import Instance

        if self._environment is not None:
            await self._environment.close()
        build: Any = import_object(factory)
        self._environment = build(Instance(**{**instance, "place": Place(**instance["place"])}), **options)
        return {}

    async def reset(self, seed: int) -> dict[str, Any]:
        from rlix.pipeline.sources.environments.base import observed

        return {"observation": observed("reset", await self._environment.reset(seed))}

    async def step(self, text: str, token_ids: list[int], tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        from rlix.pipeline.sources.environments.base import Action, ToolCall, checked

        calls = tuple(ToolCall(**call) for call in tool_calls)
        return asdict(checked(await self._environment.step(Action(text, tuple(token_ids), calls))))


@cache
def _function(name: str) -> tuple[Callable[..., Any], Callable[[str], bool]]:
    """A reward, and whether it takes a column of some name."""
    function = cast(Callable[..., Any], import_object(name))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin says nothing of what it takes
        return function, lambda _: False
    first, others = ({p.name for p in part} for part in (parameters[:3], parameters[3:]))
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function, lambda column: column not in first
    return function, lambda column: column in others


async def load(functions: list[str]) -> dict[str, Any]:
    """Import them; and which of them are coroutines."""
    found = {}
    for name in functions:
        with contextlib.suppress(SpecError):  # said when it is called
            found[name] = inspect.iscoroutinefunction(_function(name)[0])
    return {"asynchronous": found}


async def reward(
    function: str, given: list[Any], columns: Mapping[str, Any], options: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """A completion's reward, or, of a list of completions, that of each; and the seconds of a plain function's call,
    and of it those in which a processor worked. Only a coroutine's time can be kept here."""
    called, takes = _function(function)
    began, worked = time.perf_counter(), _worked_s()
    value = called(*given, **{**{k: v for k, v in columns.items() if takes(k)}, **options})
    if inspect.isawaitable(value):
        try:
            value = await asyncio.wait_for(value, timeout_s)
        except TimeoutError:
            return {"late": True}
    spent = {"spent": (time.perf_counter() - began, _worked_s() - worked)}
    if isinstance(given[1], str):
        return {"rewards": [_plain(value)], **spent}
    values = list(value)
    if len(values) != len(given[1]):
        raise TypeError(f"it returned {len(values)} rewards of {len(given[1])} completions")
    return {"rewards": [_plain(one) for one in values], **spent}


def _worked_s() -> float:
    """Seconds of processors, of this process and of those it started that have ended."""
    return sum(os.times()[:4])


def _plain(value: Any) -> tuple[float, bool | None, str | None]:
    whole = isinstance(value, Reward)
    if (found := number(value.reward if whole else value)) is None:
        raise TypeError(f"it returned {value!r}, which is no number")
    if not whole:
        return found, None, None
    return found, bool(value.exact), None if value.answer is None else str(value.answer)


async def serve(requests: asyncio.StreamReader, answer: Callable[[str], None]) -> None:
    """Answer until the input ends."""
    worlds, under_way = Worlds(), set[asyncio.Task[None]]()
    methods: dict[str, Any] = {
        "make": worlds.make,
        "reset": worlds.reset,
        "step": worlds.step,
        "load": load,
        "reward": reward,
    }

    async def attend(number: int, method: str, **arguments: Any) -> None:
        try:
            text = json.dumps({"number": number, **await methods[method](**arguments)})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other side raises it
            text = json.dumps({"number": number, "error": where_raised(error), "trace": own_traceback(error)})
        answer(text)

    while line := await requests.readline():
        task = asyncio.ensure_future(attend(**json.loads(line)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


async def main() -> None:
    private = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's code prints must not get among the answers
    requests = asyncio.StreamReader(limit=_LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)

    def answer(text: str) -> None:
        private.write(text + "\n")
        private.flush()

    await serve(requests, answer)


if __name__ == "__main__":
    asyncio.run(main())
