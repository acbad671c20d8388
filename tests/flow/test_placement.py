"""Placements: which devices the ranks of a group get, in each of the ways to say it."""

import numpy as np
import pytest

from rlix.flow.workers.launch import launch
from rlix.flow.workers.placement import ByNode, Flexible, OnCpu, Packed, Placement, Pool, place
from rlix.flow.workers.worker import Worker
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device, DeviceKind

NODES = ("n0", "n1", "n2")
POOL = Pool(
    [Device(10 + 4 * i + j, node, "::1", j, DeviceKind.CPU) for i, node in enumerate(NODES) for j in range(4)],
    {"fast": ("n0", "n2"), "gone": ("n9",)},
)


def numbers(placement: Placement) -> list[list[int]]:
    return [[device.id - 10 for device in devices] for devices in place(placement, POOL)]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Packed(0, 3), [[0], [1], [2], [3]]),
        (Packed(4), [[n] for n in range(4, 12)]),
        (Packed(0, 7, per_rank=2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (Packed(0, 7, stride=2), [[0], [2], [4], [6]]),
        (Packed(0, 3, per_rank=2, stride=2), [[0, 2], [1, 3]]),
        (Flexible([[5, 4], [0]]), [[5, 4], [0]]),
        (ByNode(per_rank=3), [[0, 1, 2], [4, 5, 6], [8, 9, 10]]),
        (ByNode(per_rank=2, nodes=[2, 0], most=1), [[8, 9], [0, 1]]),
        (OnCpu(2), [[], []]),
        (Packed(np.int64(4), 5), [[4], [5]]),
        ("all", [[n] for n in range(12)]),
        ("3-5", [[3], [4], [5]]),
        ("0-1:0-1", [[0], [1], [4], [5]]),
        ("0:0-1, 2:3", [[0], [1], [11]]),
        ("fast:1", [[1], [9]]),
        ("all:0", [[0], [4], [8]]),
    ],
)
def test_ranks_are_where_they_were_asked_for(placement: Placement, expected: list[list[int]]) -> None:
    assert numbers(placement) == expected


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Packed(0, 6, per_rank=2), "7 devices are not a multiple of 2"),
        (Packed(2, 5, per_rank=4), "rank 0 is on several nodes"),
        (Packed(0, 12), "no device 12 among 12"),
        (Flexible([[0], [0]]), r"rank 1 has device\(s\) \[10\] that are used already"),
        (Flexible([]), "has no rank"),
        ("0-x", "'0-x' is neither a number"),
        ("0,,1", "nothing between two commas"),
        ("3:0", "there is no node 3; the pool has 3"),
        ("0:4", "no device 4 among 4"),
        ("gone:0", r"node\(s\) n9 of group 'gone' have no devices here"),
        ("1-0", "neither a number"),
        (ByNode(per_rank=0), "per_rank is at least 1"),
        (OnCpu("a"), "ranks is a whole number, not 'a'"),  # type: ignore[arg-type]
        (OnCpu(0), "has no rank"),
        (Packed(0, 3, per_rank=None), "per_rank is a whole number, not None"),  # type: ignore[arg-type]
        (ByNode(most=1.5), "most is a whole number, not 1.5"),  # type: ignore[arg-type]
        (Flexible(3), "each rank has a list of devices"),  # type: ignore[arg-type]
        (None, "placement None is none: Packed"),  # type: ignore[list-item]
        (Flexible([0, 1]), "each rank has a list of devices"),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_placed_says_why(placement: Placement, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        place(placement, POOL)


def test_numbers_are_no_devices_and_other_classes_no_workers() -> None:
    with pytest.raises(SpecError, match="0 is not a device"):
        Pool([0, 1])  # type: ignore[list-item]
    with pytest.raises(SpecError, match=r"dict.* is not a class derived from rlix\.flow\.Worker"):
        launch(dict, "all", POOL)  # type: ignore[arg-type]
    for wrong in ({"name": 3}, {"max_concurrency": 0}, {"max_concurrency": "2"}):
        with pytest.raises(SpecError, match=f"launch: .*{next(iter(wrong))}.* not "):
            launch(Worker, "all", POOL, **wrong)  # type: ignore[arg-type]
