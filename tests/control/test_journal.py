import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.control.journal import KEPT_SESSIONS, Journal, JournalBusyError, JournalError, decode, encode, open_journal
from rlix.protocol.events import Event, LeaseGranted, PipelineAllocated
from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase

EVENTS: list[Event] = [
    PipelineAllocated("ft_1", "ft"),
    LeaseGranted(Lease(7, "ft_1", "actor_train", Phase.ACTOR_TRAINING, (0, 1)), request_id=3),
    LeaseGranted(Lease(8, "ft_1", "actor_infer", Phase.ROLLOUT, (2,), bundle=0)),
]


st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))  # as the scheduler service accepts


@given(st.from_type(Event))  # type: ignore[arg-type]
def test_every_event_survives_the_journal(event: Event) -> None:
    again = decode(*encode(event))
    assert again == event
    assert type(again) is type(event)


def test_phases_and_tuples_keep_their_types() -> None:
    again = decode(*encode(EVENTS[1]))
    assert isinstance(again, LeaseGranted)
    assert again.lease.phase is Phase.ACTOR_TRAINING
    assert isinstance(again.lease.devices, tuple)


def test_events_come_back_in_order_after_a_crash(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", now=lambda: 5.0)
    journal.append(EVENTS[:2])
    journal.append(EVENTS[2:])
    assert len(journal) == 3
    # What another process would see although the journal was never closed:
    rows = sqlite3.connect(tmp_path / "journal.db").execute("SELECT time, type FROM events").fetchall()
    assert rows == [(5.0, "PipelineAllocated"), (5.0, "LeaseGranted"), (5.0, "LeaseGranted")]
    journal.close()
    with Journal(tmp_path / "journal.db") as reopened:
        assert len(reopened) == 3
        assert list(reopened.replay()) == EVENTS


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(KeyError):
            journal.append([EVENTS[0], object()])  # type: ignore[list-item]
        assert len(journal) == 0
        assert list(journal.replay()) == []


def test_a_new_session_puts_the_old_one_aside_and_keeps_the_last_few(tmp_path: Path) -> None:
    clock = iter(range(1_000, 2_000))
    with Journal(tmp_path / "journal.db", now=lambda: float(next(clock))) as journal:
        for number in range(KEPT_SESSIONS + 2):
            journal.append([PipelineAllocated(f"ft_{number}", "ft")])
            journal.start_session()
            assert len(journal) == 0
        assert list(journal.replay()) == []
    kept = sorted(tmp_path.glob("journal-*.db"))
    assert len(kept) == KEPT_SESSIONS
    with Journal(kept[-1]) as last:
        assert list(last.replay()) == [PipelineAllocated(f"ft_{KEPT_SESSIONS + 1}", "ft")]


def test_two_control_planes_never_write_to_the_same_journal(tmp_path: Path) -> None:
    with open_journal(tmp_path) as first, open_journal(tmp_path) as second:
        assert first.path != second.path
        with pytest.raises(JournalBusyError, match="in use by another control plane"):
            Journal(first.path)


def test_a_damaged_journal_and_an_unknown_event_are_named(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(JournalError, match=r"cannot open the journal .*move the file away"):
        open_journal(tmp_path)
    with pytest.raises(JournalError, match="unknown event type 'Nonsense'"):
        decode("Nonsense", "{}")
    with pytest.raises(JournalError, match="PipelineAllocated does not have the expected fields"):
        decode("PipelineAllocated", '{"kind": "ft"}')
