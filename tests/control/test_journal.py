import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rlix.control.journal import (
    KEPT_SESSIONS,
    VERSION,
    Journal,
    JournalBusyError,
    JournalError,
    decode,
    encode,
    open_journal,
)
from rlix.protocol.events import Event, LeaseGranted, PipelineAllocated, PipelineRegistered
from rlix.protocol.messages import Cluster, Lease, Registration
from rlix.protocol.types import Phase

EVENTS: list[Event] = [
    PipelineAllocated("ft_1", "ft"),
    LeaseGranted(Lease(7, "ft_1", "actor_train", Phase.ACTOR_TRAINING, (0, 1)), request_id=3),
    LeaseGranted(Lease(8, "ft_1", "actor_infer", Phase.ROLLOUT, (2,), bundle=0)),
]


st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))  # as the scheduler service accepts


def events_of(journal: Journal) -> list[Event]:
    return [event for _, event in journal.replay()]


def some_events(count: int, size: int = 1_000) -> list[Event]:
    return [PipelineAllocated(f"ft_{number}", "x" * size) for number in range(count)]


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


def test_hundreds_of_jobs_on_the_whole_pool_are_written_as_runs_and_read_as_one_tuple() -> None:
    pool = [*range(5_000), *range(5_002, 10_000), 5_000]
    read = []
    for job in range(2):
        infer = Cluster("actor_infer", 1, tuple(pool), elastic=True)
        name, body = encode(PipelineRegistered(Registration(f"ft_{job}", "NS", (infer,))))
        assert "[[0,5000],[5002,4998],[5000,1]]" in body
        assert len(body) < 400
        event = decode(name, body)
        assert isinstance(event, PipelineRegistered)
        read.append(event.registration.clusters[0].devices)
    assert read[0] == tuple(pool)
    assert read[0] is read[1]


def test_events_come_back_in_order_with_their_times(tmp_path: Path) -> None:
    clock = iter([5.0, 6.5])
    journal = Journal(tmp_path / "journal.db", now=lambda: next(clock))
    journal.append(EVENTS[:2])
    journal.append(EVENTS[2:])
    assert len(journal) == 3
    # What another process would see although the journal was never closed:
    rows = sqlite3.connect(tmp_path / "journal.db").execute("SELECT time, type FROM events").fetchall()
    assert rows == [(5.0, "PipelineAllocated"), (5.0, "LeaseGranted"), (6.5, "LeaseGranted")]
    journal.close()
    with Journal(tmp_path / "journal.db") as reopened:
        assert len(reopened) == 3
        assert list(reopened.replay()) == [(5.0, EVENTS[0]), (5.0, EVENTS[1]), (6.5, EVENTS[2])]


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(KeyError):
            journal.append([EVENTS[0], object()])  # type: ignore[list-item]
        assert len(journal) == 0
        assert events_of(journal) == []


# -- one pool, one journal, one writer -------------------------------------------------------------------------------


def test_a_pool_finds_its_journal_again_and_no_other(tmp_path: Path) -> None:
    with open_journal(tmp_path, "pool 1/a") as journal:
        journal.append(EVENTS)
    with open_journal(tmp_path, "pool_2") as other:
        assert len(other) == 0
        with open_journal(tmp_path, "pool 1/a") as again:  # although another pool is at work in the same folder
            assert again.pool == "pool 1/a"
            assert events_of(again) == EVENTS
        with pytest.raises(JournalError, match=r"journal of pool 'pool 1/a', not of 'pool_2'"):
            Journal(journal.path, "pool_2")


def test_only_the_last_ended_pools_are_kept_and_no_running_one_is_removed(tmp_path: Path) -> None:
    with open_journal(tmp_path, "running") as running:
        os.utime(running.path, (1, 1))
        for number in range(KEPT_SESSIONS + 2):
            with open_journal(tmp_path, f"pool_{number}") as journal:
                os.utime(journal.path, (10 + number, 10 + number))
        running.append(EVENTS)
        kept = {path.stem for path in tmp_path.glob("journal-*.db")} - {running.path.stem}
    assert kept == {f"journal-pool_{number}" for number in range(1, KEPT_SESSIONS + 2)}
    assert not (tmp_path / "journal-pool_0.lock").exists()
    with open_journal(tmp_path, "running") as again:
        assert events_of(again) == EVENTS


def test_two_control_planes_of_one_pool_never_run(tmp_path: Path) -> None:
    with open_journal(tmp_path, "a") as first:
        with pytest.raises(JournalBusyError, match=rf"in use by another control plane, process {os.getpid()} \(since"):
            open_journal(tmp_path, "a", wait_s=0.0)
        first.append(EVENTS)
    with open_journal(tmp_path, "a", wait_s=0.0) as successor:
        assert len(successor) == 3


def _hold(home: Path, ready: Connection) -> None:
    journal = open_journal(home, "a")
    journal.append(EVENTS)
    ready.send(len(journal))
    signal.pause()


def test_a_killed_control_planes_successor_waits_for_its_journal(tmp_path: Path) -> None:
    here, there = SPAWNER.Pipe()
    holder = SPAWNER.Process(target=_hold, args=(tmp_path, there))
    holder.start()
    try:
        assert here.poll(60)
        assert here.recv() == 3
    finally:
        holder.kill()  # and not joined: the successor starts at once
    with open_journal(tmp_path, "a", wait_s=60.0) as successor:
        assert events_of(successor) == EVENTS
    holder.join()


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_a_journal_of_another_version_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    with open_journal(tmp_path, "a") as journal:
        journal.append(EVENTS)
    with contextlib.closing(sqlite3.connect(journal.path)) as db:
        db.execute(f"PRAGMA user_version={version}")
    with caplog.at_level(logging.WARNING), open_journal(tmp_path, "a", now=lambda: 0.0) as fresh:
        assert len(fresh) == 0
        fresh.append(EVENTS[:1])
    assert f"has version {version} and this RLix reads version {VERSION}" in caplog.text
    aside = sqlite3.connect(tmp_path / "journal-a-19700101T000000.000000.db")
    assert aside.execute("SELECT COUNT(*) FROM events").fetchone() == (3,)
    aside.close()
    with open_journal(tmp_path, "a") as again:
        assert events_of(again) == EVENTS[:1]


def test_a_journal_of_the_version_before_is_read_on(tmp_path: Path) -> None:
    """A new one would give leases their numbers again, and device locks refuse those that they have seen."""
    infer = Cluster("actor_infer", 1, (0, 1, 5), elastic=True)
    registered = PipelineRegistered(Registration("ft_1", "NS", (infer,)))
    with open_journal(tmp_path, "a") as journal:
        journal.append([*EVENTS, registered])
    with contextlib.closing(sqlite3.connect(journal.path)) as db, db:
        before = TypeAdapter(PipelineRegistered).dump_json(registered).decode()
        db.execute("UPDATE events SET body = ? WHERE type = 'PipelineRegistered'", (before,))
        db.execute("PRAGMA user_version=2")
    for _ in range(2):
        with open_journal(tmp_path, "a") as journal:
            assert events_of(journal) == [*EVENTS, registered]
    assert len(list(tmp_path.glob("*.db"))) == 1


def test_a_damaged_journal_and_an_unknown_event_are_named(tmp_path: Path) -> None:
    (tmp_path / "journal-a.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(JournalError, match=r"cannot open the journal .*journal-a\.db: .*move the file away"):
        open_journal(tmp_path, "a")
    with open_journal(tmp_path, "b") as journal:
        journal.append(some_events(100))
    content = bytearray(journal.path.read_bytes())
    content[8192:-4096] = b"\xff" * (len(content) - 12288)
    journal.path.write_bytes(content)
    with pytest.raises(JournalError, match=r"cannot open the journal .*journal-b\.db: .*move the file away"):
        open_journal(tmp_path, "b")
    with pytest.raises(JournalError, match="unknown event type 'Nonsense'"):
        decode("Nonsense", "{}")
    with pytest.raises(JournalError, match="PipelineAllocated does not have the expected fields"):
        decode("PipelineAllocated", '{"kind": "ft"}')


def test_an_event_that_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.append(EVENTS)
        with contextlib.closing(sqlite3.connect(journal.path, isolation_level=None)) as db:
            db.execute("UPDATE events SET type = 'Nonsense' WHERE sequence = 2")
        with pytest.raises(JournalError, match=r"cannot read the journal .*journal\.db: unknown event type 'Nonsense'"):
            list(journal.replay())


# -- full disks ------------------------------------------------------------------------------------------------------


def _fill(journal: Journal) -> list[Event]:
    """Appends until the disk is full; returns what should be in the journal."""
    written: list[Event] = []
    batch = some_events(10)
    with pytest.raises(JournalError, match=r"cannot write to the journal .*journal\.db: .*full; free space"):
        for _ in range(10_000):
            journal.append(batch)
            written += batch
    assert events_of(journal) == written
    assert len(journal) == len(written)
    return written


def test_a_full_file_leaves_no_hole_and_writing_goes_on_by_itself(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal._db.execute("PRAGMA max_page_count=200")
        written = _fill(journal)
        with pytest.raises(JournalError, match="full"):
            journal.compact(some_events(len(written) + 100))
        assert events_of(journal) == written
        journal._db.execute("PRAGMA max_page_count=100000")
        journal.append(EVENTS)
        assert events_of(journal) == written + EVENTS
    with Journal(tmp_path / "journal.db") as again:
        assert events_of(again) == written + EVENTS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs root, to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.root
def test_a_full_disk_leaves_no_hole_and_writing_goes_on_by_itself(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"0" * 500_000)
    with Journal(small_disk / "journal.db") as journal:
        written = _fill(journal)
        ballast.unlink()
        journal.append(EVENTS)
        assert events_of(journal) == written + EVENTS
    with Journal(small_disk / "journal.db") as again:
        assert events_of(again) == written + EVENTS


# -- compaction ------------------------------------------------------------------------------------------------------


def test_compaction_replaces_everything_and_gives_the_room_back(tmp_path: Path) -> None:
    clock = iter(range(1_000))
    with Journal(tmp_path / "journal.db", now=lambda: float(next(clock))) as journal:
        sizes = []
        for _ in range(4):
            for _ in range(10):
                journal.append(some_events(200))
            journal.compact(EVENTS)
            assert len(journal) == len(EVENTS)
            sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        assert journal.path.stat().st_size < 100_000  # after 2 MB of events
        assert sizes[-1] <= sizes[0]
        assert {at for at, _ in journal.replay()} == {43.0}
        assert events_of(journal) == EVENTS


_BATCH = 7


def _work(path: Path, seed: int, said: Connection) -> None:
    """Appends numbered events in batches for ever, and now and then puts one in the place of all. Says what is safe."""
    rng = random.Random(seed)
    with Journal(path) as journal:
        number = _last(events_of(journal))
        while True:
            number += _BATCH
            journal.append([PipelineAllocated(f"ft_{n}", "event") for n in range(number - _BATCH, number)])
            if rng.random() < 0.2:
                # Large enough that a kill often falls into the transaction.
                journal.compact([PipelineAllocated(f"ft_{number - 1}", "all" + "!" * 1_000)] * 300)
            said.send(number)


def _last(events: Sequence[Event]) -> int:
    """How many numbered events a replay stands for; fails when one is missing, twice or out of order."""
    rows = [(int(e.pipeline_id.partition("_")[2]), e.kind) for e in events if isinstance(e, PipelineAllocated)]
    snapshot = [number for number, kind in rows if kind != "event"]
    assert len(snapshot) in (0, 300)
    assert len(set(snapshot)) <= 1
    first = snapshot[0] + 1 if snapshot else 0
    later = [number for number, kind in rows[len(snapshot) :]]
    assert later == list(range(first, first + len(later))), json.dumps(rows)
    assert (first + len(later)) % _BATCH == 0
    return first + len(later)


SPAWNER = multiprocessing.get_context("forkserver")
SPAWNER.set_forkserver_preload(["rlix.control.journal", "pytest", "hypothesis"])


def test_a_writer_killed_at_any_moment_leaves_a_whole_prefix(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    rng = random.Random(1)
    safe = 0
    for seed in range(25):
        here, there = SPAWNER.Pipe()
        writer = SPAWNER.Process(target=_work, args=(path, seed, there))
        writer.start()
        there.close()
        try:
            for _ in range(rng.randrange(1, 20)):
                assert here.poll(60), "the writer says nothing"
                safe = here.recv()
            for _ in range(rng.randrange(20_000)):  # a moment of any length, in which the writer goes on
                pass
        finally:
            writer.kill()
            writer.join()
        with contextlib.suppress(EOFError):
            while here.poll(0):
                safe = here.recv()
        with Journal(path) as journal:
            found = _last(events_of(journal))
        assert safe <= found <= safe + _BATCH
