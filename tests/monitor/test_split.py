from pathlib import Path
from typing import Any

import pytest

from rlix.monitor.records import RunRecord, load_run
from rlix.monitor.split import split_estimate
from tests.monitor.synthetic import T0, job_event, lease_event, pool, span, write_run


def job(folder: Path, events: list[dict[str, Any]], *, devices: int = 4, steps: int = 1) -> RunRecord:
    head = [pool(devices), job_event("started", 0), job_event("first_step", 10)]
    rows = [{"step": step, "time": T0 + 20} for step in range(steps)]
    return load_run(write_run(folder, events=[*head, *events, job_event("finished", 50)], metrics=rows))


def test_by_hand(tmp_path: Path) -> None:
    first = job(
        tmp_path / "a",
        [
            span(0, 2, 6, phase="initialization", step=0),  # start-up: busy, and within the ten seconds
            *[span(device, 10, 12, step=1) for device in range(4)],  # 8 device-seconds on 4: 4 s on 2
            span(0, 12, 12.5, kind="load", phase="actor_training", step=1),  # switching is free
            span(0, 13, 16, phase="actor_training", step=1),  # 3 s on one device: fits, 3 s
        ],
    )
    second = job(
        tmp_path / "b",
        [
            span(0, 20, 21, step=1),
            span(1, 20, 26, step=1),  # 7 device-seconds on 2 would be 3.5 s, but one trajectory ran 6 s
            *[span(device, 30, 31, phase="actor_training", step=1) for device in range(4)],  # 4 on 2 devices: 2 s
            lease_event("granted", 1, [1], 20),
            lease_event("released", 1, [1], 29),  # 3 s of host time under a lease, after the rollout
        ],
        steps=2,
    )
    estimate = split_estimate([first, second])
    assert estimate is not None
    a, b = estimate.jobs
    assert (a.devices, a.run_s, a.busy_device_s) == (2, 10 + 4 + 3, 4 + 8 + 3)
    assert (b.devices, b.run_s, b.busy_device_s) == (2, 10 + 6 + 2 + 3, 7 + 4)
    assert estimate.makespan_s == 21
    assert estimate.idle_share == pytest.approx(1 - 26 / (4 * 21))
    assert estimate.idle_share_stepping == pytest.approx(1 - (11 + 11) / (2 * 7 + 2 * 11))
    assert estimate.steps_per_hour == pytest.approx(3 * 3600 / 21)
    assert b.steps_per_hour == pytest.approx(2 * 3600 / 21)


def test_waiting_for_devices_is_no_host_time(tmp_path: Path) -> None:
    wait = {**lease_event("granted", 2, [1], 15), "waited_s": 4.0}
    held = [lease_event("granted", 1, [0], 10), lease_event("released", 1, [0], 20)]
    alone = job(tmp_path / "a", [span(0, 10, 11), *held, wait, lease_event("released", 2, [1], 20)])
    other = job(tmp_path / "b", [span(0, 21, 22)])
    estimate = split_estimate([alone, other])
    assert estimate is not None
    assert estimate.jobs[0].run_s == 10 + 1 + (9 - 4)


def test_devices_that_do_not_divide_go_to_the_first_jobs(tmp_path: Path) -> None:
    records = [job(tmp_path / name, [span(0, 10, 11)], devices=5) for name in "ab"]
    estimate = split_estimate(records)
    assert estimate is not None
    assert [part.devices for part in estimate.jobs] == [3, 2]


def test_no_estimate_where_nothing_was_shared(tmp_path: Path) -> None:
    alone = job(tmp_path / "a", [span(0, 10, 11)])
    elsewhere = job(tmp_path / "b", [span(1, 10, 11)])
    assert split_estimate([alone]) is None
    assert split_estimate([alone, elsewhere]) is None
    assert split_estimate([job(tmp_path / name, [span(0, 10, 11)], devices=1) for name in "cd"]) is None
    late = [pool(4), job_event("started", 60), job_event("first_step", 61), span(0, 61, 62), job_event("finished", 63)]
    later = load_run(write_run(tmp_path / "later", events=late, metrics=[]))
    assert split_estimate([alone, later]) is None  # nobody shared anything
