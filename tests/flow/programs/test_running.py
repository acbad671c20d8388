"""One flow on real workers in every mode, without a branch: results, turns, streams, chunks that change, errors."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlix.control.client import JobClient
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Mode, Point
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Part
from rlix.protocol.errors import SpecError, WorkerError
from rlix.protocol.types import Phase
from tests.flow.programs.pretended import chunked
from tests.workers.test_worker_group import devices

pytestmark = pytest.mark.ray

ITEMS = 12


class Adds(FlowWorker):
    """Adds to numbers, keeps count of calls, and must be on its devices meanwhile."""

    def __init__(self, number: int) -> None:
        self.number, self.calls, self.here = number, 0, False

    def onload(self) -> None:
        assert not self.here
        self.here = True

    def offload(self) -> None:
        assert self.here
        self.here = False

    def add(self, items: list[int]) -> list[int]:
        assert self.here
        self.calls += 1
        if -1 in items:
            raise LookupError("a number is missing")
        return [item + self.number for item in items]

    def count(self) -> int:
        return self.calls

    def save(self) -> int:
        return self.calls

    def restore(self, state: int) -> None:
        self.calls = state


FLOW = Flow(
    "sums",
    [
        Part("ones", Adds, "add", kwargs={"number": 1}, each=3),
        Part("tens", Adds, "add", ("ones",), kwargs={"number": 10}, chunk=1),
    ],
    ITEMS,
    lambda count: list(range(count)),
)


def profile(held: float, switch_s: float) -> Profile:
    points = tuple(Point(1, n, 0.1 * n, held, held) for n in (1, 4, 16))
    return Profile("sums", "here", dict.fromkeys(("ones", "tens"), PartProfile(points, switch_s, switch_s)))


@pytest.fixture(scope="module")
def running(ray_session: Any) -> Iterator[Running]:
    """Only one state fits on a device."""
    pool = [device for (device,) in devices(2)]
    with Running(FLOW, pool, plan="collocated", profile=profile(60.0, 0.1), device_bytes=80.0) as running:
        yield running


def test_the_same_program_runs_in_turn_and_beside_each_other(running: Running) -> None:
    expected = [n + 11 for n in range(ITEMS)]
    for _ in range(2):
        assert running.step(list(range(ITEMS))) == expected
    assert sum(running.groups["ones"].ask("count")) == 2 * ITEMS // 3  # by whoever was free
    assert "faster, but not collocated: " in running.explain()
    one, two = running.flow.part("ones"), running.flow.part("tens")
    assert one.after == () and two.after == ("ones",)
    apart = running.flow.plan(profile(60.0, 0.1), 2, device_bytes=80.0, mode=Mode.DISAGGREGATED).best
    running.switch(apart)
    assert running.step(list(range(ITEMS))) == expected
    chunk = apart.segments[0].chunk
    assert running.groups["tens"].ask("count") == [2 + ITEMS // chunk]  # it went on from what it had saved
    running.switch(chunked(apart, 5))
    assert running.step(list(range(ITEMS))) == expected
    assert running.groups["tens"].ask("count") == [2 + ITEMS // chunk + 3]


def test_what_a_part_raises_reaches_the_caller_and_the_flow_goes_on(running: Running) -> None:
    with pytest.raises(WorkerError, match=r"sums/ones: rank \d failed in add\(\): LookupError: a number is missing"):
        running.step([-1] * ITEMS)
    with pytest.raises(SpecError, match=r"^flow sums: item 1 of the step cannot be sent to workers: TypeError: cannot"):
        running.step([0, threading.Lock()])
    assert running.step([0] * ITEMS) == [11] * ITEMS
    assert running.groups["ones"].ask("count", ranks=[0])[0] > 0


def test_a_part_whose_rank_was_killed_is_started_again(running: Running) -> None:
    running.keep()
    (before,) = running.groups["ones"].ask("count", ranks=[0])
    running.groups["ones"].kill(0)
    died = r"rank 0 died before it answered onload\(\): process \d+ \(\S+\) was ended"
    what = rf"{died}; running.restart\('ones'\) starts them"
    with pytest.raises(WorkerError, match=rf"^sums/ones: {what} again, from what running.keep\(\) kept$") as caught:
        running.step([0] * ITEMS)
    assert caught.value.__cause__ is None  # a page of Ray's
    running.groups["tens"].kill(0)
    with pytest.raises(WorkerError, match=r"^sums/ones: rank\(s\) 0 died; running.restart\('ones'\)"):
        running.step([0] * ITEMS)
    running.restart("ones")
    with pytest.raises(WorkerError, match=r"^sums/tens: rank\(s\) 0 died; running.restart\('tens'\) starts"):
        running.step([0] * ITEMS)
    running.restart("tens")
    assert running.step([0] * ITEMS) == [11] * ITEMS
    assert running.groups["ones"].ask("count", ranks=[0])[0] > before


class Waits(Adds):
    """Ranks up to `most` go on when somebody has opened the other end of their pipe, and closed it again."""

    def __init__(self, number: int, pipe: str, most: int = 0) -> None:
        super().__init__(number)
        self.pipe, self.most = Path(pipe), most

    def add(self, items: list[int]) -> list[int]:
        if self.ctx.rank <= self.most:
            self.pipe.read_bytes()
        return super().add(items)


def until_it_reads(pipe: Path, step: "Future[list[Any]]") -> int:
    """The end to write to, once a part of the step is at work."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads
            assert not step.done(), step.exception()
            time.sleep(0.01)


def job_of(orchestrator: Any, devices: dict[str, list[int]]) -> JobClient:
    job_id = ray.get(orchestrator.allocate_pipeline_id.remote("ft"), timeout=300)
    registered = orchestrator.register_pipeline.remote(job_id, job_id, dict.fromkeys(devices, 1), devices)
    ray.get(registered, timeout=300)
    ray.get(orchestrator.admit_pipeline.remote(job_id), timeout=300)
    return JobClient(job_id)


def until_it_waits(orchestrator: Any, job: JobClient, asked: "Future[Any]") -> None:
    while job.pipeline_id not in {w.pipeline_id for w in ray.get(orchestrator.status.remote()).waiting}:
        assert not asked.done()


def test_a_rank_that_dies_costs_a_job_no_other(ray_session: Any, tmp_path: Path) -> None:
    """Its devices are given back when the others, which are at a call, have left theirs."""
    mine, other = job_of(ray_session, {"flow": [0, 1]}), job_of(ray_session, {"both": [0, 1]})
    job: Any = SimpleNamespace(client=mine, name_holders=mine.name_holders)
    pipe = tmp_path / "ones"
    os.mkfifo(pipe)
    part = Part("ones", Waits, "add", kwargs={"number": 1, "pipe": str(pipe), "most": 1})
    known = replace(profile(60.0, 0.1), flow="dies", parts={"ones": profile(60.0, 0.1).parts["ones"]})
    pool = [mine.devices()[i] for i in (0, 1)]
    with (
        ThreadPoolExecutor(2) as threads,
        Running(Flow("dies", [part], ITEMS), pool, profile=known, job=job, cluster="flow", timeout_s=300.0) as running,
    ):
        workers = running.groups["ones"]
        step = threads.submit(running.step, [0] * ITEMS)
        end = until_it_reads(pipe, step)
        workers.kill(1)
        asked = threads.submit(other.acquire, "both", Phase.ACTOR_TRAINING, 120.0)
        until_it_waits(ray_session, other, asked)
        assert not step.done()
        os.close(end)
        with pytest.raises(WorkerError, match=r"dies/ones: rank 1 died .* again, anew \(nothing was kept\)"):
            step.result(300)
        other.release(asked.result())
        assert running.groups["ones"].ask("count", ranks=[0]) == [1]
    for client in (mine, other):
        client.unregister("the test is over")


def test_another_job_has_the_devices_in_the_midst_of_a_step(ray_session: Any, tmp_path: Path) -> None:
    """Those that both segments use between them, the one that the second does not use as long as it takes, and beside
    each other that of the stage that has ended."""
    mine = job_of(ray_session, {"flow": [0, 1]})
    other = job_of(ray_session, {"both": [0, 1], "zero": [0], "one": [1]})
    job: Any = SimpleNamespace(client=mine, name_holders=mine.name_holders)
    pipes = [tmp_path / "ones", tmp_path / "tens"]
    for pipe in pipes:
        os.mkfifo(pipe)
    parts = [
        Part("ones", Waits, "add", kwargs={"number": 1, "pipe": str(pipes[0])}, chunk=1),
        Part("tens", Waits, "add", ("ones",), kwargs={"number": 10, "pipe": str(pipes[1])}, most=1, chunk=1),
    ]
    pool, known = [mine.devices()[i] for i in (0, 1)], replace(profile(60.0, 0.1), flow="gaps")
    options: dict[str, Any] = {"device_bytes": 80.0, "job": job, "cluster": "flow", "timeout_s": 120.0}
    with (
        ThreadPoolExecutor(2) as threads,
        Running(Flow("gaps", parts, ITEMS), pool, plan="collocated", profile=known, **options) as running,
    ):
        step = threads.submit(running.step, list(range(ITEMS)))
        first = until_it_reads(pipes[0], step)
        asked = threads.submit(other.acquire, "both", Phase.ACTOR_TRAINING, 120.0)
        until_it_waits(ray_session, other, asked)
        os.close(first)
        lease = asked.result()
        assert not step.done()
        assert running.groups["tens"].ask("count") == [0]
        other.release(lease)
        second = until_it_reads(pipes[1], step)
        with other.phase("one", Phase.ACTOR_TRAINING, 120.0):
            assert not step.done()
        os.close(second)
        assert step.result(300) == [n + 11 for n in range(ITEMS)]
        slow = known.scaled({"ones": 10.0, "tens": 10.0})
        apart = running.flow.plan(slow, 2, device_bytes=80.0, mode=Mode.DISAGGREGATED).best
        running.switch(chunked(apart, ITEMS))
        step = threads.submit(running.step, list(range(ITEMS)))
        first = until_it_reads(pipes[0], step)
        asked = threads.submit(other.acquire, "zero", Phase.ACTOR_TRAINING, 120.0)
        until_it_waits(ray_session, other, asked)
        os.close(first)
        second = until_it_reads(pipes[1], step)
        lease = asked.result()
        assert [status.lease.devices for status in mine.leases()] == [(1,)]
        assert not step.done()
        os.close(second)
        assert step.result(300) == [n + 11 for n in range(ITEMS)]  # while others have what it is done with
        other.release(lease)
    for client in (mine, other):
        client.unregister("the test is over")


def test_a_rank_that_hangs_is_ended_and_started_again_and_nothing_is_printed(
    ray_session: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    part = Part("ones", Waits, "add", kwargs={"number": 1, "pipe": str(pipe)})
    known = replace(profile(60.0, 0.1), flow="hangs", parts={"ones": profile(60.0, 0.1).parts["ones"]})
    pool = [device for (device,) in devices(1)]
    with ThreadPoolExecutor(1) as threads:
        with Running(Flow("hangs", [part], ITEMS), pool, profile=known, timeout_s=300.0) as running:
            step = threads.submit(running.step, [0] * ITEMS)
            end = until_it_reads(pipe, step)
            running.groups["ones"].end_late()
            os.close(end)
            with pytest.raises(
                WorkerError, match=r"^hangs/ones: rank 0 died .*; running.restart\('ones'\) starts them"
            ):
                step.result(300)
            running.restart("ones")
            step = threads.submit(running.step, [0] * ITEMS)
            os.close(until_it_reads(pipe, step))
            assert step.result(300) == [1] * ITEMS
        assert [line for line in capfd.readouterr().err.splitlines() if line and "hangs" not in line] == []
