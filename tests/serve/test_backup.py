"""Backups, restores and upgrades of the queue's file, and who can read it."""

import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rlix.protocol.errors import SpecError
from rlix.scheduler.queue.jobs import Job, State
from rlix.serve.queue.backup import backup, restore
from rlix.serve.queue.store import DRAINED, FILE, VERSION, Change, Store, User

JOB = Job(1, "j", "ann", "a", 4, submitted_at=5.0)
VERSION_1 = """
CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, state TEXT NOT NULL, key TEXT UNIQUE, body TEXT NOT NULL);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE files (job INTEGER NOT NULL, path TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (job, path));
CREATE TABLE changes (sequence INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, job INTEGER NOT NULL, by TEXT
NOT NULL, what TEXT NOT NULL);
CREATE INDEX changes_by_job ON changes (job);
CREATE TABLE usage (job INTEGER NOT NULL, hour INTEGER NOT NULL, phase TEXT NOT NULL, given_s REAL NOT NULL, busy_s REAL
NOT NULL, switching_s REAL NOT NULL, PRIMARY KEY (job, hour, phase));
CREATE TABLE users (name TEXT PRIMARY KEY, team TEXT NOT NULL, admin INTEGER NOT NULL, digest TEXT NOT NULL);
INSERT INTO jobs VALUES (7, 'running', 'ann:key', '{"id": 7, "name": "sweep", "owner": "ann", "team": "a", "gpus": 4,
"submitted_at": 5.0, "priority": 0, "preemptible": true, "limit_s": Infinity, "state": "running", "since": 6.0,
"why": "", "admitted_at": 6.0, "pipeline_id": "ft_1", "stop": {"at": 9.0, "why": "preempted for a/b (8)", "outcome":
null, "for_id": 8}, "outcome": null, "failures": 0, "not_before": 0.0, "requeues": 1}');
INSERT INTO jobs VALUES (6, 'ended', NULL, '{"id": 6, "name": "early", "owner": "\\"since\\": 1", "team": "a",
"gpus": 4, "submitted_at": 5.0, "priority": 0, "preemptible": true, "limit_s": Infinity, "state": "ended",
"since": 1700000000.25,
"why": "", "admitted_at": 6.0, "pipeline_id": "ft_1", "stop": null, "outcome": "finished", "failures": 0,
"not_before": 0.0, "requeues": 0}');
INSERT INTO files VALUES (7, 'job.yaml', x'6e616d653a206a');
INSERT INTO changes VALUES (1, 5.0, 7, 'ann', 'submitted');
INSERT INTO usage VALUES (7, 10, 'rollout', 5.0, 1.0, 1.0);
INSERT INTO users VALUES ('ann', 'a', 1, 'digest');
PRAGMA user_version=1;
"""
"""A queue as the first version of the file has it."""


def test_a_queue_of_the_first_version_goes_on(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.executescript(VERSION_1)
    store = Store(tmp_path / FILE)
    (job,) = store.jobs()
    assert (job.id, job.state, job.requeues, job.stop and job.stop.for_id) == (7, State.RUNNING, 1, 8)
    assert store.files(7) == {"job.yaml": b"name: j"} and store.by_key("ann:key") == job and store.next_id() == 8
    assert [change.what for change in store.changes(7)] == ["submitted"]
    assert [row.given_s for row in store.used()] == [5.0] and store.users() == {"digest": User("ann", "a", admin=True)}
    assert store.setting("drained") == ""
    assert [job.since for job in store.ended(1, since=1700000000.25)] == [1700000000.25]
    assert store.ended(1, since=1700000000.5) == []
    store.close()
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION


def test_a_backup_of_a_queue_that_is_served_is_whole_and_its_numbers_are_not_given_again(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy.db"
    store = Store(home / FILE)
    store.add(JOB, None, {"job.yaml": b"name: j"}, Change(5.0, 1, "ann", "submitted"))
    backup(home, copy)
    for id in (2, 3):
        store.add(replace(JOB, id=id), None, {}, Change(6.0, id, "ann", "submitted"))
    (home / "queue" / "5").mkdir(parents=True)
    with pytest.raises(SpecError, match="is in use by `rlix serve`"):
        restore_at_once(home, copy)
    store.close()
    aside = restore(home, copy).aside
    store = Store(home / FILE)
    assert store.jobs() == [JOB] and store.files(1) == {"job.yaml": b"name: j"} and store.next_id() == 6
    store.close()
    assert aside is not None
    with closing(sqlite3.connect(aside)) as db:
        assert db.execute("SELECT COUNT(*) FROM jobs").fetchone()[0] == 3, "what was there is kept"


def restore_at_once(home: Path, copy: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlix.serve.queue.backup._LOCK_WAIT_S", 0.0)
        restore(home, copy)


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + bytes(5000)])
def test_what_is_no_backup_is_refused_and_nothing_is_changed(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path / FILE).close()
    (tmp_path / "copy.db").write_bytes(content)
    with pytest.raises(SpecError, match=r"copy\.db: is no backup"):
        restore(tmp_path, tmp_path / "copy.db")
    assert sorted(path.name for path in tmp_path.glob("queue.db*")) == [FILE]


def test_mistakes_with_a_backup_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no queue"):
        backup(tmp_path, tmp_path / "copy.db")
    Store(tmp_path / FILE).close()
    backup(tmp_path, tmp_path / "copy.db")
    with pytest.raises(SpecError, match="is there already"):
        backup(tmp_path, tmp_path / "copy.db")
    with pytest.raises(SpecError, match="cannot be written"):
        backup(tmp_path, tmp_path / "missing" / "copy.db")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(SpecError, match="has version 99"):
        restore(tmp_path, tmp_path / "copy.db")


def test_only_its_owner_reads_the_queue_and_its_copies(tmp_path: Path) -> None:
    (tmp_path / FILE).touch(mode=0o644)
    store = Store(tmp_path / FILE)
    store.add(JOB, None, {}, Change(5.0, 1, "ann", "submitted"))
    backup(tmp_path, tmp_path / "copy.db")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.db*")}
    assert len(modes) >= 3 and set(modes.values()) == {0o600}, modes
    store.close()


def test_a_restored_queue_stays_drained_and_goes_on_after_the_last_attempts(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy.db"
    store = Store(home / FILE)
    states = {1: State.RUNNING, 2: State.SUBMITTED, 3: State.ENDED, 4: State.SUBMITTED}
    for id, state in states.items():
        store.add(replace(JOB, id=id, state=state, requeues=1), None, {}, Change(5.0, id, "ann", "submitted"))
    backup(home, copy)
    store.set(DRAINED, "ann")
    store.close()
    for id, made in {1: 3, 2: 1, 3: 1}.items():  # since the backup
        for attempt in range(made + 1):
            (home / "queue" / str(id)).mkdir(parents=True, exist_ok=True)
            (home / "queue" / str(id) / f"started-{attempt}.json").write_text("{}")
    assert restore(home, copy).drained == "ann"
    store = Store(home / FILE)
    jobs = [*store.jobs(), *store.ended(9)]
    assert {job.id: job.requeues for job in jobs} == {1: 3, 2: 2, 3: 1, 4: 1}
    assert store.setting(DRAINED) == "ann"
    store.close()
