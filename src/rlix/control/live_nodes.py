"""The pool's real nodes: this one directly, the others through their agents."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from rlix.control.rpc import call
from rlix.node.devices import device_keys
from rlix.node.host import Host, Software, host, software
from rlix.node.memory import KEPT, HostMemory, set_oom_score
from rlix.node.node import Node
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import UNSEEN, Device, Occupant, Process
from rlix.protocol.types import NAMESPACE, NODE_AGENT_NAME_PREFIX

logger = logging.getLogger(__name__)

OnNode = TypeVar("OnNode", Device, Process)
Answer = TypeVar("Answer")

KILL_TIMEOUT_S = 5.0
ANSWER_S = KILL_TIMEOUT_S + 5.0  # for a node: all that it takes to ask it; and for Ray, which are dead


class NodeAgent:
    """Ray actor: one node's eyes and hands. It keeps nothing."""

    def __init__(self, node_id: str) -> None:
        self.node = Node(node_id)
        set_oom_score(KEPT)

    async def lends(self, virtual: bool) -> tuple[tuple[str, ...], Software]:
        """The names of the node's GPUs in order, none of virtual ones; what its workers run with."""
        keys = () if virtual else await asyncio.to_thread(device_keys)
        return keys, await asyncio.to_thread(software)

    async def host(self, *asked: Any) -> Host:
        """Of this node, as `rlix.node.host.host` says."""
        return await asyncio.to_thread(host, *asked)

    async def occupied(self, devices: Sequence[Device]) -> tuple[Occupant, ...]:
        return occupants(self.node, devices)

    async def newest_epoch(self, devices: Sequence[Device], pool: str) -> int:
        return self.node.newest_epoch(devices, pool)

    async def kill(self, processes: Sequence[Process], why: str, devices: Sequence[Device] = ()) -> tuple[Process, ...]:
        return await asyncio.to_thread(self.node.kill, processes, KILL_TIMEOUT_S, why, devices)

    async def states(self, processes: Sequence[Process]) -> Mapping[Process, str]:
        return self.node.states(processes)

    async def memory(self, processes: Sequence[Process]) -> HostMemory:
        return await asyncio.to_thread(self.node.memory, processes)


def occupants(node: Node, devices: Sequence[Device]) -> tuple[Occupant, ...]:
    """What the device locks of a node say."""
    found = node.holders(devices).items()
    return tuple(Occupant(device_id, r.fence.pool, r.fence.epoch, r.processes) for device_id, r in found)


class LiveNodes:
    """`Nodes` for the event loop it is made in. Devices of this node are looked at at once, without a round trip.

    Nodes are asked beside each other: one that does not answer takes its own time, not theirs as well.
    """

    def __init__(self, here: str, pool: str) -> None:
        """`here`: this process's node id."""
        self._here = here
        self._pool = pool
        self._own = NodeAgent(here)
        self._agents: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: set[str] = set()  # nodes that are dead: what was on them is, too

    async def count_dead(self) -> None:
        """Ray's node table says who is: not who lends no devices, nor who does not answer."""
        self._gone = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if not node["Alive"]}

    async def newest_epochs(self, devices: Sequence[Device]) -> dict[str, int]:
        """By node, of those that say: the newest epoch under which this pool has used any of its devices; 0: none."""
        groups = _by_node(devices)
        said = await asyncio.gather(
            *(self._ask(node_id, "newest_epoch", group, self._pool) for node_id, group in groups)
        )
        return {node_id: epoch for (node_id, _), epoch in zip(groups, said, strict=True) if epoch is not None}

    def occupied(self, devices: Sequence[Device], done: Callable[[tuple[Occupant, ...]], None]) -> None:
        mine = [device for device in devices if device.node_id == self._here]
        others = [device for device in devices if device.node_id != self._here]
        found = occupants(self._own.node, mine)

        async def there(node_id: str, group: Sequence[Device]) -> tuple[Occupant, ...]:
            answer: tuple[Occupant, ...] | None = await self._ask(node_id, "occupied", group, of_dead=())
            return tuple(Occupant(d.id, self._pool, UNSEEN, ()) for d in group) if answer is None else answer

        if others:
            self._spawn(_by_node(others), there, lambda answers: done(sum(answers, found)))
        else:
            done(found)

    def kill(
        self,
        processes: Sequence[Process],
        why: str,
        done: Callable[[tuple[Process, ...]], None],
        devices: Sequence[Device] = (),
    ) -> None:
        async def left(node_id: str, group: tuple[Process, ...]) -> tuple[Process, ...]:
            there = [device for device in devices if device.node_id == node_id]
            if devices and not there:
                return group
            answer: tuple[Process, ...] | None = await self._ask(node_id, "kill", group, why, there, of_dead=())
            return group if answer is None else answer

        if processes:
            self._spawn(_by_node(processes), left, lambda answers: done(sum(answers, ())))
        else:
            done(())

    def states(self, processes: Sequence[Process], done: Callable[[Mapping[Process, str]], None]) -> None:
        async def seen(node_id: str, group: tuple[Process, ...]) -> Mapping[Process, str]:
            return await self._ask(node_id, "states", group, of_dead=dict.fromkeys(group, "dead")) or {}

        self._spawn(
            _by_node(processes), seen, lambda answers: done({p: s for found in answers for p, s in found.items()})
        )

    def memory(
        self,
        nodes: Sequence[str],
        processes: Sequence[Process],
        done: Callable[[Mapping[str, HostMemory]], None],
    ) -> None:
        """What each node has, and what these processes use there. A node that does not answer is left out."""

        async def of(node_id: str, group: tuple[Process, ...]) -> tuple[str, HostMemory | None]:
            return node_id, await self._ask(node_id, "memory", group)

        groups = [(node_id, tuple(p for p in processes if p.node_id == node_id)) for node_id in nodes]
        self._spawn(groups, of, lambda answers: done({node_id: m for node_id, m in answers if m is not None}))

    async def _ask(self, node_id: str, method: str, *args: object, of_dead: object = None) -> Any:
        """None when the node's agent does not answer."""
        if node_id in self._gone:
            return of_dead
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer(node_id, method, *args)
        except (ValueError, RayError, RlixError, TimeoutError) as error:
            self._agents.pop(node_id, None)
            logger.warning("node %s does not answer: %s", node_id, error or f"nothing within {ANSWER_S:g} s")
            await self._try_to_count_dead()
            return None

    async def _try_to_count_dead(self) -> None:
        """Whoever waits for what other nodes say must have that, too, while Ray's node table cannot be read."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.count_dead()
        except (RayError, TimeoutError) as error:
            logger.warning("Ray does not say which nodes are dead: %s", error or f"nothing within {ANSWER_S:g} s")

    async def _answer(self, node_id: str, method: str, *args: object) -> Any:
        if node_id == self._here:
            return await getattr(self._own, method)(*args)
        if node_id not in self._agents:
            name = f"{NODE_AGENT_NAME_PREFIX}{node_id}"
            self._agents[node_id] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        ref = getattr(self._agents[node_id], method).remote(*args)
        return await call(ref, what=f"{method} on node {node_id}", timeout_s=ANSWER_S)

    def _spawn(
        self,
        groups: Iterable[tuple[str, tuple[OnNode, ...]]],
        ask: Callable[[str, tuple[OnNode, ...]], Coroutine[None, None, Answer]],
        done: Callable[[list[Answer]], None],
    ) -> None:
        async def asked() -> None:
            done(await asyncio.gather(*(ask(*group) for group in groups)))

        task = self._loop.create_task(asked())
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a task of the control plane failed", exc_info=error)


def _by_node(things: Sequence[OnNode]) -> list[tuple[str, tuple[OnNode, ...]]]:
    ordered = sorted(things, key=attrgetter("node_id"))
    return [(node_id, tuple(group)) for node_id, group in groupby(ordered, key=attrgetter("node_id"))]
