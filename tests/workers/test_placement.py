"""Placements: which devices the ranks of a group get, as text or as lists."""

import numpy as np
import pytest

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device, DeviceKind
from rlix.workers.launch import launch
from rlix.workers.placement import Placement, place
from rlix.workers.worker import Worker

POOL = [Device(10 + 4 * i + j, node, "::1", j, DeviceKind.CPU) for i, node in enumerate("abc") for j in range(4)]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ([[5, 4], [0]], [[5, 4], [0]]),
        ([[], []], [[], []]),
        (([np.int64(4)], range(8, 10)), [[4], [8, 9]]),
        ("all", [[n] for n in range(12)]),
        ("3-5", [[3], [4], [5]]),
        ("0-1:0-1", [[0], [1], [4], [5]]),
        ("0:0-1, 2:3", [[0], [1], [11]]),
        ("all:0", [[0], [4], [8]]),
    ],
)
def test_ranks_are_where_they_were_asked_for(placement: Placement, expected: list[list[int]]) -> None:
    assert [[device.id - 10 for device in devices] for devices in place(placement, POOL)] == expected


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ([[2, 3, 4, 5]], "rank 0 is on several nodes"),
        ([[12]], "no device 12 among 12"),
        ([[-1]], "no device -1 among 12"),
        ([["a"]], "no device 'a' among 12"),
        ([[0], [0]], r"rank 1 has device\(s\) \[10\] that are used already"),
        ([], "has no rank"),
        ([0, 1], "write text such as .* or a list for each rank"),
        (None, "placement None: write text"),
        ("0-x", "'0-x' is neither a number"),
        ("0,,1", "nothing between two commas"),
        ("3:0", "there is no node 3; the pool has 3"),
        ("0:4", "no device 4 among 4"),
        ("1-0", "neither a number"),
    ],
)
def test_what_cannot_be_placed_says_why(placement: Placement, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        place(placement, POOL)


def test_numbers_are_no_devices_and_other_classes_no_workers() -> None:
    with pytest.raises(SpecError, match="0 is not a device"):
        place("all", [0, 1])  # type: ignore[list-item]
    with pytest.raises(SpecError, match=r"dict.* is not a class derived from rlix\.flow\.Worker"):
        launch(dict, "all", POOL)  # type: ignore[arg-type]
    for wrong in ({"name": 3}, {"max_concurrency": 0}, {"max_concurrency": "2"}):
        with pytest.raises(SpecError, match=f"launch: .*{next(iter(wrong))}.* not "):
            launch(Worker, "all", POOL, **wrong)  # type: ignore[arg-type]
