from pathlib import Path

import pytest

from rlix.engine.train.saving import SaveHandle
from rlix.protocol.errors import WaitTimeoutError, WorkerError


def handle(*answers: list[tuple[bool, str | None]]) -> SaveHandle:
    """A save whose ranks give these answers, one second apart."""
    given, now = iter(answers), iter(range(100))
    return SaveHandle("engine", Path("/folder"), lambda: next(given), clock=lambda: next(now))


def test_a_save_is_done_when_every_rank_is() -> None:
    save = handle([(True, None), (False, None)], [(True, None), (True, None)])
    assert not save.done()
    assert save.wait(5.0) == Path("/folder")
    assert save.done()  # known by now: nobody is asked again


def test_a_late_save_names_the_ranks_that_still_write() -> None:
    save = handle(*[[(True, None), (False, None), (False, None)]] * 4)
    with pytest.raises(WaitTimeoutError, match=r"rank\(s\) 1, 2 did not finish saving to /folder within 2 s"):
        save.wait(2.0)


def test_an_error_is_reported_while_other_ranks_still_wait() -> None:
    save = handle([(False, None), (True, "OSError: disk full")])
    with pytest.raises(WorkerError, match="rank 1 failed to save to /folder: OSError: disk full"):
        save.wait(5.0)
