"""Events on their way into the journal: in order and without a hole, also while the disk is full."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from rlix.control.garbage import uncollected
from rlix.control.journal import JournalError
from rlix.control.ports import Clock, Timer
from rlix.protocol.events import (
    DemandReported,
    Event,
    GangRequested,
    HoldersNamed,
    PipelineAllocated,
    PipelineEnding,
    PipelineRegistered,
    PipelineUnregistered,
)

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 1.0
_COMPACT_AT = 20_000  # events
_WITH_TEXT = (
    PipelineAllocated,
    PipelineRegistered,
    HoldersNamed,
    GangRequested,
    PipelineEnding,
    PipelineUnregistered,
)


class EventStore(Protocol):
    """A journal; `Journal` is the real one."""

    def check(self, event: Event) -> None: ...

    def append(self, events: Sequence[Event]) -> None: ...

    def compact(self, events: Sequence[Event]) -> None: ...

    def __len__(self) -> int: ...

    def close(self) -> None: ...


class Writer:
    """What cannot be written waits, in order, and `trouble` says so; meanwhile nothing may be granted. It tries again
    by itself, so that the control plane goes on when there is room.

    Demand is not written: jobs report it again within a second.

    Args:
        image: the events that make up the present state, for compaction.
        written: called when a trouble has ended.
    """

    def __init__(
        self,
        journal: EventStore,
        clock: Clock,
        *,
        image: Callable[[], Sequence[Event]],
        written: Callable[[], None],
    ) -> None:
        self.trouble = ""
        self._journal = journal
        self._clock = clock
        self._image = image
        self._written = written
        self._waiting: list[Event] = []
        self._compact_at = _COMPACT_AT
        self._compaction: Timer | None = None

    def append(self, events: Sequence[Event]) -> None:
        kept = [event for event in events if not isinstance(event, DemandReported)]
        if not kept:
            return
        self._waiting += kept
        if not self.trouble:
            self._write()

    def check_writable(self, events: Sequence[Event]) -> None:
        """Raises JournalError when one of them, with callers' words in it, could never be written."""
        for event in events:
            if isinstance(event, _WITH_TEXT):
                self._journal.check(event)

    def check(self) -> None:
        """Raises JournalError while something waits to be written."""
        if self.trouble:
            raise JournalError(self.trouble)

    def close(self) -> None:
        if self._compaction is not None:
            self._compaction.cancel()
        self._journal.close()

    def _write(self) -> None:
        try:
            self._journal.append(self._waiting)
        except JournalError as error:
            if not self.trouble:
                logger.critical("%s; nothing is granted until it can be written, what runs goes on", error)
            self.trouble = f"{error}; nothing is granted until there is room for it, what runs goes on"
            self._clock.call_later(_TRY_AGAIN_S, self._write)
            return
        self._waiting = []
        if self.trouble:
            logger.warning("the journal can be written again")
            self.trouble = ""
            self._written()
        if len(self._journal) >= self._compact_at and self._compaction is None:
            self._compaction = self._clock.call_later(0.0, self._compact)  # a turn of its own: it may be a long one

    def _compact(self) -> None:
        self._compaction = None
        if self._waiting:
            return  # which the image holds already: when they are written it is tried again
        with uncollected():
            image = self._image()
            try:
                self._journal.compact(image)
            except JournalError as error:
                logger.warning("the journal was not compacted: %s; it is tried again at twice its length", error)
                self._compact_at = 2 * len(self._journal)
                return
        self._compact_at = max(_COMPACT_AT, 4 * len(image))
