"""Which devices there are, over every node of the Ray cluster."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

import ray

from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Device, DeviceKind
from rlix.protocol.types import VIRTUAL_DEVICE_RESOURCE

logger = logging.getLogger(__name__)

_HEAD_RESOURCE = "node:__internal_head__"


class ResourceManager:
    """Ray actor that finds the pool's devices."""

    def __init__(self, log_level: int = logging.INFO) -> None:
        logging.getLogger("rlix").setLevel(log_level)

    async def discover(self) -> tuple[Device, ...]:
        """Every device of every node that is alive; see `devices_of`."""
        devices = devices_of(await asyncio.to_thread(ray.nodes))
        logger.info("found %d devices on %d nodes", len(devices), len({d.node_id for d in devices}))
        return devices


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
    alive.sort(key=lambda node: (_HEAD_RESOURCE not in node["Resources"], *_address(node), node["NodeID"]))
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


def _kind(node: Mapping[str, Any]) -> DeviceKind:
    return DeviceKind.CPU if VIRTUAL_DEVICE_RESOURCE in node["Resources"] else DeviceKind.CUDA


def _keys_of(node: Mapping[str, Any], known: Sequence[str] | None) -> Sequence[str]:
    count = int(node["Resources"].get("GPU", 0))
    kind, address = _kind(node), node["NodeManagerAddress"]
    if known is None or kind is DeviceKind.CPU:
        name = "virtual" if kind is DeviceKind.CPU else "cuda"
        return [f"{name}-{node['NodeID'][:12]}-{index}" for index in range(count)]
    if len(known) < count:
        raise RlixError(
            f"Ray was told of {count} GPUs on node {address}, but programs there may use {len(known)} "
            f"({', '.join(known) or 'none'}): start Ray with --num-gpus={len(known)}, or change CUDA_VISIBLE_DEVICES"
        )
    return known[:count]


def _address(node: Mapping[str, Any]) -> tuple[int, int]:
    address = ip_address(node["NodeManagerAddress"])
    return address.version, int(address)
