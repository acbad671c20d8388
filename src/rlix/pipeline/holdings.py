"""What the threads of a job's own process hold of devices, and whether the code that they run meanwhile hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rlix.pipeline.spec.named import where_now
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import Fence


class Resident(Protocol):
    """An engine that moves on and off its devices under a lease."""

    def acquire(self, lease: Fence) -> object: ...

    def release(self, epoch: int) -> object: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    what: str
    engine: Resident | None
    since: float
    thread: int


class Holdings:
    """Calls of an engine end by themselves; the code between two of them is a user's, and may not.

    Args:
        limit_s: longest that code may hold devices and ask nothing of their engine.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._held: list[_Held] = []

    @contextmanager
    def hold(self, what: str, engine: Resident | None) -> Iterator[None]:
        """During the block this thread holds devices, with `engine` on them; one without `idle_s` is not looked at."""
        held = _Held(what, engine, self._clock(), threading.get_ident())
        self._held.append(held)
        try:
            yield
        finally:
            self._held.remove(held)

    def hang(self, who: str, thread: int | None = None) -> WaitTimeoutError | None:
        """The error of whoever hangs. `thread`: that runs the code, where it is another one than that which holds."""
        for held in tuple(self._held):
            idle_s = min(getattr(held.engine, "idle_s", 0.0), self._clock() - held.since)
            if idle_s > self._limit_s:
                return WaitTimeoutError(
                    f"{who} holds {held.what} and has asked nothing of its engine for {idle_s:.0f} s "
                    f"(training.timeout_s: {self._limit_s:g}); it hangs at {where_now(thread or held.thread)}"
                )
        return None
