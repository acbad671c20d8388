"""What the scheduler makes of nodes that do not answer, die or are drained, without a Ray."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import ray

from rlix.control.live_nodes import LiveNodes
from rlix.protocol.messages import Process
from tests.control.world import DEVICES, World, service_of

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
        return dict(await asyncio.wait_for(answer, 10.0))

    async def ask() -> list[dict[Process, str]]:
        nodes = LiveNodes("node", "pool")
        found = [await states(nodes)]
        table["other"] = False
        return [*found, await states(nodes), await states(nodes)]

    assert asyncio.run(ask()) == [{}, {}, {THERE: "dead"}]


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
        assert await asyncio.wait_for(answer, 10.0) == {}

    asyncio.run(drain())
