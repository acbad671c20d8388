"""Going on with a run: what has changed in its spec, and what of that can be."""

import json
import shutil
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.cli.resume import say_moves, say_resumptions
from rlix.monitor.records import load_run
from rlix.node.manifest import write_manifest
from rlix.node.run_folder import RunFolder, aside_of, earlier_runs
from rlix.pipeline import base
from rlix.pipeline.jobs.launch import launch
from rlix.pipeline.jobs.resume import check_resumable, resumption
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.spec.changes import spec_changes
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import SpecError
from tests.pipeline.test_evaluation import Toy, spec_of

KL = {"name": "grpo", "options": {"kl_coefficient": 0.1}}
PPO = {"name": "ppo"}


def changed(*, old: dict[str, Any] | None = None, **new: Any) -> dict[str, tuple[Any, Any, bool]]:
    """By field: then, now, and whether it is refused."""
    found = spec_changes(with_keys(**(old or {})), with_keys(**new))
    return {c.field: (c.old, c.new, bool(c.refused)) for c in found}


def with_keys(**changes: Any) -> JobSpec:
    values = load_job("sort_digits").model_dump()
    for name, value in changes.items():
        before = values.get(name)
        values[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return JobSpec.model_validate(values)


def test_what_the_steps_to_come_can_follow() -> None:
    warmup = load_job("sort_digits").warmup
    assert warmup is not None
    assert changed() == {}
    assert changed(steps=300, optimizer={"learning_rate": 1e-4}, evaluation={"every": 5}, warmup=None) == {
        "steps": (200, 300, False),
        "optimizer.learning_rate": (5e-4, 1e-4, False),
        "evaluation.every": (None, 5, False),
        "evaluation.baseline": (None, False, False),
        "evaluation.prompts": (None, 64, False),
        "evaluation.samples_per_prompt": (None, 1, False),
        "evaluation.temperature": (None, 0.0, False),
        "evaluation.top_p": (None, 1.0, False),
        "evaluation.top_k": (None, 0, False),
        "evaluation.best": (None, "eval/reward", False),
        "evaluation.best_is": (None, "highest", False),
        "warmup.steps": (warmup.steps, None, False),
        "warmup.batch_size": (warmup.batch_size, None, False),
        "warmup.learning_rate": (warmup.learning_rate, None, False),
    }
    assert changed(clusters={"actor_train": {"gpus": 4}}) == {"clusters.actor_train.gpus": (2, 4, False)}
    assert changed(old={"algorithm": PPO}, algorithm=KL)["algorithm.name"] == ("ppo", "grpo", False)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ({}, {"model": {"layers": 3}}, "model.layers"),
        ({}, {"algorithm": KL}, "algorithm.options.kl_coefficient"),
        ({}, {"algorithm": PPO}, "algorithm.name"),
        ({"algorithm": KL}, {"algorithm": PPO}, "algorithm.name"),
        (
            {},
            {"optimizer": {"groups": {"lm_head*": {"learning_rate": 1e-4}}}},
            "optimizer.groups.lm_head*.learning_rate",
        ),
        ({}, {"pipeline": {"name": "a.b:C"}}, "pipeline.name"),
    ],
)
def test_what_the_checkpoint_holds_cannot_change(old: dict[str, Any], new: dict[str, Any], field: str) -> None:
    assert changed(old=old, **new)[field][2]


def test_numbers_of_a_pattern_can_change() -> None:
    groups = [{"optimizer": {"groups": {"lm_head*": {"learning_rate": rate}}}} for rate in (1e-4, 1e-5)]
    assert changed(old=groups[0], **groups[1]) == {"optimizer.groups.lm_head*.learning_rate": (1e-4, 1e-5, False)}


def run_of(path: Path, spec: JobSpec, *steps: int) -> RunFolder:
    folder, _ = RunFolder.open(path)
    folder.write_spec(spec.to_yaml())
    for step in steps:
        checkpoint = folder.checkpoints / f"step_{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_text("1")
        write_manifest(checkpoint)
    folder.close()
    return folder


def test_a_refusal_names_fields_and_values_before_anything_starts(tmp_path: Path) -> None:
    run_of(tmp_path / "sort_digits", with_keys(), 5)
    wanted = with_keys(model={"layers": 3}, steps=300)
    with pytest.raises(SpecError, match=r"model\.layers: 2 → 3: is part of what the checkpoint holds") as caught:
        launch([wanted], tmp_path, resume=True)
    assert "steps" not in str(caught.value)
    assert resumption(wanted, tmp_path / "other").step is None


def test_a_spec_that_an_older_release_wrote_its_plan_into_is_read(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "sort_digits", with_keys(), 5)
    plan = {"mode": "auto", "switch": "exact", "chosen": "collocated: all on 2", "step_s": 2.5, "seconds": {"step": 2}}
    kept = folder.path / "spec.yaml"
    kept.write_text(kept.read_text() + f"plan: {json.dumps(plan)}\n")
    assert [change.field for change in resumption(with_keys(steps=300), folder.path).changes] == ["steps"]
    with pytest.raises(SpecError, match=r"plan\.chosen.*remove 'plan' to run on these clusters"):
        load_job(kept)


def test_the_command_shows_what_has_changed_and_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_of(tmp_path / "sort_digits", with_keys(steps=100, optimizer={"learning_rate": 1e-4}), 50, 100)
    (folder.checkpoints / "step_100" / "weights").write_text("")

    def stop(*_: object) -> None:
        raise SpecError("far enough")

    monkeypatch.setattr("rlix.cli.run._run_to_end", stop)
    result = CliRunner().invoke(app, ["run", "sort_digits", "--resume", "--runs-dir", str(tmp_path)])
    assert "checkpoint step_100: weights has 0 of 1 bytes; it is not gone on from" in result.stdout
    assert "sort_digits: goes on after step 50, with a changed spec:" in result.stdout
    cells = [line.split() for line in result.stdout.splitlines()]
    assert ["steps", "100", "200"] in cells
    assert ["optimizer.learning_rate", "0.0001", "0.0005"] in cells
    assert (folder.checkpoints / "step_100").is_dir()  # whoever looks changes nothing


def test_resume_names_the_run_that_was_moved_and_has_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "sort_digits"
    run_of(path, with_keys(), 5, 10)
    again, _ = RunFolder.open(path)
    again.write_spec("name: sort_digits")
    again.close()
    (earlier,) = earlier_runs(path)
    with pytest.raises(SpecError, match=rf"has no checkpoint, .*has: {earlier}, after step 10") as caught:
        check_resumable(with_keys(), path)
    command = str(caught.value).split("`")[1]
    assert command == f"mv {path} {aside_of(path)}; mv {earlier} {path}"
    subprocess.run(command, shell=True, check=True)
    assert check_resumable(with_keys(), path).step == 10
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    (tmp_path / "sort_digits_2-20260101-000000").mkdir()  # somebody else's
    assert check_resumable(with_keys(), path).step is None


def test_it_is_said_where_an_earlier_run_moves(tmp_path: Path) -> None:
    run_of(tmp_path / "sort_digits", with_keys(), 5)
    console = Console(file=StringIO(), width=300)
    say_moves([with_keys(), with_keys(name="other")], tmp_path, console)
    folder, _ = RunFolder.open(tmp_path / "sort_digits")
    folder.close()
    said = cast(StringIO, console.file).getvalue()
    assert f"with a checkpoint after step 5, is in {tmp_path}/sort_digits and moves to {folder.earlier}" in said
    assert said.count("\n") == 1


def test_a_job_that_has_done_all_its_steps_says_so_and_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, more = with_keys(steps=50), with_keys(steps=60)
    run_of(tmp_path / "sort_digits", done, 50)
    console = Console(file=StringIO(), width=120)
    said = "has done 50 steps, and nothing of its 50 is left"
    for spec, wanted, left in ((done, said, []), (more, "goes on after step 50", [more])):
        assert say_resumptions([spec], tmp_path, console) == left
        assert wanted in cast(StringIO, console.file).getvalue()
    monkeypatch.setattr("rlix.cli.run._run_to_end", lambda *_: pytest.fail("it was started"))
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    result = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), "--resume", "--runs-dir", str(tmp_path)])
    assert (result.exit_code, said in result.stdout) == (0, True), result.output


class Resumed(Toy):
    def setup(self) -> None:
        self.done = -1

    def save(self, path: Path) -> Any:
        assert self.status().phase == "checkpoint"  # and not what it did before: it may be killed now
        return super().save(path)

    def load(self, path: Path, step: int) -> None:
        assert (path / "done").read_text() == str(step)


def test_a_job_goes_on_with_the_new_spec_and_its_events_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "JobClient", MagicMock())
    path = tmp_path / "copy_digits"
    Toy("ft_1", JobConfig(spec_of(steps=6, evaluation=None, checkpoint={"every": 3}), path)).run()
    (path / "checkpoints" / "step_6" / "done").write_text("")
    again = Resumed("ft_2", JobConfig(spec_of(steps=8, evaluation=None, checkpoint={"every": 3}), path, resume=True))
    assert again.run().steps == 8
    done = Resumed("ft_3", JobConfig(spec_of(steps=4, evaluation=None, checkpoint={"every": 3}), path, resume=True))
    assert done.run().steps == 8
    record = load_run(path)
    assert [row["step"] for row in record.metrics] == list(range(8))
    started = [event.detail for event in record.job_events if event.event == "started"]
    assert started == [None, "step_6 is broken: done has 0 of 1 bytes; steps: 6 → 8", "steps: 8 → 4"]
    assert load_job(path / "spec.yaml").steps == 4


def test_a_job_that_goes_on_says_so_before_it_has_begun(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_50").mkdir(parents=True)
    spec = load_job("sort_digits")
    assert JobStatus.first(JobConfig(spec, tmp_path, resume=True), "ft_1").step == 50
    assert JobStatus.first(JobConfig(spec, tmp_path), "ft_1").step == 0
