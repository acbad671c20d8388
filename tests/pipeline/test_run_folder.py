import errno
import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlix.monitor.records import load_run
from rlix.node import run_folder
from rlix.node.manifest import write_manifest
from rlix.node.run_folder import (
    RunFolder,
    Span,
    aside_of,
    check_free,
    list_checkpoints,
    newest_checkpoint,
    take_back,
)
from rlix.pipeline import base
from rlix.pipeline.base import Pipeline
from rlix.pipeline.jobs.launch import launch
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.spec.job import load_job
from rlix.protocol.errors import SpecError

SPAWNER = multiprocessing.get_context("spawn")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_earlier_run_is_moved_aside_not_overwritten(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        folder, checkpoint = RunFolder.open(tmp_path / "job")
        assert checkpoint is None
        folder.write_spec(text)
        folder.close()
    texts = {(folder / "spec.yaml").read_text() for folder in tmp_path.iterdir()}
    assert texts == {"first", "second", "third"}
    assert (tmp_path / "job" / "spec.yaml").read_text() == "third"


def test_a_run_that_wrote_nothing_is_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        folder, _ = RunFolder.open(tmp_path / "job")
        folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_a_run_that_comes_to_nothing_gives_its_place_back(tmp_path: Path) -> None:
    first, _ = RunFolder.open(tmp_path / "job")
    first.write_spec("first")
    first.close()
    assert first.give_back() is None  # nobody was there before
    second, _ = RunFolder.open(tmp_path / "job")
    second.write_spec("second")
    assert second.give_back() is None  # who was there had no checkpoint
    assert second.earlier is not None
    (second.earlier / "checkpoints" / "step_1").mkdir(parents=True)
    moved = second.give_back()
    assert moved is not None
    assert moved == second.path
    assert (moved / "spec.yaml").read_text() == "second"
    assert (tmp_path / "job" / "spec.yaml").read_text() == "first"
    second.event({"type": "job"})  # whatever still writes does so there
    assert not (tmp_path / "job" / "events.jsonl").exists()
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "job", moved])
    second.close()


def test_a_run_that_did_a_step_keeps_its_place(tmp_path: Path) -> None:
    first, _ = RunFolder.open(tmp_path / "job")
    (first.checkpoints / "step_1").mkdir(parents=True)
    first.close()
    second, _ = RunFolder.open(tmp_path / "job")
    second.metrics({"step": 0})
    assert second.give_back() is None
    assert second.path == tmp_path / "job"
    second.close()


def killed_starts(path: Path, count: int) -> Path:
    """A run with a checkpoint in the folder, and starts after it that do no step and give nothing back."""
    first, _ = RunFolder.open(path)
    first.write_spec("first")
    (first.checkpoints / "step_1").mkdir(parents=True)
    write_manifest(first.checkpoints / "step_1")
    first.close()
    for number in range(count):
        folder, _ = RunFolder.open(path)
        folder.write_spec(f"killed {number}")
        assert folder.earlier is not None and list_checkpoints(folder.earlier / "checkpoints")
        folder.close()
    return path


@pytest.mark.parametrize("starts", [1, 3])
def test_a_start_that_was_killed_gives_its_place_back_afterwards(tmp_path: Path, starts: int) -> None:
    path = killed_starts(tmp_path / "job", starts)
    moved = take_back(path)
    assert moved is not None
    assert (moved / "spec.yaml").read_text() == f"killed {starts - 1}"
    assert (path / "spec.yaml").read_text() == "first"
    assert take_back(path) is None
    folder, checkpoint = RunFolder.open(path, resume=True)
    assert checkpoint == (1, path / "checkpoints" / "step_1")
    folder.close()


def test_nothing_is_taken_back_from_a_run_that_did_a_step_or_goes_on(tmp_path: Path) -> None:
    path = killed_starts(tmp_path / "job", 1)
    folder, _ = RunFolder.open(path)
    with pytest.raises(SpecError, match="is in use by"):
        take_back(path, wait_s=0.0)
    folder.metrics({"step": 0})
    folder.close()
    assert take_back(path) is None
    assert (path / "metrics.jsonl").exists()
    assert take_back(tmp_path / "never") is None


def test_where_a_run_would_move_is_known_before(tmp_path: Path) -> None:
    assert aside_of(tmp_path / "job") is None
    folder, _ = RunFolder.open(tmp_path / "job")
    assert aside_of(tmp_path / "job") is None  # nothing to keep
    folder.write_spec("first")
    (folder.path / "metrics.jsonl.partial").touch()
    folder.close()
    expected = aside_of(tmp_path / "job")
    folder, _ = RunFolder.open(tmp_path / "job")
    assert folder.earlier == expected
    folder.close()


def test_a_span_becomes_one_event_per_device(tmp_path: Path) -> None:
    RunFolder(tmp_path).spans([Span((2, 3), "actor_train", "actor_training", "busy", 1.0, 2.5, step=7)])
    common = {"type": "span", "cluster": "actor_train", "phase": "actor_training", "kind": "busy"}
    times = {"start": 1.0, "end": 2.5, "step": 7}
    assert rows_of(tmp_path / "events.jsonl") == [{**common, **times, "device": 2}, {**common, **times, "device": 3}]


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("step_5", "step_10", "step_100", "step_110.partial"):
        (folder.checkpoints / name).mkdir(parents=True)
        write_manifest(folder.checkpoints / name)
    assert [step for step, _ in list_checkpoints(folder.checkpoints)] == [5, 10, 100]
    assert newest_checkpoint(tmp_path) == ((100, folder.checkpoints / "step_100"), [])


# -- one writer --------------------------------------------------------------------------------------------------------


def _write(path: Path, said: Connection) -> None:
    folder, _ = RunFolder.open(path)
    folder.write_spec("name: first")
    folder.metrics({"step": 0})
    (folder.checkpoints / "step_1").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_1")
    (folder.checkpoints / "step_2.partial").mkdir()
    said.send("written")
    signal.pause()


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_second_run_is_refused_until_the_first_ones_process_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "job"
    check_free(path)
    here, there = SPAWNER.Pipe()
    first = SPAWNER.Process(target=_write, args=(path, there))
    first.start()
    try:
        assert here.poll(60)
        before = content(path)
        for resume in (False, True):
            with pytest.raises(SpecError, match=rf"job is in use by process {first.pid} \(since .*or --runs-dir"):
                RunFolder.open(path, resume=resume, wait_s=0.0)
        with pytest.raises(SpecError, match="in use"):
            check_free(path, wait_s=0.0)
        assert content(path) == before
        assert (path / "checkpoints" / "step_2.partial").is_dir()
        assert [entry.name for entry in tmp_path.iterdir()] == ["job"]
    finally:
        first.kill()  # and not joined: who starts at once waits for it
    folder, checkpoint = RunFolder.open(path, resume=True, wait_s=60.0)
    first.join()
    assert checkpoint == (1, path / "checkpoints" / "step_1")
    assert not (path / "checkpoints" / "step_2.partial").exists()
    with pytest.raises(SpecError, match=rf"in use by process {os.getpid()} "):
        RunFolder.open(path, wait_s=0.0)
    folder.close()
    check_free(path, wait_s=0.0)


class Toy(Pipeline):
    def setup(self) -> None:
        raise AssertionError("the run folder is in use")

    def step(self, step: int) -> dict[str, float]:
        return {"reward": 0.0}


def test_the_same_job_started_twice_is_refused_and_leaves_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(base, "JobClient", MagicMock())
    spec = load_job("copy_digits")
    folder, _ = RunFolder.open(tmp_path / spec.name)
    folder.metrics({"step": 0})
    before = content(tmp_path)
    with pytest.raises(SpecError, match="in use by process"):
        launch([spec], tmp_path)
    with pytest.raises(SpecError, match="in use by process"):
        Toy("ft_2", JobConfig(spec, tmp_path / spec.name)).run()
    assert content(tmp_path) == before
    folder.close()
    again = Toy("ft_2", JobConfig(spec, tmp_path / spec.name))
    with pytest.raises(AssertionError, match="in use"):
        again.run()
    assert load_run(tmp_path / spec.name).state == "failed"
    check_free(tmp_path / spec.name)  # a run that has ended keeps nobody out, although its process lives


def test_a_file_system_without_locks_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    folder, _ = RunFolder.open(tmp_path / "job")
    assert folder.is_open
    assert "two runs must not use it at a time" in caplog.text


# -- after a death -----------------------------------------------------------------------------------------------------


def test_opening_removes_what_a_death_left_half_written(tmp_path: Path) -> None:
    for name in ("step_4/model", "step_8.partial/.model.partial", ".step_3.partial", "step_2.partial"):
        (tmp_path / "job" / "checkpoints" / name).mkdir(parents=True)
    write_manifest(tmp_path / "job" / "checkpoints" / "step_4")
    (tmp_path / "job" / "metrics.jsonl.partial").write_text("{")
    RunFolder.open(tmp_path / "job", resume=True)
    assert [path.name for path in (tmp_path / "job").iterdir() if path.name != ".lock"] == ["checkpoints"]
    assert [path.name for path in (tmp_path / "job" / "checkpoints").iterdir()] == ["step_4"]


def test_resuming_drops_the_metrics_of_steps_that_are_done_again_and_torn_lines(tmp_path: Path) -> None:
    folder, _ = RunFolder.open(tmp_path)
    (folder.checkpoints / "step_3").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_3")
    for step in range(5):
        folder.metrics({"step": step, "time": 10.0 + step})
    folder.event({"type": "job", "event": "started", "time": 1.0})
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 5, "rew')  # torn by a crash
    folder.close()
    assert len(load_run(tmp_path).metrics) == 5
    again, checkpoint = RunFolder.open(tmp_path, resume=True)
    assert checkpoint == (3, tmp_path / "checkpoints" / "step_3")
    again.event({"type": "job", "event": "started", "time": 20.0})
    again.metrics({"step": 3})
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [event.time for event in load_run(tmp_path).job_events] == [1.0, 20.0]


def test_a_death_while_metrics_are_dropped_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = RunFolder.open(tmp_path)
    (folder.checkpoints / "step_1").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_1")
    for step in range(3):
        folder.metrics({"step": step})
    folder.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def dies(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "replace", dies)
        RunFolder.open(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    RunFolder.open(tmp_path, resume=True)
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [0]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics({"step": 0})
    write = os.write
    left = [5]

    def full(file: int, text: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, text[: left[0]])
        left[0] -= written
        return written

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "write", full)
        folder.metrics({"step": 1})
    assert not left[0]
    folder.metrics({"step": 2})
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [0, 2]


def test_resuming_repairs_every_file_of_lines_wherever_it_is_torn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = RunFolder.open(tmp_path)
    (folder.checkpoints / "step_2").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_2")
    for step in range(3):
        folder.metrics({"step": step})
        folder.samples([{"step": step, "prompt": "1>", "completion": "1", "reward": 1.0}])
    folder.event({"type": "job", "event": "started", "time": 1.0})
    folder.close()
    last = {"step": 0, "type": "x", "prompt": "", "completion": "", "reward": 0.0}
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl", "mine.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 1, "re{"step": 1}\n\xff\n' + json.dumps(last).encode() + b'\n{"st')
    with pytest.raises(SpecError, match=r"jsonl:\d+: not valid JSON"):
        load_run(tmp_path)
    RunFolder.open(tmp_path, resume=True)
    found = load_run(tmp_path)
    assert [row["step"] for row in found.metrics] == [0, 1]
    assert [sample.step for sample in found.samples if sample.prompt == "1>"] == [0, 1]
    assert [event.event for event in found.job_events] == ["started"]
    assert rows_of(tmp_path / "mine.jsonl") == [last]
    assert caplog.text.count("3 torn lines were dropped") == 4
