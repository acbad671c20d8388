from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.monitor.accounting import account, contended_window, shared_window
from rlix.monitor.records import JobEvent, PoolDevice, RunRecord, Span, load_run
from rlix.monitor.tables import job_table
from tests.monitor.synthetic import T0, demo_runs, job_event, lease_event, pool, span, write_run


def two_jobs(folder: Path) -> list[RunRecord]:
    """Job a runs from 0 to 10, job b from 2 to 12, on two devices."""
    a = write_run(
        folder / "a",
        events=[
            pool(2),
            job_event("started", 0),
            job_event("first_step", 1),
            span(0, 1, 3, kind="load"),
            span(0, 2, 5),  # busy while still loading: one second of loading is hidden
            span(0, 4, 6),  # overlaps itself
            span(1, 8, 9, kind="sync"),
            lease_event("granted", 1, [0, 1], 1),
            lease_event("released", 1, [1], 2),  # given back early
            lease_event("shrinking", 1, [0], 6.5),
            lease_event("released", 1, [0], 7),
            lease_event("granted", 2, [1], 8),  # never released: held until the end
            job_event("finished", 10),
        ],
        metrics=[{"step": s, "time": T0 + 2 + s, "reward": s / 10, "exact": s / 20, "tokens": 50} for s in range(8)],
    )
    b = write_run(
        folder / "b",
        events=[
            pool(2),
            job_event("started", 2),
            job_event("first_step", 4),
            span(1, 5, 7),
            span(0, 11, 14),  # goes on after the last job has ended
            job_event("failed", 12, "boom"),
        ],
        metrics=[],
    )
    return [load_run(a), load_run(b)]


def test_what_a_job_that_never_came_to_a_step_does_not_have_is_not_shown_as_none(tmp_path: Path) -> None:
    events = [pool(1), job_event("started", 0), job_event("failed", 9, "boom")]
    (row,) = job_table(account([load_run(write_run(tmp_path / "a", events=events, metrics=[]))])).rows
    assert row[:7] == ("a", "failed", "0", "9.0 s", "–", "0", "–")


def test_by_hand(tmp_path: Path) -> None:
    accounting = account(two_jobs(tmp_path))
    first, second = accounting.devices
    assert accounting.window_s == 12
    assert (first.busy_s, first.switching_s, first.held_s, first.free_s) == (4 + 1, 1, 1, 5)
    assert (second.busy_s, second.switching_s, second.held_s, second.free_s) == (2, 1, 1 + 1, 7)
    assert accounting.total.idle_s == 15
    assert accounting.share(accounting.total.busy_s) == pytest.approx(7 / 24)
    assert accounting.steps_per_hour == pytest.approx(8 * 3600 / 12)
    a, b = accounting.jobs
    assert (a.state, a.steps, a.active_s, a.startup_s, a.tokens, a.shrinks) == ("finished", 8, 10, 1, 400, 1)
    assert (a.steps_per_hour, a.tokens_per_s) == (8 * 360, 40)
    assert (a.busy_device_s, a.switching_device_s) == (4, 2)
    assert (a.reward_first, a.reward_last) == (pytest.approx(0.2), pytest.approx(0.5))
    assert (b.state, b.steps, b.reward_first, b.exact_last) == ("failed", 0, None, None)


def test_windows(tmp_path: Path) -> None:
    records = two_jobs(tmp_path)
    assert shared_window(records) == ((T0, T0 + 12),)
    assert contended_window(records) == ((T0 + 4, T0 + 10),)
    assert account(records, contended_window(records)).total.busy_s == 2 + 2
    assert contended_window([]) == ()


def test_a_gap_in_which_no_job_ran_does_not_count(tmp_path: Path) -> None:
    early = write_run(tmp_path / "a", events=[pool(1), job_event("started", 0), job_event("finished", 1)])
    late = write_run(
        tmp_path / "b", events=[pool(1), job_event("started", 9), span(0, 9, 10), job_event("finished", 10)]
    )
    accounting = account([load_run(early), load_run(late)])
    assert (accounting.window_s, accounting.total.busy_s, accounting.total.free_s) == (2, 1, 1)


def test_nothing_at_all(tmp_path: Path) -> None:
    accounting = account([load_run(write_run(tmp_path / "a", events=[], metrics=[]))])
    assert accounting.window_s == 0
    assert accounting.share(1.0) == 0
    assert accounting.jobs[0].steps_per_hour == 0


ticks = st.integers(0, 40)
spans = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["busy", "load", "offload", "sync"]), ticks, ticks), max_size=25
)


def record(name: str, rows: list[tuple[int, str, int, int]], start: int, end: int) -> RunRecord:
    return RunRecord(
        name=name,
        directory=Path(name),
        spec={},
        metrics=(),
        spans=tuple(Span(d, "c", "rollout", kind, min(a, b), max(a, b), 0) for d, kind, a, b in rows),
        leases=(),
        job_events=(JobEvent("started", start), JobEvent("finished", end)),
        devices=tuple(PoolDevice(i, "", "cpu") for i in range(3)),
        checkpoints=(),
    )


@given(spans, spans, st.lists(ticks, min_size=4, max_size=4))
def test_every_tick_of_every_device_counts_once(
    left: list[tuple[int, str, int, int]], right: list[tuple[int, str, int, int]], bounds: list[int]
) -> None:
    """Against counting unit cells one by one."""
    (a0, a1), (b0, b1) = sorted(bounds[:2]), sorted(bounds[2:])
    accounting = account([record("a", left, a0, a1), record("b", right, b0, b1)])
    window = set(range(a0, a1)) | set(range(b0, b1))
    assert accounting.window_s == len(window)
    for use in accounting.devices:
        mine = [(kind, min(a, b), max(a, b)) for d, kind, a, b in left + right if d == use.device]
        busy = {t for kind, a, b in mine if kind == "busy" for t in range(a, b)} & window
        switching = ({t for kind, a, b in mine if kind != "busy" for t in range(a, b)} & window) - busy
        assert (use.busy_s, use.switching_s, use.held_s) == (len(busy), len(switching), 0)
        assert use.window_s == accounting.window_s


def test_synthetic_runs_add_up(tmp_path: Path) -> None:
    accounting = account([load_run(run) for run in demo_runs(tmp_path, steps=20)])
    for use in accounting.devices:
        assert use.window_s == pytest.approx(accounting.window_s, abs=1e-6)
        assert min(use.busy_s, use.switching_s, use.held_s, use.free_s) > 0
