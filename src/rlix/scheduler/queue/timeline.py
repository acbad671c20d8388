"""How much of something is free from when on: what reservations are made in."""

import math
from bisect import bisect_right


class Timeline:
    """Free places over time, from `now` on. May fall below 0 where more is held than there is."""

    def __init__(self, now: float, places: int) -> None:
        self._times = [now]
        self._free = [places]  # from each of these times until the next

    def free(self, at: float) -> int:
        return self._free[bisect_right(self._times, at) - 1]

    def take(self, start: float, end: float, places: int) -> None:
        """From `start` to `end` so many are not free; a negative number gives back."""
        first, last = self._cut(start), self._cut(end)
        for index in range(first, last):
            self._free[index] -= places

    def shortage(self, start: float, end: float, places: int) -> float | None:
        """The first moment between `start` and `end` at which fewer are free; None: there is none."""
        index = bisect_right(self._times, start) - 1
        while index < len(self._times) and self._times[index] < end:
            if self._free[index] < places:
                return max(start, self._times[index])
            index += 1
        return None

    def earliest(self, start: float, length: float, places: int) -> float:
        """From when on, `start` or later, so many are free for so long; infinity: never."""
        index = bisect_right(self._times, start) - 1
        while index < len(self._times):
            if self._free[index] >= places:
                begin = max(start, self._times[index])
                lacking = self.shortage(begin, begin + length, places)
                if lacking is None:
                    return begin
                index = bisect_right(self._times, lacking) - 1
            index += 1
        return math.inf

    def parts(self, start: float, end: float) -> list[tuple[float, float, int]]:
        """From when until when, between `start` and `end`, how many are free."""
        index = max(0, bisect_right(self._times, start) - 1)
        found = []
        while index < len(self._times) and self._times[index] < end:
            until = self._times[index + 1] if index + 1 < len(self._times) else math.inf
            found.append((max(start, self._times[index]), min(end, until), self._free[index]))
            index += 1
        return found

    def with_more(self, other: "Timeline") -> "Timeline":
        """What is free here, if any, and there together."""
        both = Timeline(self._times[0], 0)
        both._times = sorted({*self._times, *other._times})
        both._free = [max(0, self.free(at)) + other.free(at) for at in both._times]
        return both

    def _cut(self, at: float) -> int:
        """The index of the part that begins at this time, which is made."""
        index = bisect_right(self._times, at) - 1
        if index < 0:
            return 0
        if self._times[index] == at:
            return index
        self._times.insert(index + 1, at)
        self._free.insert(index + 1, self._free[index])
        return index + 1
