"""What is seen of a job when its coordinator answers, does not answer, or is gone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control.settings import Settings
from rlix.pipeline.jobs.handle import with_next
from rlix.pipeline.jobs.status import JobStatus
from rlix.protocol.messages import ControlStatus, Lease, LeaseState, LeaseStatus, Waiting
from rlix.protocol.types import Phase
from rlix.scheduler.queue.jobs import Outcome
from rlix.serve.queue import pool_runner
from rlix.serve.queue.pool_runner import PoolRunner
from rlix.serve.queue.runner import Control, Is, Seen, Work


class Job:
    def __init__(self, status: JobStatus, run_dir: Path | None) -> None:
        self.known, self.run_dir, self.pipeline_id = status, run_dir, status.pipeline_id

        self.told: list[str] = []

    def status(self) -> JobStatus:
        return self.known

    def stop(self, why: str = "") -> None:
        self.told.append(why)

    close = stop


def status(state: str, pipeline_id: str = "ft_7", **rest: Any) -> JobStatus:
    return JobStatus("j", pipeline_id, state, 2, 5, state, **rest)


class Scene:
    """A job that was started as ft_7, with its folder; `jobs` are those that the pool knows."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work = Work(1, "j", home / "1", home / "runs" / "1", attempt=1, admitted_at=100.0)
        self.work.folder.mkdir(parents=True)
        self.note(pipeline_id="ft_7")
        self.jobs: list[Job] = []
        self.runner = PoolRunner(Settings(home))
        monkeypatch.setattr(pool_runner, "find_jobs", lambda _: self.jobs)
        monkeypatch.setattr(PoolRunner, "_attached", lambda _: None)

    def note(self, **fields: object) -> None:
        (self.work.folder / "started-1.json").write_text(json.dumps(fields))

    def ended(self, state: str, at: float) -> None:
        self.work.run_dir.mkdir(parents=True)
        (self.work.run_dir / "spec.yaml").write_text("name: j\n")
        row = {"type": "job", "event": state, "time": at, "detail": "why"}
        (self.work.run_dir / "events.jsonl").write_text(json.dumps(row) + "\n")

    def seen(self) -> Seen:
        return self.runner.look([self.work])[1]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_one_that_runs_and_then_ends(scene: Scene) -> None:
    job = Job(status("running"), scene.work.run_dir)
    scene.jobs = [job]
    assert scene.seen() == Seen(Is.RUNNING, "ft_7", "running", 2, 5)
    job.known = status("failed", error="no memory", by_pool=True)
    assert scene.seen() == Seen(Is.ENDED, "ft_7", "", 2, 5, Outcome.FAILED, "no memory", by_pool=True)


def test_who_follows_a_job_that_it_stops_is_told_why(scene: Scene) -> None:
    job = Job(status("running"), scene.work.run_dir)
    scene.jobs = [job]
    scene.seen()
    for now in (False, True):
        scene.runner.stop(scene.work, "preempted for other (2)", now=now)
    assert job.told == ["stopped by the queue: preempted for other (2)"] * 2
    assert with_next(job.told[0], scene.work.run_dir) == job.told[0]  # the queue starts it again


def test_one_whose_coordinator_is_slow_has_not_ended(scene: Scene) -> None:
    scene.jobs = [Job(status("unknown"), None)]
    assert scene.seen().state is Is.RUNNING


def test_one_whose_pool_is_gone_is_the_pools_failure(scene: Scene) -> None:
    found = scene.seen()
    assert (found.state, found.by_pool, found.why) == (Is.ENDED, True, "its pool ended before it did")


@pytest.mark.parametrize(("at", "by_pool"), [(150.0, False), (50.0, True)])
def test_an_ending_in_the_run_folder_counts_if_it_is_of_this_attempt(scene: Scene, at: float, by_pool: bool) -> None:
    scene.ended("finished", at)
    found = scene.seen()
    assert found.outcome is (Outcome.FAILED if by_pool else Outcome.FINISHED) and found.by_pool is by_pool


def test_the_coordinator_of_the_attempt_before_is_not_asked(scene: Scene) -> None:
    scene.jobs = [Job(status("stopped", "ft_6"), scene.work.run_dir), Job(status("running"), scene.work.run_dir)]
    assert scene.seen().state is Is.RUNNING


@pytest.mark.parametrize("mistake", [True, False])
def test_what_could_not_be_started_says_why(scene: Scene, mistake: bool) -> None:
    scene.note(error="no such file", mistake=mistake)
    assert scene.seen() == Seen(Is.ENDED, outcome=Outcome.FAILED, why="no such file", by_pool=not mistake)


@pytest.mark.parametrize("text", ["", "{", '{"x": 1}', "[1]"])
def test_a_note_that_cannot_be_read_is_the_pools_failure(scene: Scene, text: str) -> None:
    (scene.work.folder / "started-1.json").write_text(text)
    found = scene.seen()
    assert (found.state, found.by_pool) == (Is.ENDED, True) and "cannot be read" in found.why


def test_one_whose_run_folder_holds_anything_has_not_ended_the_service(scene: Scene) -> None:
    scene.ended("finished", 150.0)
    (scene.work.run_dir / "spec.yaml").write_bytes(b"\xff\xfe\xff")
    assert scene.seen().by_pool


def test_one_that_nobody_has_begun_to_start_is_absent(scene: Scene) -> None:
    (scene.work.folder / "started-1.json").unlink()
    assert scene.seen() == Seen(Is.ABSENT)


def test_what_the_control_plane_says_of_itself_is_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(epoch: int, devices: tuple[int, ...], state: LeaseState) -> LeaseStatus:
        return LeaseStatus(Lease(epoch, "ft_1", "c", Phase.ROLLOUT, devices), state)

    leases = (
        held(1, (0, 1), LeaseState.ACTIVE),
        held(2, (2,), LeaseState.DRAINING),
        held(3, (3,), LeaseState.QUARANTINED),
        held(4, (0, 1), LeaseState.PENDING),
    )
    waiting = tuple(Waiting(f"ft_{n}", "actor_train", Phase.ACTOR_TRAINING, 5.0, "") for n in range(2))
    status = ControlStatus((), (), leases, waiting, plans=7, plan_s=0.5)
    orchestrator = SimpleNamespace(status=SimpleNamespace(remote=lambda: status))
    monkeypatch.setattr(PoolRunner, "_attached", lambda _: orchestrator)
    monkeypatch.setattr(pool_runner, "get", lambda asked, **_: asked)
    assert scene.runner.control() == Control(7, 0.5, {"actor_training": 2}, leased=3, quarantined=1)


@pytest.mark.parametrize("gone", [True, False])
def test_it_is_known_for_whom_one_was_stopped_also_by_who_did_not_ask_for_it(scene: Scene, gone: bool) -> None:
    job = Job(status("running"), scene.work.run_dir)
    scene.jobs = [job]
    scene.seen()
    scene.runner.stop(scene.work, "the queue was drained by ann", now=False)
    scene.ended("stopped", 150.0)
    job.known = status("stopped")
    if gone:
        scene.jobs, scene.runner = [], PoolRunner(Settings(scene.work.folder.parent))
    assert scene.seen().for_queue == "the queue was drained by ann"


def test_one_that_somebody_stopped_past_the_queue_is_not_queued_again(scene: Scene) -> None:
    scene.jobs = [Job(status("stopped"), scene.work.run_dir)]
    found = scene.seen()
    assert (found.for_queue, found.outcome, found.why) == (
        "",
        Outcome.CANCELLED,
        "it was stopped, and not by the queue",
    )
