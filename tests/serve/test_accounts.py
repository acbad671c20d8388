"""What jobs were given, by hand: leases split by the hour and the phase, work and switching within them."""

import json
from pathlib import Path

import pytest

from rlix.monitor.records import load_run
from rlix.scheduler.queue.fair_share import Usage
from rlix.scheduler.queue.jobs import Job
from rlix.serve.queue.accounts import Accounts, Reading, read_run, used_in
from rlix.serve.queue.store import FILE, Change, Store, Used

HOUR = 1000 * 3600.0
JOB = Job(1, "j", "ann", "a", 2, submitted_at=0.0)


def lease(event: str, epoch: int, devices: list[int], phase: str, at: float) -> dict[str, object]:
    what = {"type": "lease", "event": event, "epoch": epoch, "cluster": "c", "phase": phase, "devices": devices}
    return {**what, "time": HOUR + at, "reason": None, "waited_s": None}


def span(device: int, kind: str, start: float, end: float) -> dict[str, object]:
    what = {"type": "span", "device": device, "cluster": "c", "phase": "p", "kind": kind, "step": 0}
    return {**what, "start": HOUR + start, "end": HOUR + end}


def write(run_dir: Path, rows: list[dict[str, object]]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.yaml").write_text("name: j\n")
    (run_dir / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = [
    lease("granted", 1, [0, 1], "actor_training", 3500.0),
    span(0, "load", 3500.0, 3520.0),
    span(0, "busy", 3510.0, 3700.0),
    lease("released", 1, [0, 1], "actor_training", 3700.0),
    lease("granted", 2, [0], "rollout", 3700.0),
    span(0, "busy", 3750.0, 3800.0),
]


def test_leases_are_split_by_hour_and_phase(tmp_path: Path) -> None:
    """200 s on two devices over the hour's end, one of them at work for 190 s; then 100 s of a lease that goes on."""
    write(tmp_path / "j", ROWS)
    assert used_in(1, load_run(tmp_path / "j")) == [
        Used(1, 1000, "actor_training", given_s=200.0, busy_s=90.0, switching_s=10.0),
        Used(1, 1001, "actor_training", given_s=200.0, busy_s=100.0, switching_s=0.0),
        Used(1, 1001, "rollout", given_s=100.0, busy_s=50.0, switching_s=0.0),
    ]


def test_what_was_given_is_counted_once_however_often_it_is_read(tmp_path: Path) -> None:
    store, usage = Store(tmp_path / FILE), Usage()
    store.add(JOB, None, {}, Change(0.0, 1, "ann", "submitted"))
    accounts = Accounts(store, usage)
    now = HOUR + 3800.0
    accounts.take(JOB, read_run(JOB, tmp_path / "j"), now)  # there is nothing yet
    write(tmp_path / "j", ROWS[:4])
    accounts.take(JOB, read_run(JOB, tmp_path / "j"), now)
    write(tmp_path / "j", ROWS)
    accounts.take(JOB, read_run(JOB, tmp_path / "j"), now)
    accounts.take(JOB, read_run(JOB, tmp_path / "j"), now)
    assert usage.at(now) == {("a", "ann"): pytest.approx(500.0)}
    rows = {row.phase: (row.given_s, row.busy_s, row.idle_s) for row in accounts.since(0.0)}
    assert rows == {"actor_training": (400.0, 190.0, 200.0), "rollout": (100.0, 50.0, 50.0)}
    assert {row.phase: row.given_s for row in accounts.since(HOUR + 3600.0)} == {
        "actor_training": 200.0,
        "rollout": 100.0,
    }
    again = Usage()
    Accounts(store, again)
    assert again.at(now)["a", "ann"] == pytest.approx(500.0, rel=0.01), "as of the hour in which it was given"
    store.close()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("events.jsonl", "[" * 100_000 + "\n\n"),
        ("spec.yaml", "[" * 2000),
        ("metrics.jsonl", f'{{"step": 1, "tokens": 1{"0" * 400}}}\n'),
        ("metrics.jsonl", '{"step": 1, "tokens": 1e308}\n{"step": 2, "tokens": 1e308}\n'),
    ],
)
def test_whatever_a_job_writes_ends_no_service(tmp_path: Path, file: str, text: str) -> None:
    write(tmp_path / "j", ROWS)
    (tmp_path / "j" / file).write_text(text)
    assert read_run(JOB, tmp_path / "j") == Reading()


def test_an_account_outlives_its_run_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE)
    store.add(JOB, None, {}, Change(0.0, 1, "ann", "submitted"))
    write(tmp_path / "j", ROWS)
    Accounts(store, Usage()).take(JOB, read_run(JOB, tmp_path / "j"), HOUR + 3800.0)
    (tmp_path / "j" / "events.jsonl").unlink()
    accounts = Accounts(store, Usage())
    accounts.take(JOB, read_run(JOB, tmp_path / "j"), HOUR + 3900.0)
    assert sum(row.given_s for row in accounts.since(0.0)) == 500.0
    store.close()
