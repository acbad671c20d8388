"""Waits that last long, as they are mentioned while jobs are watched."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlix.cli.text import clock
from rlix.monitor.waits import waits
from rlix.protocol.messages import ControlStatus

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

STALL_S = 30.0
"""A job that waits for one thing for longer than this is mentioned."""


class Stalls:
    """Remembers since when each wait has lasted. Times are seconds of one clock, zero when the view began."""

    def __init__(self, after_s: float = STALL_S) -> None:
        self._after_s = after_s
        self._since: Mapping[tuple[str, str], float] = {}

    def sentences(self, control: ControlStatus, jobs: Sequence["JobStatus"], now: float) -> tuple[str, ...]:
        """A sentence about each wait that has lasted too long; it stays the same while what it says does."""
        found = waits(control, {job.pipeline_id: job.name for job in jobs})
        self._since = {wait.key: self._since.get(wait.key, now) for wait in found}
        return tuple(
            wait.sentence(clock(self._since[wait.key]))
            for wait in found
            if now - self._since[wait.key] >= self._after_s
        )
