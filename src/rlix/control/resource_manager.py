"""Which devices there are, over every node of the Ray cluster, as nodes come and go."""

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

import ray
from ray._private import state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlix.control.hosts import Hosts, Keys, Node, find, statuses
from rlix.control.live_nodes import NodeAgent
from rlix.control.rpc import Patient, get
from rlix.control.watchdog import here, watch_over
from rlix.node.devices import device_keys, virtual_key
from rlix.node.host import Host, Software, host, software
from rlix.node.memory import KEPT, set_oom_score
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Device, DeviceKind, NodeStatus, Process
from rlix.protocol.types import (
    HEAD_RESOURCE,
    NAMESPACE,
    NODE_AGENT_NAME_PREFIX,
    ORCHESTRATOR_ACTOR_NAME,
    SCHEDULER_ACTOR_NAME,
    VIRTUAL_DEVICE_RESOURCE,
)

logger = logging.getLogger(__name__)

Found = tuple[tuple[Device, ...], frozenset[str]]  # the hosts' devices, and the hosts that are drained

_LOOK_EVERY_S = 1.0
_ANSWER_TIMEOUT_S = 30.0
_FIRST_LOOK_S = 20.0  # for nodes that have not been asked before


class ResourceManager:
    """Ray actor that finds the pool's devices and tells the scheduler of them.

    It keeps nothing that a restarted one does not find again.
    """

    def __init__(self, log_level: int = logging.INFO) -> None:
        logging.getLogger("rlix").setLevel(log_level)
        set_oom_score(KEPT)
        self._here = ray.get_runtime_context().get_node_id()
        self._hosts: Hosts | None = None  # until the scheduler has said what it knows
        self._looking = threading.Lock()
        self._told: tuple[Found, Process | None] | None = None  # what, and which scheduler took all of it in
        self._scheduler = Patient(lambda: ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE), "the scheduler")
        threading.Thread(target=self._look_forever, name="nodes", daemon=True).start()
        watch_over((SCHEDULER_ACTOR_NAME, ORCHESTRATOR_ACTOR_NAME))

    def discover(self) -> int:
        """Looks now, and tells the scheduler; returns the number of devices.

        Raises:
            RlixError: there are none.
        """
        with self._looking:
            return self._tell(self._found(_FIRST_LOOK_S))

    def process(self) -> Process:
        """The process this is."""
        return here()

    def nodes(self) -> tuple[NodeStatus, ...]:
        """The state of each host."""
        held: Sequence[Device] = self._scheduler.ask("devices", timeout_s=_ANSWER_TIMEOUT_S)
        draining = self._told[0][1] if self._told else frozenset()
        unfit = self._hosts.unfit if self._hosts else {}
        return statuses(ray.nodes(), unfit, draining, {device.node_id for device in held})

    def cordon(self, named: str, wanted: bool) -> tuple[NodeStatus, ...]:
        """Takes a host out of service, or back into it; returns what it is from now on.

        Raises:
            SpecError: there is no such host, or several; names those there are.
        """
        with self._looking:
            nodes = ray.nodes()
            node_id = find(nodes, named)["NodeID"]
            before = {n["NodeID"] for n in nodes if n["Alive"]}.intersection(self._cordoned()) - {node_id}
            after = tuple(sorted(before | {node_id} if wanted else before))
            self._scheduler.ask("cordon", after, timeout_s=_ANSWER_TIMEOUT_S)
            self._tell(self._found())
        return tuple(status for status in self.nodes() if status.node_id == node_id)

    def _cordoned(self) -> Sequence[str]:
        nodes: Sequence[str] = self._scheduler.ask("cordoned", timeout_s=_ANSWER_TIMEOUT_S)
        return nodes

    def hosts(self, paths: Sequence[str] = (), token: str = "", only: Collection[str] = ()) -> tuple[Host, ...]:
        """What hosts (`only` these, by node id) have and see, as `rlix.node.host.host` says.

        Raises:
            RlixError: one does not answer; names it.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        asked = [node for node in nodes if not only or node["NodeID"] in only]
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            return tuple(pool.map(lambda node: self._host(node, nodes, tuple(paths), token), asked))

    def _host(self, node: Node, nodes: Sequence[Node], paths: tuple[str, ...], token: str) -> Host:
        node_id, address = node["NodeID"], node["NodeManagerAddress"]
        others = [(n["NodeManagerAddress"], n["NodeManagerPort"]) for n in nodes if n is not node]
        asked = node_id, address, others, paths, token
        if node_id == self._here:
            return host(*asked)
        found: Host = get(
            self._agent(node_id).host.remote(*asked), what=f"host {address} of itself", timeout_s=_ANSWER_TIMEOUT_S
        )
        return found

    def _look_forever(self) -> None:
        waiting = threading.Event()
        while not waiting.wait(_LOOK_EVERY_S):
            try:
                with self._looking:
                    found = self._found()
                    if self._told != (found, self._scheduler_process()):
                        self._tell(found)
            except (RayError, RlixError) as error:
                logger.warning("cannot look for nodes: %s", error)

    def _scheduler_process(self) -> Process:
        process: Process = self._scheduler.ask("process", timeout_s=_ANSWER_TIMEOUT_S)
        return process

    def _tell(self, found: Found) -> int:
        """Returns how many devices the scheduler took in; while that is not all it is told again. One that was started
        again is told anew: its journal may be, too."""
        (devices, draining), process = found, self._scheduler_process()
        taken: int = self._scheduler.ask("found", devices, draining, timeout_s=_ANSWER_TIMEOUT_S)
        self._told = found, process if taken == len(devices) else None
        hosts = len({device.node_id for device in devices})
        logger.info("found %d devices on %d nodes; %d are in the pool", len(devices), hosts, taken)
        return taken

    def _found(self, patience_s: float = 0.0) -> Found:
        nodes = ray.nodes()
        if self._hosts is None:
            before: Sequence[Device] = self._scheduler.ask("devices", timeout_s=_ANSWER_TIMEOUT_S)
            self._hosts = Hosts(self._ask_node, software(), _keys_by_node(before))
        keys = self._hosts.lending(nodes, patience_s)
        devices = devices_of([node for node in nodes if node["NodeID"] in keys], keys)
        drained = {*ray_state.state.get_draining_nodes(), *self._cordoned()}
        return devices, frozenset(node_id for node_id in keys if node_id in drained)

    def _ask_node(self, node_id: str, virtual: bool) -> tuple[Keys, Software]:
        """The names of a node's GPUs, and its software."""
        if node_id == self._here:
            return () if virtual else device_keys(), software()
        found: tuple[Keys, Software] = get(
            self._agent(node_id).lends.remote(virtual),
            what=f"what node {node_id} lends",
            timeout_s=_ANSWER_TIMEOUT_S,
        )
        return found

    def _agent(self, node_id: str) -> Any:
        """The agent of a node that is not this one, which is started where there is none."""
        return (
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


def devices_of(
    nodes: Iterable[Mapping[str, Any]], keys: Mapping[str, Sequence[str]] | None = None
) -> tuple[Device, ...]:
    """Numbers the devices of Ray's node table densely from 0: the head node's first, then by address and node id.

    A node's devices are virtual where the node carries the resource `VIRTUAL_DEVICE_RESOURCE`.

    Args:
        keys: of each node with GPUs, by its id: what `rlix.node.devices.device_keys` says there. A node that is not
            named gets keys of its own making, and its workers find their GPUs by number.
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


def _keys_by_node(devices: Sequence[Device]) -> dict[str, Keys]:
    """What the nodes of these devices said of them; virtual ones' names are made."""
    keys: dict[str, Keys] = {device.node_id: () for device in devices}
    for device in sorted(devices, key=lambda device: device.index):
        if device.kind is DeviceKind.CUDA:
            keys[device.node_id] += (device.key,)
    return keys


def _kind(node: Mapping[str, Any]) -> DeviceKind:
    return DeviceKind.CPU if VIRTUAL_DEVICE_RESOURCE in node["Resources"] else DeviceKind.CUDA


def _keys_of(node: Mapping[str, Any], known: Sequence[str] | None) -> Sequence[str]:
    count = int(node["Resources"].get("GPU", 0))
    kind = _kind(node)
    if known is None or kind is DeviceKind.CPU:
        prefix = virtual_key(node["NodeID"]) if kind is DeviceKind.CPU else f"cuda-{node['NodeID'][:12]}-"
        return [f"{prefix}{index}" for index in range(count)]
    return known[:count]


def _address(node: Mapping[str, Any]) -> tuple[int, int]:
    address = ip_address(node["NodeManagerAddress"])
    return address.version, int(address)
