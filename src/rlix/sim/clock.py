"""A clock that only moves when it is told to: the simulator's, and that of tests of the control plane's core."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class VirtualTimer:
    """A callback that is due at some moment; `cancel` makes it nothing."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class VirtualClock:
    """Seconds from 0, in whole nanoseconds, so that durations which add up to the same moment meet there however they
    were rounded. What is due at the same moment runs in the order in which it was asked for.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._queue: list[tuple[float, int, VirtualTimer]] = []
        self._number = itertools.count()

    def time(self) -> float:
        return self._now

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> VirtualTimer:
        timer = VirtualTimer(callback, args)
        when = round(self._now + delay, 9) if delay > 0.0 else self._now
        heapq.heappush(self._queue, (when, next(self._number), timer))
        return timer

    def step(self) -> bool:
        """Runs the next callback, at its moment; False when none is left."""
        while self._queue:
            when, _, timer = heapq.heappop(self._queue)
            if timer.callback is not None:
                self._now = max(self._now, when)
                timer.callback(*timer.args)
                return True
        return False

    @property
    def next_at(self) -> float | None:
        """When the next callback is due."""
        while self._queue and self._queue[0][2].callback is None:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def run(self, until: float) -> None:
        """Runs everything that is due up to `until`, which is then the time."""
        while (when := self.next_at) is not None and when <= until:
            self.step()
        self._now = max(self._now, until)
