"""A long-horizon task for small models: follow a chain of digits through a slow, unreliable lookup tool."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.environments.base import (
    Action,
    Demonstration,
    EnvironmentFailedError,
    Instance,
    ToolCall,
    Transition,
)
from rlix.pipeline.sources.environments.latency import Lognormal
from rlix.pipeline.sources.environments.tools import Toolbox

Sleep = Callable[[float], Awaitable[None]]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
_TOOL_TIMEOUT_S = 3600.0  # the tool's own; that of the whole step is set by whoever runs the environment


@dataclass(frozen=True, slots=True)
class _Fault:
    """At which call (0 is the reset) this instance fails, and whether it then hangs or raises."""

    call: int
    hangs: bool


class DigitLookup:
    """`hops` lookups, each of the digit the last one returned, then the last digit as the answer.

    The agent reads "37>": 3 lookups left, the digit is 7. It writes "7" to look 7 up and reads "24>", writes "4", and
    so on; at "05>" it writes "=5". Reward: half for the share of right lookups, half for the right answer, given at
    the end. A wrong digit leads off the chain; anything that is no digit ends the trajectory.

    A lookup takes a lognormal time, a reset (of a sandbox) another; `failure_rate` of all instances raise or hang at
    one of their calls. Latencies and faults are drawn from the instance's seed, the chain from that given to `reset`.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        hops: Annotated[int, Field(ge=1, le=9)] = 3,  # the agent reads it as one digit
        latency_scale: Annotated[float, Field(ge=0)] = 1.0,
        tool_p50_s: Seconds = 0.16,
        tool_p99_s: Seconds = 2.7,
        reset_p50_s: Seconds = 0.5,
        reset_p99_s: Seconds = 4.0,
        failure_rate: Share = 0.1,
        hang_share: Share = 0.5,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._hops = hops
        self._source = random.Random(stream_seed(instance.seed, "instance", instance.attempt))
        self._fault = _draw_fault(self._source, hops, failure_rate, hang_share)
        self._tool_latency = Lognormal(tool_p50_s, tool_p99_s).scaled(latency_scale)
        self._reset_latency = Lognormal(reset_p50_s, reset_p99_s).scaled(latency_scale)
        self._sleep = sleep
        self._tools = Toolbox({"lookup": self._lookup}, _TOOL_TIMEOUT_S)
        self._table = ""
        self._digit = ""
        self._chain: list[str] = []
        self._calls = self._done = self._right = 0

    async def reset(self, seed: int) -> str:
        await self._wait(self._reset_latency)
        self._table, self._digit = _world(seed)
        self._chain = _chain(self._table, self._digit, self._hops)
        return self._observation()

    async def step(self, action: Action) -> Transition:
        if self._done == self._hops:
            exact = action.text == f"={self._chain[-1]}"
            return Transition("", self._share() + 0.5 * exact, done=True, exact=exact)
        if len(action.text) != 1 or not action.text.isdigit():
            return Transition("", self._share(), done=True)
        self._right += action.text == self._chain[self._done]
        self._done += 1
        result = await self._tools.call(ToolCall("lookup", action.text))
        self._digit = result.text
        return Transition(self._observation())

    async def close(self) -> None:
        """Nothing is held."""

    @classmethod
    def demonstrate(cls, seed: int, *, hops: int = 3, **_: object) -> Demonstration:
        """The right actions in the world of `seed`."""
        table, digit = _world(seed)
        chain = _chain(table, digit, hops)
        lookups = [(f"{hops - i}{value}>", value) for i, value in enumerate(chain[:-1])]
        return (*lookups, (f"0{chain[-1]}>", f"={chain[-1]}"))

    async def _lookup(self, key: str) -> str:
        await self._wait(self._tool_latency)
        return self._table[int(key)]

    async def _wait(self, latency: Lognormal) -> None:
        call, self._calls = self._calls, self._calls + 1
        if self._fault is not None and self._fault.call == call:
            if self._fault.hangs:
                await asyncio.Event().wait()
            raise EnvironmentFailedError("the sandbox crashed (simulated)")
        seconds = latency.draw(self._source)
        if seconds > 0:
            await self._sleep(seconds)

    def _share(self) -> float:
        return 0.5 * self._right / self._hops

    def _observation(self) -> str:
        return f"{self._hops - self._done}{self._digit}>"


def _world(seed: int) -> tuple[str, str]:
    """(what each digit leads to, the first digit)."""
    source = random.Random(stream_seed(seed, "world"))
    return "".join(source.choices("0123456789", k=10)), source.choice("0123456789")


def _chain(table: str, digit: str, hops: int) -> list[str]:
    chain = [digit]
    for _ in range(hops):
        chain.append(table[int(chain[-1])])
    return chain


def _draw_fault(source: random.Random, hops: int, failure_rate: float, hang_share: float) -> _Fault | None:
    fails, call, hangs = source.random() < failure_rate, source.randrange(hops + 1), source.random() < hang_share
    return _Fault(call, hangs) if fails else None
