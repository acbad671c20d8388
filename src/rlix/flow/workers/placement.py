"""Which devices each rank of a group gets, said in one of several ways; a pure function of the pool's devices.

    Packed(0, 7, per_rank=2)           # ranks on devices 0-1, 2-3, 4-5, 6-7
    Packed(0, 7, stride=2)             # ranks on devices 0, 2, 4, 6
    Flexible([[0, 1], [4], [5]])       # as listed
    ByNode(per_rank=8)                 # one rank on each node's first eight devices
    "all"                              # a rank on every device
    "0-3"                              # a rank on each of devices 0 to 3
    "0-3:0-7"                          # on devices 0 to 7 of each of nodes 0 to 3
    "0:0-3,1:4-7"                      # on different devices of different nodes
    "a100:0-3"                         # on devices 0 to 3 of each node of the group "a100"

Devices count as the pool lists them, from 0; after a colon within their node. Nodes count in their devices' order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TypeAlias

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device


@dataclass(frozen=True, slots=True)
class Packed:
    """Ranks of `per_rank` devices each, one after the other from device `start` to `end` (included; None: the last).

    `stride`: from one of a rank's devices to its next, and so from rank to rank.
    """

    start: int = 0
    end: int | None = None
    per_rank: int = 1
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Flexible:
    """Each rank's devices, by number."""

    devices: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class ByNode:
    """Ranks of `per_rank` devices on every node of `nodes` (None: all), as many as fit, at most `most` on each."""

    per_rank: int = 1
    nodes: Sequence[int] | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class OnCpu:
    """Ranks without a device."""

    ranks: int = 1


Placement: TypeAlias = Packed | Flexible | ByNode | OnCpu | str


@dataclass(frozen=True, slots=True)
class Pool:
    """The devices there are. `groups`: names for some of the nodes, by node id."""

    devices: Sequence[Device]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if wrong := [device for device in self.devices if not isinstance(device, Device)]:
            raise SpecError(f"{wrong[0]!r} is not a device: `client.devices()` of a job has them, by their numbers")

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(device.node_id for device in self.devices))

    def of_node(self, node: str) -> list[Device]:
        return [device for device in self.devices if device.node_id == node]


def place(placement: Placement, pool: Pool) -> list[tuple[Device, ...]]:
    """The devices of each rank.

    Raises:
        SpecError: it names what there is not, a device twice, or for one rank devices of several nodes.
    """
    ranks = _ranks(placement, pool)
    if not ranks:
        raise SpecError(f"placement {placement!r} has no rank: the pool has {len(pool.devices)} device(s)")
    used: set[int] = set()
    for rank, devices in enumerate(ranks):
        if len({device.node_id for device in devices}) > 1:
            raise SpecError(f"placement {placement!r}: rank {rank} is on several nodes; one process cannot use them")
        twice = sorted(device.id for device in devices if device.id in used)
        if twice or len({device.id for device in devices}) < len(devices):
            raise SpecError(
                f"placement {placement!r}: rank {rank} has device(s) {twice or 'twice'} that are used already"
            )
        used |= {device.id for device in devices}
    return ranks


def _ranks(placement: Placement, pool: Pool) -> list[tuple[Device, ...]]:
    _check_numbers(placement)
    match placement:
        case str():
            return _text(placement, pool)
        case Packed():
            return _packed(placement, pool)
        case Flexible():
            lists = isinstance(placement.devices, Sequence)
            if not lists or not all(isinstance(numbers, Sequence) for numbers in placement.devices):
                raise SpecError(f"placement {placement!r}: each rank has a list of devices, such as [[0, 1], [4]]")
            return [_pick(placement, pool.devices, numbers) for numbers in placement.devices]
        case OnCpu():
            return [()] * placement.ranks
        case ByNode():
            if placement.per_rank < 1:
                raise SpecError(f"placement {placement!r}: per_rank is at least 1")
            nodes = pool.nodes if placement.nodes is None else [_node(n, placement, pool) for n in placement.nodes]
            ranks = []
            for node in nodes:
                devices = pool.of_node(node)
                fit = len(devices) // placement.per_rank
                starts = range(0, placement.per_rank * min(fit, placement.most or fit), placement.per_rank)
                ranks += [tuple(devices[start : start + placement.per_rank]) for start in starts]
            return ranks


def _check_numbers(placement: Placement) -> None:
    if not isinstance(placement, Packed | Flexible | ByNode | OnCpu | str):
        raise SpecError(f'placement {placement!r} is none: Packed, Flexible, ByNode, OnCpu, or text such as "0-3"')
    if isinstance(placement, Packed | ByNode | OnCpu):
        for one in fields(placement):
            value = getattr(placement, one.name)
            if value is not one.default and one.name != "nodes" and not isinstance(value, Integral):
                raise SpecError(f"placement {placement!r}: {one.name} is a whole number, not {value!r}")


def _packed(placement: Packed, pool: Pool) -> list[tuple[Device, ...]]:
    end = len(pool.devices) - 1 if placement.end is None else placement.end
    if placement.per_rank < 1 or placement.stride < 1 or not 0 <= placement.start <= end:
        raise SpecError(f"placement {placement!r}: per_rank and stride are at least 1, and start is not after end")
    numbers = list(range(placement.start, end + 1))
    if placement.per_rank == 1:
        return [_pick(placement, pool.devices, [n]) for n in numbers[:: placement.stride]]
    block = placement.per_rank * placement.stride
    if len(numbers) % block:
        raise SpecError(
            f"placement {placement!r}: {len(numbers)} devices are not a multiple of {block} (per_rank × stride)"
        )
    starts = (first + offset for first in numbers[::block] for offset in range(placement.stride))
    return [
        _pick(placement, pool.devices, [start + i * placement.stride for i in range(placement.per_rank)])
        for start in starts
    ]


def _text(text: str, pool: Pool) -> list[tuple[Device, ...]]:
    ranks: list[tuple[Device, ...]] = []
    for part in text.replace(" ", "").split(","):
        if not part:
            raise SpecError(f"placement {text!r}: there is nothing between two commas")
        if ":" not in part:
            ranks += [_pick(text, pool.devices, [n]) for n in _numbers(part, len(pool.devices), text)]
            continue
        where, which = part.split(":", 1)
        for node in _nodes(where, text, pool):
            devices = pool.of_node(node)
            ranks += [_pick(text, devices, [n]) for n in _numbers(which, len(devices), text)]
    return ranks


def _nodes(where: str, text: str, pool: Pool) -> list[str]:
    if where in pool.groups:
        unknown = [node for node in pool.groups[where] if node not in pool.nodes]
        if unknown:
            raise SpecError(f"placement {text!r}: node(s) {', '.join(unknown)} of group {where!r} have no devices here")
        return list(pool.groups[where])
    return [_node(n, text, pool) for n in _numbers(where, len(pool.nodes), text)]


def _numbers(text: str, count: int, whole: str) -> list[int]:
    if text == "all":
        return list(range(count))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise SpecError(f'placement {whole!r}: {text!r} is neither a number, a range such as "0-3", nor "all"')
    return list(range(int(match[1]), int(match[2] or match[1]) + 1))


def _node(number: int, placement: Placement, pool: Pool) -> str:
    if not 0 <= number < len(pool.nodes):
        raise SpecError(f"placement {placement!r}: there is no node {number}; the pool has {len(pool.nodes)}")
    return pool.nodes[number]


def _pick(placement: Placement, devices: Sequence[Device], numbers: Sequence[int]) -> tuple[Device, ...]:
    for number in numbers:
        if not 0 <= number < len(devices):
            raise SpecError(f"placement {placement!r}: there is no device {number} among {len(devices)}")
    return tuple(devices[number] for number in numbers)
