"""How a program that attached itself ended, as its run folder tells it."""

import multiprocessing
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control import run_record
from rlix.control.run_record import Kind, RunRecord
from rlix.monitor.records import load_run
from rlix.protocol.errors import SpecError


def record_in(folder: Path, told: list[Any] | None = None) -> RunRecord:
    client = SimpleNamespace(devices=dict, lease_log=lambda after: ())
    program: Any = SimpleNamespace(name="job", client=client, progress=lambda *said: told is None or told.append(said))
    return RunRecord(program, Kind("a program", {}), folder, "actor_train")


def uncaught(error: BaseException) -> None:
    """As the interpreter does."""
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda _: None, ("finished", None)),
        (lambda record: record.broken(ValueError("no")), ("failed", "ValueError: no")),
        (lambda record: record.broken(KeyboardInterrupt()), ("stopped", None)),
        (lambda record: (record.broken(ValueError("no")), record.step(1, {})), ("finished", None)),
        (lambda _: uncaught(ValueError("no")), ("failed", "ValueError: no")),
        (lambda _: sys.exit(), ("finished", None)),
        (lambda _: sys.exit(1), ("failed", "it ended with exit code 1")),
        (lambda _: sys.exit("no data"), ("failed", "no data")),
        (lambda _: sys.exit(130), ("stopped", None)),
    ],
)
def test_how_a_program_ended_is_recorded(
    end: Callable[[RunRecord], object],
    how: tuple[str, str | None],
    tmp_path: Path,
) -> None:
    record = record_in(tmp_path)
    record.step(0, {})
    try:
        end(record)
    except SystemExit:
        assert how[0] == "finished" or record.is_broken
    record.close()
    record.close()
    run = load_run(tmp_path / "job")
    assert run.state == how[0]
    assert (how[1] or "") in (tmp_path / "job" / "events.jsonl").read_text()


@pytest.mark.parametrize("name", ["report.html", "reports", "../elsewhere", ".hidden"])
def test_a_program_whose_name_no_run_folder_can_have_is_told(tmp_path: Path, name: str) -> None:
    program: Any = SimpleNamespace(name=name)
    with pytest.raises(SpecError, match=r"run folder has its name, and .*choose"):
        RunRecord(program, Kind("a program", {}), tmp_path, "actor_train")
    assert not list(tmp_path.iterdir())


def test_a_fork_that_is_terminated_says_nothing_of_the_program(tmp_path: Path) -> None:
    """A pool of processes ends its own so, when the program has what it wanted of them."""
    record = record_in(tmp_path)
    before = signal.signal(signal.SIGTERM, run_record._on_sigterm)
    try:
        child = multiprocessing.get_context("fork").Process(target=lambda: signal.raise_signal(signal.SIGTERM))
        child.start()
        child.join(300)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert child.exitcode == -signal.SIGTERM
    assert "stopped" not in (tmp_path / "job" / "events.jsonl").read_text()
    record.close()
    assert load_run(tmp_path / "job").state == "finished"


def test_people_are_told_what_the_folder_is(tmp_path: Path) -> None:
    told: list[Any] = []
    with record_in(tmp_path, told) as record:
        record.step(4, {"loss": 0.5, "self": 1.0, "note": "text"}, 40)
    assert told == [(5, 40, {"loss": 0.5, "self": 1.0})]
