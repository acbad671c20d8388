"""An event loop whose time passes only while nothing is to be done, and then at once."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: what is due at the same moment runs in the order in which it was asked for. Threads are none."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        return self._virtual_s

    def advance(self, seconds: float) -> None:
        """As if something had kept the loop busy for so long."""
        self._virtual_s += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is whoever waits for the answer that hears of it
            future.set_exception(error)
        return future


class _Jumps(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is due")
        if timeout > 0.0:
            self._loop.advance(timeout)
        return []
