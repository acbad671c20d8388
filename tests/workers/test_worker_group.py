"""Worker groups on real Ray: forked and spawned, calls, failures, restarts and what is left behind."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rlix.node import process
from rlix.protocol.errors import SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, DeviceKind
from rlix.workers.group import WorkerGroup
from rlix.workers.launch import launch
from rlix.workers.per_rank import PerRank
from tests.workers.workers import EchoWorker, wait_gone

pytestmark = pytest.mark.ray

TIMEOUT_S = 300.0


def devices(count: int, kind: DeviceKind = DeviceKind.CPU) -> list[tuple[Device, ...]]:
    node_id = ray.get_runtime_context().get_node_id()
    return [(Device(id=i, node_id=node_id, node_ip="127.0.0.1", index=i, kind=kind),) for i in range(count)]


def facts(group: WorkerGroup, ranks: list[int] | None = None) -> list[dict[str, Any]]:
    return group.run("facts", timeout_s=TIMEOUT_S, ranks=ranks)


@pytest.fixture(scope="module")
def group(ray_session: Any) -> Iterator[WorkerGroup]:
    with WorkerGroup(
        EchoWorker,
        name="echo",
        placements=devices(3),
        kwargs={"greeting": PerRank(["a", "b", "c"])},
        env={"FLOW_TEST": "set"},
    ) as group:
        yield group


def test_workers_are_forked_and_configured(group: WorkerGroup) -> None:
    workers = facts(group)
    assert [worker["greeting"] for worker in workers] == ["a", "b", "c"]
    assert len({worker["ppid"] for worker in workers}) == 1
    assert "server.py" in " ".join(psutil.Process(workers[0]["ppid"]).cmdline())
    assert {(worker["visible"], worker["env"], worker["threads"]) for worker in workers} == {("", "set", 1)}
    pids = [workers[0]["ppid"], *(worker["pid"] for worker in workers)]
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids]
    assert scores == [0, 1000, 1000, 1000]  # without memory, the kernel ends what computes
    contexts = group.run("context", timeout_s=TIMEOUT_S)
    assert [(context.rank, context.world_size, context.devices) for context in contexts] == [
        (rank, 3, placement) for rank, placement in enumerate(devices(3))
    ]
    assert ray.get(ray.get_actor("echo:2").context.remote()).rank == 2


def test_arguments_go_to_all_ranks_or_one_each(group: WorkerGroup) -> None:
    assert group.run("add", PerRank([1, 2, 3]), right=10, timeout_s=TIMEOUT_S) == [11, 12, 13]
    assert group.run("add", PerRank([1, 2]), right=10, ranks=[2, 0], timeout_s=TIMEOUT_S) == [11, 12]
    assert ray.get(group.call("add", ray.put([1]), [2], ranks=[1])) == [[1, 2]]
    names = {"at_once": True, "ranks": [0], "method": "add", "args": 1, "timeout_s": 0.0}  # as its user calls them
    assert ray.get(group.submit("named", kwargs=names, ranks=[1, 2]), timeout=TIMEOUT_S) == [names] * 2
    with pytest.raises(SpecError, match=r"^echo: add\(\): argument 2 cannot be sent to workers: TypeError: cannot"):
        group.call("add", 1, threading.Lock())
    with pytest.raises(SpecError, match=r"^echo: named\(\): key cannot be sent to workers: TypeError: cannot pickle"):
        group.run("named", key=threading.Lock(), timeout_s=TIMEOUT_S)
    with pytest.raises(SpecError, match=r"^echo: EchoWorker has no method nope\(\); it has add, "):
        group.call("nope")
    with pytest.raises(SpecError, match=r"^lock: greeting cannot be sent to workers: TypeError"):
        launch(EchoWorker, [[]], [], name="lock", kwargs={"greeting": threading.Lock()})
    with pytest.raises(ValueError, match=r"add\(\) goes to 3 rank\(s\), but a PerRank argument has 1"):
        group.call("add", PerRank([1]), 2)
    with pytest.raises(IndexError, match=r"ranks 0\.\.2, not 3"):
        group.call("facts", ranks=[3])
    with pytest.raises(WorkerError, match="echo: workers of this name are there"):
        WorkerGroup(EchoWorker, name="echo", placements=devices(1))


def test_an_error_names_group_and_rank_and_keeps_its_cause(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"echo: rank 1 failed in fail_on\(\): LookupError: nothing here") as caught:
        group.run("fail_on", 1, timeout_s=TIMEOUT_S)
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(WorkerError, match="rank 2 failed"):
        asyncio.run(group.arun("fail_on", 2, timeout_s=TIMEOUT_S))


def test_a_timeout_names_who_did_not_answer_and_methods_run_side_by_side(group: WorkerGroup) -> None:
    with pytest.raises(WaitTimeoutError, match=r"echo: rank\(s\) 0, 2 did not answer wait_for_release\(\) within 0\.2"):
        group.run("wait_for_release", ranks=[0, 2], timeout_s=0.2)
    late = group.call("wait_for_release")
    with pytest.raises(WaitTimeoutError, match="0, 1, 2"):
        asyncio.run(group.arun("wait_for_release", timeout_s=0.2))
    group.run("release", timeout_s=TIMEOUT_S)
    assert ray.get(late, timeout=TIMEOUT_S) == [True, True, True]
    assert asyncio.run(group.arun("wait_for_release", timeout_s=TIMEOUT_S)) == [True, True, True]


def test_process_groups_form_over_files_and_over_tcp(group: WorkerGroup) -> None:
    assert group.run("sum_of_ranks", "all", [0, 1, 2], timeout_s=TIMEOUT_S) == [3.0] * 3
    assert group.run("sum_of_ranks", "some", [2, 1], ranks=[1, 2], timeout_s=TIMEOUT_S) == [3.0] * 2
    assert group.run("sum_over_tcp", "tcp", timeout_s=TIMEOUT_S) == [3.0] * 3


def test_a_killed_rank_is_restarted_under_its_name(group: WorkerGroup) -> None:
    before = facts(group)
    child = group.run("leave_a_child", ranks=[1], timeout_s=TIMEOUT_S)[0]
    started = process.describe(child)
    assert started is not None
    group.kill(1)
    wait_gone(before[1]["pid"])
    assert not process.alive(started)  # `kill` has waited for it
    with pytest.raises(WorkerError, match="rank 1 died before it answered facts") as caught:
        facts(group)
    assert "\n" not in str(caught.value.__cause__)  # no page of Ray's
    group.restart(1)
    after = facts(group)
    assert after[1]["greeting"] == "b"
    assert after[1]["pid"] != before[1]["pid"]
    assert [after[rank]["pid"] for rank in (0, 2)] == [before[rank]["pid"] for rank in (0, 2)]
    assert ray.get(ray.get_actor("echo:1").facts.remote())["pid"] == after[1]["pid"]


def test_a_failed_start_reports_the_error_and_leaves_nothing(ray_session: Any) -> None:
    for _ in range(2):  # the second time, the names are free again
        with pytest.raises(
            WorkerError, match=r"broken: rank 1 failed in __init__\(\): LookupError: no hello"
        ) as caught:
            WorkerGroup(EchoWorker, name="broken", placements=devices(2), kwargs={"fail_rank": 1})
        assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(ValueError, match="look up actor"):
        ray.get_actor("broken:0")


def test_spawned_and_cuda_workers_see_their_own_devices_and_end_with_the_group(ray_session: Any) -> None:
    placements = [tuple(device for (device,) in devices(4, DeviceKind.CUDA)[2:])]
    group = WorkerGroup(EchoWorker, name="spawned", placements=placements, start="spawn", namespace="elsewhere")
    (worker,) = facts(group)
    assert worker["visible"] == "2,3"
    assert "server.py" not in " ".join(psutil.Process(worker["ppid"]).cmdline())
    assert ray.get_actor("spawned:0", namespace="elsewhere") is not None
    group.close()
    wait_gone(worker["pid"])
    group.close()
    with pytest.raises(WorkerError, match=r"spawned: facts\(\) called on a closed group"):
        facts(group)


def test_impossible_placements_are_refused(ray_session: Any) -> None:
    here = devices(1)[0][0]
    there = Device(id=1, node_id="other", node_ip="10.0.0.2", index=0, kind=DeviceKind.CPU)
    with pytest.raises(ValueError, match="rank 0 are on several nodes"):
        WorkerGroup(EchoWorker, name="split", placements=[(here, there)])
    with pytest.raises(ValueError, match="at least one placement"):
        WorkerGroup(EchoWorker, name="none", placements=[])


@ray.remote(num_cpus=0)
class Pipeline:
    """A job's actor that starts a group of its own, from async code."""

    async def run(self) -> tuple[list[int], int]:
        group = await asyncio.to_thread(WorkerGroup, EchoWorker, name="inner", placements=devices(1))
        pid = (await group.arun("facts", timeout_s=TIMEOUT_S))[0]["pid"]
        result = await group.arun("add", 1, 2, timeout_s=TIMEOUT_S)
        await asyncio.to_thread(group.close)
        return result, pid


def test_a_group_can_live_inside_an_async_actor(ray_session: Any) -> None:
    result, pid = ray.get(Pipeline.remote().run.remote(), timeout=TIMEOUT_S)
    assert result == [3]
    wait_gone(pid)


def test_a_group_that_nobody_closed_leaves_no_folder(ray_session: Any) -> None:
    group = WorkerGroup(EchoWorker, name="left", placements=devices(1), kwargs={"greeting": "a"})
    assert group._rendezvous is not None
    folder = Path(group._rendezvous)
    assert folder.is_dir()
    del group
    gc.collect()
    assert not folder.exists()
