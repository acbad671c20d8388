"""Where metrics go besides the run folder; what goes wrong there costs nothing."""

import json
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlix.pipeline import base
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.loggers import Logger, Loggers, Run, build_loggers
from rlix.pipeline.spec import environment
from rlix.pipeline.spec.environment import environment_problems
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.logging import LoggingSpec, MlflowSpec, WandbSpec
from tests.pipeline.test_evaluation import Toy, spec_of

NAN = float("nan")


def run_of(folder: Path, first: int = 0) -> Run:
    return Run("job", folder, first, {"steps": 3, "rollout": {"max_new_tokens": 5}})


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """What TensorBoard's event files hold, in order; each record has its length, a checksum, itself and another one."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, value.tag, round(value.simple_value, 4)) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_has_every_step(tmp_path: Path) -> None:
    loggers = Loggers(build_loggers(LoggingSpec()), run_of(tmp_path))
    for step in range(3):
        loggers.log(step, {"reward": 0.5 * step, "eval/reward": NAN if step else 0.25, "no": None})  # type: ignore[dict-item]
    loggers.close("finished")
    assert scalars(tmp_path / "tensorboard") == [
        (0, "reward", 0.0),
        (0, "eval/reward", 0.25),
        (1, "reward", 0.5),
        (2, "reward", 1.0),
    ]


def test_nothing_is_opened_for_a_run_without_steps(tmp_path: Path) -> None:
    Loggers(build_loggers(LoggingSpec()), run_of(tmp_path)).close("failed")
    assert not list(tmp_path.iterdir())


class Broken(Logger):
    name = "Broken"

    def __init__(self, where: str) -> None:
        self.where, self.got = where, [0]

    def open(self, run: Run) -> None:
        self._fail("open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step < 2:
            self._fail("log")
        self.got.append(step)

    def close(self, state: str) -> None:
        self._fail("close")

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError(f"no {where}")


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_who_fails_is_named_once_and_the_others_go_on(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, fine = Broken(where), Broken("nowhere")
    loggers = Loggers([broken, fine], run_of(tmp_path))
    for step in range(4):
        loggers.log(step, {"reward": 1.0})
    loggers.close("finished")
    assert fine.got == [0, 0, 1, 2, 3]
    assert broken.got == {"open": [0], "log": [0, 2, 3], "close": [0, 0, 1, 2, 3]}[where]
    assert caplog.text.count("Broken does not take metrics (RuntimeError: no") == 1


def test_who_hangs_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()

    class Hung(Broken):
        name = "Hung"

        def open(self, run: Run) -> None:
            free.wait(300)

    loggers = Loggers([Hung("nowhere")], run_of(tmp_path), close_timeout_s=0.01)
    loggers.log(0, {})
    loggers.close("finished")
    free.set()
    assert "Hung took longer than the job waits for it" in caplog.text


# -- Weights & Biases --------------------------------------------------------------------------------------------------


def test_wandb_offline_writes_to_the_run_folder(tmp_path: Path) -> None:
    spec = WandbSpec(project="p", mode="offline", tags=("a",))
    loggers = Loggers(build_loggers(LoggingSpec(wandb=spec)), run_of(tmp_path), close_timeout_s=100)
    loggers.log(0, {"reward": 0.5})
    loggers.close("finished")
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
    assert (tmp_path / ".wandb_run").read_text() in written.name


class Recorded:
    """In place of a package: what is called, and what with."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}))
            return self._answers.get(name)

        return call


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    made = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = Recorded({"create_experiment": "7", "create_run": made})
    entities = SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given)
    module = SimpleNamespace(MlflowClient=lambda **_: client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    yield client


def test_mlflow_gets_spec_metrics_and_end_and_a_resumed_run_goes_on(mlflow: Recorded, tmp_path: Path) -> None:
    spec = LoggingSpec(mlflow=MlflowSpec(experiment="e", tags={"team": "x"}))
    for first, state in ((0, "stopped"), (1, "finished")):
        loggers = Loggers(build_loggers(spec)[1:], run_of(tmp_path, first))
        loggers.log(first, {"reward": 0.5})
        loggers.close(state)
    names = [name for name, _ in mlflow.calls]
    one = ["get_experiment_by_name", "create_experiment", "create_run", "log_batch", "log_batch", "set_terminated"]
    assert names == [*one, "update_run", "log_batch", "set_terminated"]
    given = dict(mlflow.calls[3][1])
    assert given["params"] == [("steps", "3"), ("rollout.max_new_tokens", "5")]
    assert [row[:2] + row[3:] for row in mlflow.calls[7][1]["metrics"]] == [("reward", 0.5, 1)]
    assert [kwargs["status"] for name, kwargs in mlflow.calls if name == "set_terminated"] == ["KILLED", "FINISHED"]
    assert mlflow.calls[2][1] == {"0": "7", "run_name": "job", "tags": {"team": "x"}}


# -- in a job ----------------------------------------------------------------------------------------------------------


def test_a_package_that_is_missing_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    values = load_job("copy_digits").model_dump()
    spec = JobSpec.model_validate(values | {"logging": {"wandb": {"project": "p"}, "mlflow": {"experiment": "e"}}})
    monkeypatch.setattr(environment, "find_spec", lambda _: None)
    found = {problem.field: problem.message for problem in environment_problems(spec)}
    assert "pip install 'rlix[wandb]'" in found["logging.wandb"]
    assert "pip install 'rlix[mlflow]'" in found["logging.mlflow"]


def test_a_job_logs_every_row_that_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "JobClient", MagicMock())
    Toy("ft_1", JobConfig(spec_of(), tmp_path / "job")).run()
    lines = (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()
    rewards = [(row["step"], "reward", row["reward"]) for row in map(json.loads, lines)]
    assert [row for row in scalars(tmp_path / "job" / "tensorboard") if row[1] == "reward"] == rewards
