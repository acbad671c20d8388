"""When the loop looks at something again without being told: one timer for however many moments."""

import heapq
import itertools
import math
from collections.abc import Callable, Hashable

from rlix.control.ports import Clock, Timer


class Alarm:
    """Rings with the keys whose moment has come. A key has one moment; a later `set` replaces it."""

    def __init__(self, clock: Clock) -> None:
        self.ring: Callable[[list[Hashable]], None] = lambda keys: None
        self._clock = clock
        self._at: dict[Hashable, float] = {}
        self._queue: list[tuple[float, int, Hashable]] = []
        self._number = itertools.count()
        self._timer: Timer | None = None
        self._next_at = math.inf
        self._rung_at = -math.inf

    def time(self) -> float:
        """The clock's; at least the moment for which it has rung, though a clock may ring a little early."""
        return max(self._clock.time(), self._rung_at)

    def set(self, key: Hashable, when: float) -> None:
        if when == math.inf:
            self.cancel(key)
        elif self._at.get(key) != when:
            self._at[key] = when
            heapq.heappush(self._queue, (when, next(self._number), key))
            self._await_next()

    def cancel(self, key: Hashable) -> None:
        if self._at.pop(key, None) is not None:
            self._await_next()

    def _await_next(self) -> None:
        if len(self._queue) > 2 * len(self._at) + 64:
            self._queue = [entry for entry in self._queue if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._queue)
        while self._queue and self._at.get(self._queue[0][2]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        next_at = self._queue[0][0] if self._queue else math.inf
        if next_at == self._next_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._next_at = next_at
        later = next_at < math.inf
        self._timer = self._clock.call_later(max(0.0, next_at - self._clock.time()), self._rings) if later else None

    def _rings(self) -> None:
        self._rung_at, self._timer, self._next_at = self._next_at, None, math.inf
        due = []
        while self._queue and self._queue[0][0] <= self._rung_at:
            when, _, key = heapq.heappop(self._queue)
            if self._at.get(key) == when:
                del self._at[key]
                due.append(key)
        self._await_next()
        self.ring(due)
