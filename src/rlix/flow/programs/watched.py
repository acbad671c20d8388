"""What a flow does with its devices, for its run folder."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlix.flow.parts.ranks import Ranks

Note = Callable[[str, str, float, float], None]
"""Of a part: its name, what was done (busy, load or offload), from when to when, in Unix seconds."""


class Watched:
    """A part as an occupant of a `DeviceLock`: how long its state takes to come and go is noted."""

    def __init__(self, part: str, group: Ranks, note: Note) -> None:
        self._part, self._group, self._note = part, group, note

    @property
    def name(self) -> str:
        return self._group.name

    def onload(self) -> None:
        with timed(self._part, "load", self._note):
            self._group.onload()

    def offload(self) -> None:
        with timed(self._part, "offload", self._note):
            self._group.offload()

    def end(self) -> None:
        self._group.end()


class Busy:
    """Seconds of each part in the step that is under way, by what was done."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)

    def note(self, part: str, kind: str, start: float, end: float) -> None:
        self._seconds[part, kind] += end - start

    def taken(self) -> dict[str, float]:
        """As metrics; the next step begins at nothing."""
        found, self._seconds = self._seconds, defaultdict(float)
        return {
            f"{part}_s" if kind == "busy" else f"{part}_{kind}_s": seconds for (part, kind), seconds in found.items()
        }


@contextmanager
def timed(part: str, kind: str, note: Note) -> Iterator[None]:
    """What is done in the block, also when it fails."""
    start = time.time()
    try:
        yield
    finally:
        note(part, kind, start, time.time())
