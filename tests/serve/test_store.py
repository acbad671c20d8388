"""The queue's file: one owner, whole or nothing, and what older versions wrote."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.protocol.errors import SpecError
from rlix.scheduler.queue.jobs import PRIORITIES, Job, Outcome, State, Stop
from rlix.serve.queue.config import load_config
from rlix.serve.queue.store import FILE, Change, Store, StoreError, Used, User, _job, _text
from rlix.serve.queue.submission import read_submission

JOB = Job(1, "j", "ann", "a", 4, submitted_at=5.0)


@given(
    st.builds(
        Job,
        id=st.integers(1),
        name=st.text(min_size=1),
        owner=st.text(),
        team=st.text(),
        gpus=st.integers(1, 1024),
        submitted_at=st.floats(0, 1e10),
        priority=st.sampled_from(list(PRIORITIES.values())),
        limit_s=st.floats(1.0, allow_infinity=True),
        state=st.sampled_from(list(State)),
        why=st.text(alphabet=st.characters(codec="utf-8")),
        stop=st.none() | st.builds(Stop, at=st.floats(0, 1e10), why=st.text(), outcome=st.sampled_from(list(Outcome))),
        outcome=st.none() | st.sampled_from(list(Outcome)),
    )
)
def test_every_job_is_read_back_as_it_was(job: Job) -> None:
    assert _job(_text(job)) == job


def test_what_was_written_is_there_after_a_death(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE)
    store.add(JOB, "key", {"a/b.py": b"\0\xff"}, Change(5.0, 1, "ann", "submitted"))
    store.put([replace(JOB, state=State.ENDED)], [Change(6.0, 1, "", "finished")])
    store.set_user(User("ann", "a", admin=True), "secret")
    store.close()
    store = Store(tmp_path / FILE)
    assert store.ended(9) == [replace(JOB, state=State.ENDED)] and store.jobs() == []
    assert store.files(1) == {"a/b.py": b"\0\xff"} and store.by_key("key") == store.job(1)
    assert [change.what for change in store.changes(1)] == ["submitted", "finished"]
    assert list(store.users().values()) == [User("ann", "a", admin=True)] and store.next_id() == 2
    assert b"secret" not in (tmp_path / FILE).read_bytes(), "of a token only the digest is kept"
    store.close()


def test_of_those_that_ended_the_last_come_first_and_an_owners_are_found_among_others(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE)
    ends = {1: 90.0, 2: 10.0, 3: 20.0, 4: 30.0}  # the first has run for long
    for id, at in ends.items():
        job = replace(JOB, id=id, owner="ann" if id < 3 else "bob")
        store.add(job, None, {"job.yaml": b""}, Change(5.0, id, "ann", "submitted"))
        store.put([replace(job, state=State.ENDED, since=at)], [])
    assert [job.id for job in store.ended(2)] == [1, 4]
    assert [job.id for job in store.ended(9, since=20.0)] == [1, 4, 3]
    assert [job.id for job in store.ended(1, owner="bob")] == [4] and store.ended(9, owner="ob") == []
    assert sorted(store.with_files(before=30.0)) == [2, 3]
    store.close()


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE)
    with pytest.raises(StoreError, match="in use by another `rlix serve`"):
        Store(tmp_path / FILE, wait_s=0.0)
    store.close()
    Store(tmp_path / FILE).close()


def test_a_change_is_whole_or_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE)
    store.add(JOB, None, {}, Change(5.0, 1, "ann", "submitted"))
    with pytest.raises(StoreError):
        store.add(replace(JOB, name="other"), None, {"x": b""}, Change(6.0, 1, "ann", "again"))
    assert store.job(1) == JOB and store.files(1) == {} and len(store.changes(1)) == 1
    store.close()


def test_what_a_newer_version_wrote_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path / FILE).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StoreError, match="has version 99, and this RLix knows versions up to"):
        Store(tmp_path / FILE)


def test_accounts_are_what_was_read_last(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE)
    store.account([Used(1, 10, "rollout", 5.0, 1.0, 1.0), Used(1, 11, "rollout", 7.0, 1.0, 1.0)])
    store.account([Used(1, 11, "rollout", 9.0, 2.0, 1.0)])
    assert [row.given_s for row in store.used()] == [5.0, 9.0]
    assert [row.hour for row in store.used(since=11 * 3600.0 + 5)] == [11]
    store.close()


def test_rules_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "queue.yaml"
    assert load_config(path).jobs_per_gpu == 1
    path.write_text("teams:\n  a: {guaranteed: 8, maximum: 4}\n  b: {wieght: 2}\n")
    with pytest.raises(SpecError) as error:
        load_config(path)
    assert "guaranteed 8 is more than maximum 4" in str(error.value)
    assert "queue.yaml:3: teams.b.wieght: unknown key" in str(error.value) and "weight" in str(error.value)


@pytest.mark.parametrize(
    ("clusters", "gpus"),
    [
        ("{actor_train: {gpus: 2}, actor_infer: {gpus: 8}}", 2),
        ("{actor_train: {gpus: 2}, critic: {gpus: 4}}", 4),
        ("{actor_train: {devices: [0, 1]}, critic: {devices: [1, 2]}}", 3),
        ("{actor_train: {gpus: 2-6}}", 6),
        ("{actor_infer: {tensor_parallel: 2}}", 1),
    ],
)
def test_a_job_needs_what_its_largest_gang_needs(clusters: str, gpus: int) -> None:
    assert read_submission(f"name: j\nclusters: {clusters}\n", 16) == ("j", gpus)


def test_a_planned_job_needs_what_it_is_planned_for() -> None:
    assert read_submission("name: j\nplan: auto\n", 16) == ("j", 16)
    assert read_submission("name: j\nplan: {gpus: 4}\n", 16) == ("j", 4)
