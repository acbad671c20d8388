"""Waiting for the stages of a segment, and what Ctrl-C does meanwhile."""

import logging
import threading
from collections.abc import Sequence

from rlix.flow.parts.ranks import Ranks
from rlix.flow.programs.segment import SegmentRun

logger = logging.getLogger(__name__)

_LOOK_S = 0.2  # a signal that comes just before a wait begins does not end it


def until_ended(ended: Sequence[threading.Event], run: SegmentRun, groups: Sequence[Ranks], *, held: bool) -> None:
    """Until all stages have ended, or devices would be taken from under them. Each of their waits has a limit.

    Ctrl-C stops them at their next call. A second one waits for no call: where a lease is `held`, whose devices others
    may have next, ranks that are at one are ended. One that comes while another is acted on counts as the next.

    `ended`, and not `join`: a thread for which that was interrupted counts as dead (Python 3.11).
    """
    told = heard = 0
    while waiting := [stage for stage in ended if not stage.is_set()]:
        if told > 2 or (told > 1 and not held):
            raise KeyboardInterrupt
        try:
            if heard < told:
                _interrupted(told, run, groups, held)
                heard = told
            waiting[0].wait(_LOOK_S)
        except KeyboardInterrupt:
            told += 1


def _interrupted(told: int, run: SegmentRun, groups: Sequence[Ranks], held: bool) -> None:
    run.fail(KeyboardInterrupt())
    if told > 1:
        for group in groups:
            group.end_late()
        return
    busy = ", ".join(group.name for group in groups if group.late) or "nobody"
    then = "ends the ranks that have not answered" if held else "waits for nobody"
    logger.warning("Ctrl-C: the step ends when %s has answered; a second Ctrl-C %s", busy, then)
