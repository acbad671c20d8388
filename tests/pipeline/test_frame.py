"""How the frame of every pipeline ends: stopped at any time, or with a teardown that fails."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from rlix.node.run_folder import RunFolder, earlier_runs, newest_checkpoint
from rlix.pipeline.base import Pipeline
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.spec.evaluation import EvaluationSpec
from rlix.pipeline.spec.job import load_job
from rlix.protocol.errors import RlixError
from rlix.protocol.types import Phase
from tests.pipeline.in_process import InProcess
from tests.pipeline.test_composition import job
from tests.pipeline.training_jobs import rows


class Toy(Pipeline):
    stopped_in_setup = False
    breaks_in: tuple[str, ...] = ()

    def setup(self) -> None:
        self._break("setup")
        if self.stopped_in_setup:
            self.request_stop()
            raise InterruptedError("stopped")

    def step(self, step: int) -> dict[str, float]:
        self._break("step")
        self._break(f"step {step}")
        with self.phase("actor_train", Phase.ACTOR_TRAINING):
            self._break(f"training {step}")
        return {"reward": 0.0}

    def save(self, path: Path) -> None:
        (path / "state").touch()

    def evaluate(self, done: int) -> dict[str, float]:
        raise RlixError("no replica answers")

    def teardown(self) -> None:
        self._break("teardown")

    def _break(self, where: str) -> None:
        if where in self.breaks_in:
            raise RuntimeError(f"broke in {where}")


def toy(folder: Path, **changes: Any) -> Toy:
    client: Any = MagicMock()
    client.phase.side_effect = lambda *_, **__: nullcontext(SimpleNamespace(devices=(), epoch=1))
    return Toy("ft_1", JobConfig(load_job("copy_digits").model_copy(update=changes), folder), client)


def test_a_stop_before_the_first_step_is_no_failure(tmp_path: Path) -> None:
    pipeline = toy(tmp_path / "job")
    pipeline.stopped_in_setup = True
    assert pipeline.run().state == "stopped"
    assert pipeline.status().state == "stopped"
    assert pipeline.status().error is None


@pytest.mark.parametrize("how", ["setup", "step 0", "stopped"])
def test_a_start_that_comes_to_nothing_hides_no_checkpoints(tmp_path: Path, how: str) -> None:
    path = tmp_path / "job"
    assert toy(path, steps=2).run().state == "finished"
    again = toy(path, steps=2)
    again.stopped_in_setup, again.breaks_in = how == "stopped", (how,)
    with nullcontext() if how == "stopped" else pytest.raises(RuntimeError, match=f"broke in {how}"):
        assert again.run().state == "stopped"
    moved = Path(str(again.status().moved_to))
    assert newest_checkpoint(path)[0] == (2, path / "checkpoints" / "step_2")
    assert moved != path
    assert [row["event"] for row in rows(moved / "events.jsonl") if row["type"] == "job"][-1] in ("failed", "stopped")
    assert "the run that was here before is in" in (moved / "job.log").read_text()
    if how != "stopped":
        assert f"{path} holds the run before this one again; what this one wrote is in {moved}" in str(
            again.status().error
        )
    third, checkpoint = RunFolder.open(path, resume=True, wait_s=0.0)
    assert checkpoint is not None
    third.close()


def test_a_start_that_did_a_step_keeps_its_place(tmp_path: Path) -> None:
    assert toy(tmp_path / "job", steps=2).run().state == "finished"
    again = toy(tmp_path / "job", steps=3)
    again.breaks_in = ("training 1",)
    with pytest.raises(RuntimeError, match="broke in training 1"):
        again.run()
    assert again.status().moved_to is None
    assert newest_checkpoint(tmp_path / "job")[0] is None
    (earlier,) = earlier_runs(tmp_path / "job")
    assert newest_checkpoint(earlier)[0] == (2, earlier / "checkpoints" / "step_2")


def test_a_job_that_is_stopped_does_not_go_on_by_another_plan(tmp_path: Path) -> None:
    pipeline = toy(tmp_path / "job")
    pipeline.goes_on = pipeline.spec
    pipeline.request_stop()
    summary = pipeline.run()
    assert (summary.state, summary.goes_on, pipeline.status().state) == ("stopped", None, "stopped")
    last = rows(tmp_path / "job" / "events.jsonl")[-1]
    assert (last["event"], last["detail"]) == ("stopped", None)


def test_a_job_plans_anew_on_the_devices_there_are_then(tmp_path: Path) -> None:
    pipeline = toy(tmp_path / "job", steps=1)
    pipeline.client.devices.return_value = {7: None}  # type: ignore[attr-defined]
    pipeline._plan = MagicMock()
    pipeline._plan.anew.return_value = None
    assert pipeline.run().state == "finished"
    assert pipeline._plan.anew.call_args.args[1] == {7: None}


@pytest.mark.parametrize("breaks_in", [("teardown",), ("step", "teardown")])
def test_a_teardown_that_fails_keeps_nothing_and_is_told(tmp_path: Path, breaks_in: tuple[str, ...]) -> None:
    pipeline = toy(tmp_path / "job")
    pipeline.breaks_in = breaks_in
    with pytest.raises(RuntimeError, match="broke in teardown"):
        pipeline.run()
    pipeline.wait_ended()
    assert pipeline.status().state == "failed"
    assert f"broke in {breaks_in[0]}" in str(pipeline.status().error)
    ends = [row["event"] for row in rows(tmp_path / "job" / "events.jsonl") if row["type"] == "job"]
    assert ends == ["started", "first_step", "failed"]
    again, _ = RunFolder.open(tmp_path / "job", wait_s=0.0)  # the lock is free
    again.close()


@pytest.mark.parametrize(("breaks_in", "kept"), [("step 3", ["step_3"]), ("training 3", [])])
def test_a_failing_job_keeps_its_last_whole_step_unless_training_had_begun(
    tmp_path: Path, breaks_in: str, kept: list[str]
) -> None:
    pipeline = toy(tmp_path / "job")
    pipeline.breaks_in = (breaks_in,)
    with pytest.raises(RuntimeError, match=f"broke in {breaks_in}"):
        pipeline.run()
    assert sorted(path.name for path in (tmp_path / "job" / "checkpoints").glob("*")) == kept


@pytest.mark.parametrize("returned", [None, 1.0, {"loss": 1.0}])
def test_a_step_that_returns_no_reward_is_told(tmp_path: Path, returned: Any) -> None:
    pipeline: Any = toy(tmp_path / "job")
    pipeline.step = lambda _: returned
    with pytest.raises(TypeError, match=r"Toy\.step returned .*; it must return metrics by name, 'reward' among them"):
        pipeline.run()
    assert not (tmp_path / "job" / "metrics.jsonl").exists()


def test_metrics_are_numbers_of_any_library(tmp_path: Path) -> None:
    pipeline: Any = toy(tmp_path / "job", steps=1)
    pipeline.step = lambda _: {"reward": np.float32(0.5), "loss": torch.tensor(2.0)}
    assert pipeline.run().state == "finished"
    (row,) = rows(tmp_path / "job" / "metrics.jsonl")
    assert (row["reward"], row["loss"]) == (0.5, 2.0)
    for number, (note, said) in enumerate((("fine", "'fine'"), (torch.ones(2), r"tensor\(\[1\., 1\.\]\)"))):
        pipeline = toy(tmp_path / f"other_{number}")
        pipeline.step = lambda _, note=note: {"reward": 0.0, "note": note}
        with pytest.raises(TypeError, match=rf"Toy\.step returned \{{'note': {said}\}} among its metrics"):
            pipeline.run()


def test_an_evaluation_that_fails_costs_its_metrics_alone(tmp_path: Path) -> None:
    pipeline = toy(tmp_path / "job", steps=2, evaluation=EvaluationSpec(every=1))
    assert pipeline.run().state == "finished"
    assert "the evaluation after 2 steps failed: no replica answers" in (tmp_path / "job" / "job.log").read_text()


def test_a_step_whose_critic_has_trained_is_not_abandoned(tmp_path: Path) -> None:
    class Stopped(InProcess):
        def train_critic(self, *args: Any) -> dict[str, float]:
            metrics = super().train_critic(*args)
            self.stop_requested.set()
            return metrics

    found = []
    for made in (InProcess, Stopped):
        pipeline = made(job("task", "on_policy", "ppo", tmp_path, steps=1), tmp_path)
        found.append(pipeline.run_steps()[0]["grad_norm"])
        assert pipeline.phases[-2:] == ["CRITIC_TRAINING", "ACTOR_TRAINING"]
    assert found[0] == found[1]
