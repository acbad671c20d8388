"""How the coordinator of a job sees it to its end, without Ray; with it: `test_jobs.py`, `test_node_loss.py`."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import RayActorError

from rlix.pipeline.base import Pipeline
from rlix.pipeline.jobs import job_coordinator
from rlix.pipeline.jobs.job_coordinator import JobCoordinator
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.protocol.errors import DeviceBusyError, SpecError, WaitTimeoutError
from rlix.protocol.messages import Ending
from tests.pipeline.test_run_folder import killed_starts
from tests.pipeline.training_jobs import small


class Coordinator(JobCoordinator):
    """Its pipeline is to go on by another plan; a `stop` may come while it leaves."""

    stops = False

    async def _run(self, pipeline: Any) -> JobStatus:
        self._other = self._config.spec
        self._closed.set()
        return JobStatus("job", "ft_1", "stopped", 2, 4, "stopped")

    async def _leave(self, before: Any, why: str) -> None:
        await super()._leave(before, why)
        self._stop_wanted = self.stops


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, *, stops: bool) -> tuple[JobStatus, MagicMock]:
    ray = MagicMock()
    ray.get_actor.side_effect = ValueError("no actor of that name")
    monkeypatch.setattr(job_coordinator, "ray", ray)
    monkeypatch.setattr(job_coordinator, "REMEMBERED_S", 0.0)

    async def run() -> JobStatus:
        coordinator = Coordinator("ft_1", JobConfig(small(), folder))
        coordinator._started.set()
        coordinator.stops = stops
        await coordinator._see_to_the_end(None)
        return await coordinator.ended()

    return asyncio.run(asyncio.wait_for(run(), 300)), ray


def test_a_stop_while_it_changes_over_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, ray = ended(tmp_path, monkeypatch, stops=True)
    assert (final.state, final.step, final.error) == ("stopped", 2, None)
    assert not ray.get_actor.called


def test_it_ends_though_there_is_no_orchestrator_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, _ = ended(tmp_path, monkeypatch, stops=False)
    assert final.state == "failed"
    assert "it could not go on: ValueError: no actor of that name" in (final.error or "")


def test_what_the_control_plane_ended_is_said_with_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped is ended by it: the job itself sees no more than a death."""
    why = "process 4711 (train:0) was stopped (SIGSTOP) and did not go on"
    of_others = Ending(1.0, "ft_10", "other", "its program died")
    mine = Ending(2.0, "ft_1", "job", why, 3, "actor_train", (0,))

    class Orchestrator:
        async def _status(self) -> Any:
            return SimpleNamespace(endings=self.endings)

        def __init__(self, *endings: Ending) -> None:
            self.endings = endings
            self.status = SimpleNamespace(remote=self._status)

    async def said(*endings: Ending) -> str:
        monkeypatch.setattr(job_coordinator.ray, "get_actor", lambda *_: Orchestrator(*endings))
        coordinator = JobCoordinator("ft_1", JobConfig(small(), tmp_path))
        coordinator._started.set()
        return await coordinator._why_taken()

    monkeypatch.setattr(job_coordinator, "ray", MagicMock())
    assert asyncio.run(said(of_others)) == ""
    assert asyncio.run(said(of_others, mine)) == f" (the control plane ended what held actor_train: {why})"


DIED = "its program died: a process died: it was killed (by somebody, or by the kernel for want of memory), or crashed"


@pytest.mark.parametrize(
    ("why", "state", "error", "by_pool"),
    [
        ("", "failed", f"{DIED}; see job.log", False),
        ("its program, process 7, died", "failed", f"{DIED}; see job.log", False),  # seen there before it was here
        ("its program, process 7, was stopped (SIGSTOP)", "failed", "the control plane ended it: its program", True),
        ("its host had 1.0 GB left", "failed", "the control plane ended it: its host had 1.0 GB left", True),
        ("stopped by `rlix stop --now`", "stopped", "stopped by `rlix stop --now`; it has no checkpoint", False),
    ],
)
def test_whoever_notices_first_a_death_is_its_own_and_a_stop_is_a_stop(
    why: str, state: str, error: str, by_pool: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def why_ended(_: str) -> str:
        return why

    async def final() -> JobStatus:
        coordinator = JobCoordinator("ft_1", JobConfig(small(), tmp_path / "job"))
        coordinator._started.set()
        status = await coordinator._died(RayActorError())
        assert not await coordinator._why_again(status)
        await coordinator._be_over(status)
        return await coordinator.ended()

    ray = MagicMock()
    ray.get_actor = lambda *_: SimpleNamespace(why_ended=SimpleNamespace(remote=why_ended))
    monkeypatch.setattr(job_coordinator, "ray", ray)
    monkeypatch.setattr(job_coordinator, "REMEMBERED_S", 0.0)
    monkeypatch.setattr(job_coordinator, "_staying", staying)
    ended = asyncio.run(asyncio.wait_for(final(), 300))
    assert (ended.state, ended.by_pool) == (state, by_pool)
    assert (ended.error or "").startswith(error)


@pytest.mark.parametrize(("printed", "said"), [("rlix: process 7 is ended: why\n", False), ("mine\n", True)])
def test_what_its_code_printed_is_named_where_a_start_failed(printed: str, said: bool, tmp_path: Path) -> None:
    early = tmp_path / "job.output.log"
    early.write_text(printed)
    failed = JobStatus("job", "ft_1", "failed", 0, 4, "failed", error="it died")
    found = job_coordinator._with_output(failed, early)
    assert str(found.error) == (f"it died\nwhat its code printed is in {early}" if said else "it died")
    assert early.exists() is said


async def staying() -> set[str]:
    return set()


def test_a_process_that_is_killed_before_its_first_step_gives_the_run_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed_starts(tmp_path / "job", 1)

    async def given_back(step: int) -> JobStatus:
        coordinator = Coordinator("ft_1", JobConfig(small(), path))
        coordinator._started.set()
        return await coordinator._given_back(JobStatus("job", "ft_1", "failed", step, 4, "failed", error="it died"))

    monkeypatch.setattr(job_coordinator, "ray", MagicMock())
    assert asyncio.run(given_back(1)).moved_to is None
    final = asyncio.run(given_back(0))
    assert (path / "spec.yaml").read_text() == "first"
    assert f"it died\n{path} holds the run before this one again" in str(final.error)
    assert (Path(str(final.moved_to)) / "spec.yaml").read_text() == "killed 0"


@pytest.mark.parametrize(
    ("error", "by_pool"),
    [(WaitTimeoutError("no answer in 60 s"), True), (SpecError("devices: the pool has 2"), False)],
)
def test_a_start_that_came_to_nothing_is_the_pools_fault_or_the_jobs(
    error: Exception, by_pool: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unstarted(JobCoordinator):
        async def _create(self) -> Any:
            raise error

    async def final() -> JobStatus:
        coordinator = Unstarted("ft_1", JobConfig(small(), tmp_path / "job"))
        coordinator._started.set()
        await coordinator._begin()
        return await coordinator.ended()

    monkeypatch.setattr(job_coordinator, "ray", MagicMock())
    monkeypatch.setattr(job_coordinator, "REMEMBERED_S", 0.0)
    ended = asyncio.run(asyncio.wait_for(final(), 300))
    assert (ended.state, ended.by_pool) == ("failed", by_pool)
    assert ended.error == f"it could not start: {error}"


@pytest.mark.parametrize(("state", "by_pool"), [("starting", True), ("running", False)])
def test_a_device_that_somebody_else_has_is_the_pools_fault_until_the_first_step(
    state: str, by_pool: bool, tmp_path: Path
) -> None:
    pipeline = MagicMock(folder=SimpleNamespace(path=tmp_path / "job", is_open=False))
    pipeline._status = JobStatus("job", "ft_1", state, 0, 4, "initialization")
    pipeline._ended.is_set.return_value = False
    Pipeline._failed(pipeline, DeviceBusyError("device 0 is held by process 7"))
    assert pipeline._update.call_args.kwargs["by_pool"] is by_pool
