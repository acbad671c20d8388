"""Which devices each rank of a group gets: text, or a list for each rank; a pure function of the pool's devices.

    "all"                              # a rank on every device
    "0-3"                              # a rank on each of devices 0 to 3
    "0-3:0-7"                          # on devices 0 to 7 of each of nodes 0 to 3
    "0:0-3,1:4-7"                      # on different devices of different nodes
    [[0, 1], [4], []]                  # as listed; the last one needs no device

Devices count as the pool lists them, from 0; after a colon within their node. Nodes count in their devices' order.
"""

import re
from collections.abc import Sequence
from typing import TypeAlias

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device

Placement: TypeAlias = str | Sequence[Sequence[int]]


def place(placement: Placement, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    """The devices of each rank.

    Raises:
        SpecError: it names what there is not, a device twice, or for one rank devices of several nodes.
    """
    if wrong := [device for device in devices if not isinstance(device, Device)]:
        raise SpecError(f"{wrong[0]!r} is not a device: `job.devices()` has them")
    ranks = _text(placement, devices) if isinstance(placement, str) else _lists(placement, devices)
    if not ranks:
        raise SpecError(f"placement {placement!r} has no rank: the pool has {len(devices)} device(s)")
    used: set[int] = set()
    for rank, mine in enumerate(ranks):
        if len({device.node_id for device in mine}) > 1:
            raise SpecError(f"placement {placement!r}: rank {rank} is on several nodes; one process cannot use them")
        twice = sorted(device.id for device in mine if device.id in used)
        if twice or len({device.id for device in mine}) < len(mine):
            raise SpecError(
                f"placement {placement!r}: rank {rank} has device(s) {twice or 'twice'} that are used already"
            )
        used |= {device.id for device in mine}
    return ranks


def _lists(placement: object, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    if not isinstance(placement, Sequence) or not all(isinstance(numbers, Sequence) for numbers in placement):
        raise SpecError(f'placement {placement!r}: write text such as "0-3", or a list for each rank, as [[0, 1], [4]]')
    return [_pick(placement, devices, numbers) for numbers in placement]


def _text(text: str, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    nodes = list(dict.fromkeys(device.node_id for device in devices))
    ranks: list[tuple[Device, ...]] = []
    for part in text.replace(" ", "").split(","):
        if not part:
            raise SpecError(f"placement {text!r}: there is nothing between two commas")
        where, colon, which = part.rpartition(":")
        within = [list(devices)]
        if colon:
            within = [_of_node(text, number, nodes, devices) for number in _numbers(where, len(nodes), text)]
        for mine in within:
            ranks += [_pick(text, mine, [number]) for number in _numbers(which, len(mine), text)]
    return ranks


def _of_node(text: str, number: int, nodes: Sequence[str], devices: Sequence[Device]) -> list[Device]:
    if number >= len(nodes):
        raise SpecError(f"placement {text!r}: there is no node {number}; the pool has {len(nodes)}")
    return [device for device in devices if device.node_id == nodes[number]]


def _numbers(text: str, count: int, whole: str) -> list[int]:
    if text == "all":
        return list(range(count))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise SpecError(f'placement {whole!r}: {text!r} is neither a number, a range such as "0-3", nor "all"')
    return list(range(int(match[1]), int(match[2] or match[1]) + 1))


def _pick(placement: object, devices: Sequence[Device], numbers: Sequence[int]) -> tuple[Device, ...]:
    for number in numbers:
        if number not in range(len(devices)):
            raise SpecError(f"placement {placement!r}: there is no device {number!r} among {len(devices)}")
    return tuple(devices[number] for number in numbers)


def check_placements(name: str, placements: Sequence[tuple[Device, ...]]) -> None:
    """Raise ValueError: one process cannot use the devices of each rank, or there is no rank."""
    if not placements:
        raise ValueError(f"{name}: a worker group needs at least one placement")
    for rank, devices in enumerate(placements):
        if len({device.node_id for device in devices}) > 1:
            raise ValueError(f"{name}: the devices of rank {rank} are on several nodes; one process cannot use them")
        if len({device.kind for device in devices}) > 1:
            raise ValueError(f"{name}: the devices of rank {rank} are of several kinds")
