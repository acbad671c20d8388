"""Which devices there are, over every node of the Ray cluster, as nodes come and go."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlix.control.live_nodes import NodeAgent
from rlix.control.rpc import Patient, get
from rlix.control.watchdog import here, watch_over
from rlix.node.devices import device_keys, virtual_key
from rlix.node.memory import KEPT, set_oom_score
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Device, DeviceKind, Process
from rlix.protocol.types import (
    HEAD_RESOURCE,
    NAMESPACE,
    NODE_AGENT_NAME_PREFIX,
    ORCHESTRATOR_ACTOR_NAME,
    SCHEDULER_ACTOR_NAME,
    VIRTUAL_DEVICE_RESOURCE,
)

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_ANSWER_TIMEOUT_S = 30.0


class ResourceManager:
    """Ray actor that finds the pool's devices and tells the scheduler of them.

    It keeps nothing that a restarted one does not find again.
    """

    def __init__(self, log_level: int = logging.INFO) -> None:
        logging.getLogger("rlix").setLevel(log_level)
        set_oom_score(KEPT)
        self._here = ray.get_runtime_context().get_node_id()
        self._keys: dict[str, tuple[str, ...]] = {}  # by node
        self._looking = threading.Lock()
        self._told: tuple[Device, ...] | None = None
        self._scheduler = Patient(lambda: ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE), "the scheduler")
        threading.Thread(target=self._look_forever, name="nodes", daemon=True).start()
        watch_over((SCHEDULER_ACTOR_NAME, ORCHESTRATOR_ACTOR_NAME))

    def discover(self) -> int:
        """Looks now, and tells the scheduler; returns the number of devices.

        Raises:
            RlixError: there are none.
        """
        with self._looking:
            devices = self._devices()
            count: int = self._scheduler.ask("found", devices, timeout_s=_ANSWER_TIMEOUT_S)
            self._told = devices
        logger.info("found %d devices on %d nodes", len(devices), len({d.node_id for d in devices}))
        return count

    def process(self) -> Process:
        """The process this is."""
        return here()

    def _look_forever(self) -> None:
        waiting = threading.Event()
        while not waiting.wait(_LOOK_EVERY_S):
            try:
                with self._looking:
                    changed = self._devices() != self._told
                if changed:
                    self.discover()
            except (RayError, RlixError) as error:
                logger.warning("cannot look for nodes: %s", error)

    def _devices(self) -> tuple[Device, ...]:
        nodes = ray.nodes()
        for node in nodes:
            node_id = node["NodeID"]
            if node["Alive"] and node_id not in self._keys:
                self._keys[node_id] = self._ask_keys(node_id, VIRTUAL_DEVICE_RESOURCE in node["Resources"])
        return devices_of(nodes, self._keys)

    def _ask_keys(self, node_id: str, virtual: bool) -> tuple[str, ...]:
        """The names of a node's GPUs; starts the agent of a node that is not this one."""
        if node_id == self._here:
            return () if virtual else device_keys()
        agent = (
            ray.remote(num_cpus=0)(NodeAgent)
            .options(
                name=f"{NODE_AGENT_NAME_PREFIX}{node_id}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=100,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(node_id)
        )
        keys: Sequence[str] = get(
            agent.keys.remote(virtual), what=f"the device keys of node {node_id}", timeout_s=_ANSWER_TIMEOUT_S
        )
        return tuple(keys)


def devices_of(
    nodes: Iterable[Mapping[str, Any]], keys: Mapping[str, Sequence[str]] | None = None
) -> tuple[Device, ...]:
    """Numbers the devices of Ray's node table densely from 0: the head node's first, then by address and node id.

    A node's devices are virtual where the node carries the resource `VIRTUAL_DEVICE_RESOURCE`.

    Args:
        keys: of each node with GPUs, by its id: what `rlix.node.devices.device_keys` says there. A node that is not
            named gets keys of its own making, and its workers find their GPUs by number.

    Raises:
        RlixError: Ray counts more GPUs on a node than it has keys.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive.sort(key=lambda node: (HEAD_RESOURCE not in node["Resources"], *_address(node), node["NodeID"]))
    slots = [(node, i, key) for node in alive for i, key in enumerate(_keys_of(node, (keys or {}).get(node["NodeID"])))]
    return tuple(
        Device(
            id=number,
            node_id=node["NodeID"],
            node_ip=node["NodeManagerAddress"],
            index=index,
            kind=_kind(node),
            key=key,
        )
        for number, (node, index, key) in enumerate(slots)
    )


def numbered(known: Sequence[Device], found: Sequence[Device], next_id: int) -> tuple[Device, ...]:
    """`found` with the ids that their devices had before; new ones get ids that no device ever had."""
    ids = {(device.node_id, device.index): device.id for device in known}
    devices = []
    for device in found:
        number = ids.get((device.node_id, device.index))
        if number is None:
            number, next_id = next_id, next_id + 1
        devices.append(Device(number, device.node_id, device.node_ip, device.index, device.kind, device.key))
    return tuple(sorted(devices, key=lambda device: device.id))


def _kind(node: Mapping[str, Any]) -> DeviceKind:
    return DeviceKind.CPU if VIRTUAL_DEVICE_RESOURCE in node["Resources"] else DeviceKind.CUDA


def _keys_of(node: Mapping[str, Any], known: Sequence[str] | None) -> Sequence[str]:
    count = int(node["Resources"].get("GPU", 0))
    kind, address = _kind(node), node["NodeManagerAddress"]
    if known is None or kind is DeviceKind.CPU:
        prefix = virtual_key(node["NodeID"]) if kind is DeviceKind.CPU else f"cuda-{node['NodeID'][:12]}-"
        return [f"{prefix}{index}" for index in range(count)]
    if len(known) < count:
        raise RlixError(
            f"Ray was told of {count} GPUs on node {address}, but programs there may use {len(known)} "
            f"({', '.join(known) or 'none'}): start Ray with --num-gpus={len(known)}, or change CUDA_VISIBLE_DEVICES"
        )
    return known[:count]


def _address(node: Mapping[str, Any]) -> tuple[int, int]:
    address = ip_address(node["NodeManagerAddress"])
    return address.version, int(address)
