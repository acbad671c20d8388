"""Which devices there are, over every node of the Ray cluster."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any

import ray

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


def devices_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Device, ...]:
    """Numbers the devices of Ray's node table densely from 0: the head node's first, then by address and node id.

    A node's devices are virtual where the node carries the resource `VIRTUAL_DEVICE_RESOURCE`.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive.sort(key=lambda node: (_HEAD_RESOURCE not in node["Resources"], *_address(node), node["NodeID"]))
    slots = [(node, index) for node in alive for index in range(int(node["Resources"].get("GPU", 0)))]
    return tuple(
        Device(
            id=number,
            node_id=node["NodeID"],
            node_ip=node["NodeManagerAddress"],
            index=index,
            kind=DeviceKind.CPU if VIRTUAL_DEVICE_RESOURCE in node["Resources"] else DeviceKind.CUDA,
        )
        for number, (node, index) in enumerate(slots)
    )


def _address(node: Mapping[str, Any]) -> tuple[int, int]:
    address = ip_address(node["NodeManagerAddress"])
    return address.version, int(address)
