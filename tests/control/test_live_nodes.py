"""What the scheduler makes of nodes that do not answer, die or are drained, without a Ray."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from benchmarks.faults.virtual.clock import VirtualLoop
from benchmarks.faults.virtual.machines import Machine
from benchmarks.faults.virtual.plane import VirtualNodes
from rlix.control.live_nodes import ANSWER_S, LiveNodes
from rlix.node.device_lock import DIRECTORY_VARIABLE, DeviceLocks
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import DeviceKind, Fence, Process
from tests.control.world import DEVICES, POOL, World, service_of

THERE = Process("other", 4711, 1)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Ray's node table: whether a node is alive. No node has an agent that answers."""
    alive = {"node": True, "other": True}

    def nobody(name: str, namespace: str) -> Any:
        raise ValueError(name)

    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": n, "Alive": a} for n, a in alive.items()])
    monkeypatch.setattr(ray, "get_actor", nobody)
    return alive


def test_what_was_on_a_node_is_dead_when_ray_says_so_devices_or_none(table: dict[str, bool]) -> None:
    async def states(nodes: LiveNodes) -> dict[Process, str]:
        answer = asyncio.get_running_loop().create_future()
        nodes.states([THERE], answer.set_result)
        return dict(await asyncio.wait_for(answer, 300.0))

    async def ask() -> list[dict[Process, str]]:
        nodes = LiveNodes("node", "pool")
        found = [await states(nodes)]
        table["other"] = False
        return [*found, await states(nodes), await states(nodes)]

    assert asyncio.run(ask()) == [{}, {}, {THERE: "dead"}]


def test_a_node_table_that_cannot_be_read_loses_nobodys_answer(
    table: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> list[dict[str, Any]]:
        raise RaySystemError("the head does not answer")

    monkeypatch.setattr(ray, "nodes", away)

    async def killed() -> tuple[Process, ...]:
        answer = asyncio.get_running_loop().create_future()
        LiveNodes("node", "pool").kill([THERE], "", answer.set_result)
        survivors: tuple[Process, ...] = await asyncio.wait_for(answer, 300.0)
        return survivors

    assert asyncio.run(killed()) == (THERE,)


def test_a_drained_node_keeps_what_is_leased_and_what_runs_on_it_lives(table: dict[str, bool]) -> None:
    async def drain() -> None:
        world = World(1)
        service = service_of(world)
        service._nodes = nodes = LiveNodes("head", "pool")
        lease = world.gang("ft_1")
        for _ in range(2):
            await service.found(DEVICES, ("node",))
            assert {device.id for device in world.core.state.devices} == set(lease.devices)
        assert world.held("ft_1") == (lease,)
        world.release(lease)
        await service.found(DEVICES, ("node",))
        assert world.core.state.devices == ()
        answer = asyncio.get_running_loop().create_future()
        nodes.states([replace(THERE, node_id="node")], answer.set_result)
        assert await asyncio.wait_for(answer, 300.0) == {}

    asyncio.run(drain())


def test_a_new_journal_goes_on_above_what_devices_remember_of_one_that_was_moved_away(
    table: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    locks = DeviceLocks([DEVICES[0].key])
    locks.acquire(Fence(POOL, 41), 1.0)
    locks.release()
    locks.acquire(Fence("another", 77), 1.0)
    locks.release()
    silent = replace(DEVICES[3], node_id="other")
    there = DeviceLocks([silent.key])
    there.acquire(Fence(POOL, 50), 1.0)
    there.release()

    async def found() -> World:
        world = World()
        world.core = world.new_core()
        service, state = service_of(world), world.core.state
        service._nodes = LiveNodes("node", POOL)
        for _ in range(2):
            assert await service.found((*DEVICES[:3], silent)) == 3
            assert (state.next_epoch, state.next_pipeline) == (42, 1e9 + 1)
            assert state.discovered == DEVICES[:3]  # what is not known to be above all of it lends nothing
        service._nodes = LiveNodes("other", POOL)
        for _ in range(2):
            assert await service.found((*DEVICES[:3], silent)) == 4
            assert (state.next_epoch, state.next_pipeline) == (51, 1e9 + 1)
        return world

    world = asyncio.run(found())
    lease = world.gang(world.add_job())
    locks.acquire(Fence(POOL, lease.epoch), 1.0)
    assert lease.epoch == 51


def test_a_node_whose_locks_cannot_be_read_holds_up_nobody_else(
    table: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def said(self: LiveNodes, node_id: str, method: str, *args: object) -> int:
        if node_id == "other":
            raise RlixError("the folder of its locks cannot be read")
        return 7

    async def asked() -> dict[str, int]:
        monkeypatch.setattr(LiveNodes, "_answer", said)
        return await LiveNodes("node", POOL).newest_epochs((DEVICES[0], replace(DEVICES[3], node_id="other")))

    assert asyncio.run(asked()) == {"node": 7}


def test_a_gangs_nodes_are_asked_beside_each_other_and_one_that_is_silent_holds_up_nobody_twice() -> None:
    """Whatever they are asked, and however many do not answer, it takes no longer than one may take."""
    devices = [replace(DEVICES[0], id=number, node_id=f"node-{number}", key=f"gpu-{number}") for number in range(6)]
    processes = [Process(device.node_id, 7, 1) for device in devices]

    async def ask() -> dict[str, float]:
        nodes = VirtualNodes(Machine("host0", 0, DeviceKind.CPU, itertools.count(1), lambda proc, why: None), ())
        loop, took = asyncio.get_running_loop(), dict[str, float]()
        asked = {
            "occupied": lambda done: nodes.occupied(devices, done),
            "kill": lambda done: nodes.kill(processes, "", done, devices),
            "states": lambda done: nodes.states(processes, done),
            "memory": lambda done: nodes.memory([device.node_id for device in devices], processes, done),
        }
        for name, call in asked.items():
            began, answer = loop.time(), loop.create_future()
            call(answer.set_result)
            await answer
            took[name] = loop.time() - began
        return took

    took = asyncio.Runner(loop_factory=VirtualLoop).run(ask())
    assert took == dict.fromkeys(took, pytest.approx(ANSWER_S))
