"""Decisions become jobs that run: written down first, done again after a death, never twice."""

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlix.node.run_folder import command_to_go_on
from rlix.scheduler.queue.decide import STOP_S
from rlix.scheduler.queue.jobs import Job, Outcome, QueueError, State
from rlix.scheduler.queue.reasons import Drained, NoRoom, Reclaiming
from rlix.serve.queue.config import QueueSpec, TeamSpec
from rlix.serve.queue.keeper import FAILURES, KEPT_DAYS, Asked, Keeper
from rlix.serve.queue.store import FILE, Store
from tests.serve.fakes import Clock, FakePool

FILES = {"job.yaml": b"name: j\n", "rewards/mine.py": b"pass\n"}


class Scene:
    """A queue of eight GPUs that can be killed."""

    def __init__(self, home: Path, config: QueueSpec) -> None:
        self.home, self.config, self.clock, self.pool = home, config, Clock(), FakePool(8)
        self._open()

    def _open(self) -> None:
        self.store = Store(self.home / FILE)
        self.keeper = Keeper(
            self.store,
            self.pool,
            self.config,
            self.home,
            self.home / "runs",
            now=self.clock,  # type: ignore[arg-type]
        )

    def killed(self) -> None:
        """The service dies, and another one begins with what is on disk."""
        self.store.close()
        self._open()

    def submit(self, gpus: int = 4, owner: str = "ann", team: str = "a", key: str | None = None, **rest: Any) -> int:
        return self.keeper.submit(Asked(f"j{gpus}", gpus, **rest), owner, team, FILES, key).id

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        asyncio.run(self.keeper.turn())

    def job(self, id: int) -> Job:
        found = self.keeper.job(id)
        assert found is not None
        return found

    def state(self, id: int) -> State:
        return self.job(id).state


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, QueueSpec(teams={"a": TeamSpec(guaranteed=4), "b": TeamSpec()}))
    yield made
    made.store.close()


def test_a_job_goes_through_its_states_and_its_files_are_where_it_starts(scene: Scene) -> None:
    id = scene.submit()
    assert scene.state(id) is State.SUBMITTED
    scene.turn()
    assert scene.state(id) is State.ADMITTED and scene.pool.started == [(id, 0)]
    work = scene.keeper.work(scene.job(id))
    assert (work.files / "rewards" / "mine.py").read_bytes() == FILES["rewards/mine.py"]
    scene.turn()
    assert scene.state(id) is State.RUNNING and scene.job(id).pipeline_id == "ft_1"
    scene.pool.end(id)
    scene.turn()
    assert scene.job(id).outcome is Outcome.FINISHED
    assert [change.what for change in scene.keeper.changes(id)] == ["submitted", "admitted", "running", "finished"]


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_service_that_dies_after_any_turn_loses_nothing_and_starts_nothing_twice(scene: Scene, after: int) -> None:
    ids = [scene.submit(3, key=f"key-number-{n}") for n in range(3)]
    for number in range(8):
        if number == after:
            scene.killed()
            assert scene.submit(3, key="key-number-1") == ids[1], "asked again, it is the same job"
        if number == 4:
            scene.pool.end(ids[0])
        scene.turn(1.0)
    scene.pool.end(ids[1])
    scene.pool.end(ids[2])
    scene.turn()
    assert sorted(scene.pool.started) == [(id, 0) for id in ids]
    assert [scene.state(id) for id in ids] == [State.ENDED] * 3 and not scene.keeper.jobs
    assert scene.submit() == max(ids) + 1


def test_one_that_was_admitted_but_not_begun_is_begun_after_a_restart(scene: Scene) -> None:
    id = scene.submit()
    scene.pool.start = lambda work: None  # type: ignore[method-assign] # the service dies before it comes to that
    scene.turn()
    assert scene.state(id) is State.ADMITTED
    del scene.pool.start  # type: ignore[method-assign]
    scene.killed()
    scene.turn()
    scene.turn()
    assert scene.state(id) is State.RUNNING and scene.pool.started == [(id, 0)]


def test_who_failed_for_the_pools_reasons_comes_back_with_a_count_and_not_for_ever(scene: Scene) -> None:
    id = scene.submit()
    for failure in range(1, FAILURES):
        scene.turn()
        scene.pool.end(id, Outcome.FAILED, "a node left", by_pool=True)
        scene.turn()
        job = scene.job(id)
        assert (job.state, job.failures, job.requeues, job.why) == (State.SUBMITTED, failure, failure, "a node left")
        scene.turn()
        assert scene.state(id) is State.SUBMITTED, "it has a pause first"
        scene.clock.now = job.not_before
    scene.turn()
    scene.pool.end(id, Outcome.FAILED, "a node left", by_pool=True)
    scene.turn()
    assert scene.job(id).outcome is Outcome.FAILED and scene.job(id).why == "a node left; the 5th time in a row"
    assert scene.pool.started == [(id, attempt) for attempt in range(FAILURES)]


def test_what_its_own_code_did_ends_it(scene: Scene) -> None:
    id = scene.submit()
    scene.turn()
    scene.pool.end(id, Outcome.FAILED, "ValueError: no")
    scene.turn()
    assert (scene.job(id).outcome, scene.job(id).why) == (Outcome.FAILED, "ValueError: no")


def test_a_guarantee_is_taken_back_and_the_borrower_goes_on_later(scene: Scene) -> None:
    borrower = scene.submit(8, owner="bob", team="b")
    scene.turn()
    scene.turn()
    mine = scene.submit(4)
    scene.turn()
    assert isinstance(scene.keeper.wait_of(mine).reason, Reclaiming)  # type: ignore[union-attr]
    assert scene.pool.stopped == [(borrower, False)]
    scene.pool.end(borrower, Outcome.CANCELLED)
    scene.turn()
    job = scene.job(borrower)
    assert (job.state, job.requeues, job.failures) == (State.SUBMITTED, 1, 0)
    assert job.why == f"preempted for a/j4 ({mine})"
    assert scene.state(mine) is State.ADMITTED
    assert isinstance(scene.keeper.wait_of(borrower).reason, NoRoom)  # type: ignore[union-attr]


def test_a_stop_is_asked_for_again_and_after_its_time_no_longer_asked_for(scene: Scene) -> None:
    id = scene.submit()
    scene.turn()
    scene.turn()
    scene.keeper.cancel(scene.job(id), "ann")
    scene.turn()
    scene.turn(1.0)
    assert scene.pool.stopped == [(id, False)]
    scene.killed()
    scene.turn()
    scene.turn(STOP_S)
    assert scene.pool.stopped == [(id, False), (id, False), (id, True)]
    scene.pool.end(id, Outcome.CANCELLED)
    scene.turn()
    assert (scene.job(id).outcome, scene.job(id).why) == (Outcome.CANCELLED, "cancelled by ann")


def test_a_time_limit_ends_a_job_and_one_that_finishes_first_has_finished(scene: Scene) -> None:
    late, quick = scene.submit(2, limit_s=60.0), scene.submit(2, limit_s=60.0)
    scene.turn()
    scene.turn()
    scene.turn(60.0)
    assert scene.pool.stopped == [(late, False), (quick, False)]
    scene.pool.end(late, Outcome.CANCELLED)
    scene.pool.end(quick)
    scene.turn()
    assert (scene.job(late).outcome, scene.job(quick).outcome) == (Outcome.TIMEOUT, Outcome.FINISHED)
    assert scene.job(late).why == "its time limit of 60 s is over"


def test_hold_release_cancel_requeue_and_what_is_refused(scene: Scene) -> None:
    id = scene.submit(held=True)
    scene.turn()
    assert scene.state(id) is State.HELD
    scene.keeper.release(scene.job(id), "ann")
    scene.keeper.hold(scene.job(id), "bob")
    scene.turn()
    assert scene.state(id) is State.HELD and not scene.pool.started
    scene.keeper.cancel(scene.job(id), "ann")
    with pytest.raises(QueueError, match="has ended"):
        scene.keeper.cancel(scene.job(id), "ann")
    scene.keeper.requeue(scene.job(id), "ann")
    scene.turn()
    assert scene.pool.started == [(id, 1)]
    with pytest.raises(QueueError, match="cannot become held"):
        scene.keeper.hold(scene.job(id), "ann")


def test_what_its_owner_may_not_release_is_not_queued_again_either(scene: Scene) -> None:
    id = scene.submit()
    scene.keeper.hold(scene.job(id), "root")
    with pytest.raises(QueueError, match="is held, by root"):
        scene.keeper.requeue(scene.job(id), "ann")
    assert scene.state(id) is State.HELD


@pytest.mark.parametrize("verb", ["cancel", "requeue"])
def test_who_is_to_stop_gets_no_more_time_by_asking_again(scene: Scene, verb: str) -> None:
    id = scene.submit()
    scene.turn()
    scene.turn()
    scene.keeper.cancel(scene.job(id), "root")
    for _ in range(3):
        scene.turn(STOP_S / 3)
        getattr(scene.keeper, verb)(scene.job(id), "ann")
    scene.turn(10.0)
    assert scene.pool.stopped[-1] == (id, True)


def test_one_that_cannot_be_begun_is_in_nobodys_way(scene: Scene) -> None:
    first = scene.submit(2)
    folder = scene.keeper.work(scene.job(first)).folder
    folder.parent.mkdir(parents=True)
    folder.write_text("in the place of its folder")
    other = scene.submit(2)
    scene.turn()
    assert scene.pool.started == [(other, 0)]
    folder.unlink()
    scene.turn()
    assert scene.pool.started == [(other, 0), (first, 0)]


def test_one_that_is_cancelled_before_it_was_begun_is_not_begun(scene: Scene) -> None:
    id = scene.submit()
    scene.pool.start = lambda work: None  # type: ignore[method-assign]
    scene.turn()
    del scene.pool.start  # type: ignore[method-assign]
    scene.keeper.cancel(scene.job(id), "ann")
    scene.turn()
    assert scene.job(id).outcome is Outcome.CANCELLED and not scene.pool.started


def test_a_drained_queue_starts_nothing_until_somebody_says_so(scene: Scene) -> None:
    first = scene.submit(4)
    scene.turn()
    scene.keeper.drain("root", requeue=False)
    second = scene.submit(2)
    scene.turn()
    scene.killed()
    scene.turn(100.0)
    assert (scene.state(first), scene.state(second)) == (State.RUNNING, State.SUBMITTED), "what runs goes on"
    wait = scene.keeper.wait_of(second)
    assert wait is not None and wait.reason == Drained("root")
    scene.keeper.drain("root", requeue=True)
    scene.turn()
    assert (first, False) in scene.pool.stopped
    scene.pool.end(first, Outcome.CANCELLED)
    scene.turn()
    assert (scene.state(first), scene.job(first).requeues) == (State.SUBMITTED, 1)
    scene.keeper.resume()
    scene.turn()
    scene.turn()
    assert (scene.state(first), scene.state(second)) == (State.RUNNING, State.RUNNING)


def test_only_who_runs_the_service_reads_a_jobs_folders(scene: Scene) -> None:
    id = scene.submit()
    scene.turn()
    work = scene.keeper.work(scene.job(id))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (work.folder, work.runs_dir)} == {0o700}
    assert command_to_go_on(work.run_dir) == f"`rlix requeue {id}`", "and who stops it there is told how it goes on"


def test_a_user_has_only_so_many_jobs_and_gets_the_one_it_asked_for_before(tmp_path: Path) -> None:
    scene = Scene(tmp_path, QueueSpec(most_jobs=2))
    first = scene.submit(key="ann:first-one")
    scene.submit()
    assert scene.submit(key="ann:first-one") == first
    with pytest.raises(QueueError, match=r"ann has 2 jobs that have not ended, and may have 2 \(most_jobs"):
        scene.submit()
    scene.submit(owner="bob")
    scene.keeper.cancel(scene.job(first), "ann")
    scene.submit()
    with pytest.raises(QueueError, match="may have 2"):
        scene.keeper.requeue(scene.job(first), "ann")
    scene.store.close()


def test_files_of_who_ended_long_ago_are_forgotten(scene: Scene) -> None:
    old, runs = scene.submit(2), scene.submit(2)
    scene.turn()
    scene.pool.end(old, Outcome.FAILED)
    scene.turn()
    scene.clock.now += KEPT_DAYS * 86400.0
    recent = scene.submit(2, held=True)
    scene.keeper.cancel(scene.job(recent), "ann")
    scene.keeper.forget_files()
    assert all(scene.store.files(old)) and scene.keeper.work(scene.job(old)).folder.exists()
    scene.clock.now += 1.0
    scene.keeper.forget_files()
    assert not scene.store.files(old) and not scene.keeper.work(scene.job(old)).folder.exists()
    assert scene.store.files(recent) == scene.store.files(runs) == FILES
    with pytest.raises(QueueError, match="kept 30 days"):
        scene.keeper.requeue(scene.job(old), "ann")
    scene.keeper.requeue(scene.job(recent), "ann")


def test_while_the_pool_is_away_nothing_is_decided_and_nothing_lost(scene: Scene) -> None:
    id = scene.submit()
    scene.turn()
    scene.pool.away = "the control plane died"
    other = scene.submit()
    scene.turn()
    assert scene.keeper.pool_why == "the control plane died" and scene.state(other) is State.SUBMITTED
    scene.pool.away = ""
    scene.turn()
    scene.turn()
    assert scene.state(id) is scene.state(other) is State.RUNNING


def test_one_that_the_queue_had_stopped_before_it_was_restored_is_queued_again(scene: Scene) -> None:
    id = scene.submit()
    scene.turn()
    scene.turn()
    scene.pool.end(id, Outcome.CANCELLED, for_queue="the queue was drained by ann")
    scene.turn()
    assert scene.job(id).requeues == 1 and scene.job(id).outcome is None
    what = [change.what for change in scene.keeper.changes(id)]
    assert what[-2:] == ["submitted: the queue was drained by ann", "admitted"]


def test_one_that_has_finished_is_as_far_as_it_came_and_nobody_changes_it(scene: Scene) -> None:
    id, ended = scene.submit(), list[Job]()
    scene.turn()
    scene.turn()  # it is at step 1 of 5
    scene.pool.end(id)
    scene.keeper.on_end = ended.append
    scene.turn()
    assert (scene.job(id).step, scene.job(id).steps) == (1, 5)
    with pytest.raises(QueueError, match="has finished: it has done all its steps"):
        scene.keeper.requeue(scene.job(id), "ann")
    with pytest.raises(QueueError, match="has ended"):
        scene.keeper.set_priority(scene.job(id), 1, "ann")
    assert len(ended) == 1, "it is told of once"
    other = scene.submit()
    scene.keeper.set_priority(scene.job(other), -1, "ann")
    assert scene.keeper.changes(other)[-1].what == "priority low"
