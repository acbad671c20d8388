"""MLflow. A resumed job goes on in the run that it had."""

import time
from collections.abc import Mapping
from typing import Any

from rlix.pipeline.loggers.base import Logger, Run, remembered
from rlix.pipeline.spec.changes import flat
from rlix.pipeline.spec.logging import MlflowSpec

ID_FILE = ".mlflow_run"
_AT_ONCE = 100  # the most parameters that MLflow takes in one call
_LONGEST = 500  # characters of a parameter
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowLogger(Logger):
    name = "MLflow"

    def __init__(self, spec: MlflowSpec) -> None:
        self._spec = spec

    def open(self, run: Run) -> None:
        import mlflow

        self._client: Any = mlflow.MlflowClient(tracking_uri=self._spec.tracking_uri)
        self._entities: Any = mlflow.entities
        file = run.folder / ID_FILE
        known = remembered(file)
        self._id = self._new_run(run) if known is None else known
        file.write_text(self._id)
        if known is not None:
            self._client.update_run(known, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, status=_STATUS[state])

    def _new_run(self, run: Run) -> str:
        experiment = self._client.get_experiment_by_name(self._spec.experiment)
        if experiment is None:
            number = self._client.create_experiment(self._spec.experiment)
        else:
            number = experiment.experiment_id
        made = self._client.create_run(number, run_name=run.name, tags=dict(self._spec.tags)).info.run_id
        given = [self._entities.Param(name, str(value)[:_LONGEST]) for name, value in flat(run.spec).items()]
        for first in range(0, len(given), _AT_ONCE):
            self._client.log_batch(made, params=given[first : first + _AT_ONCE])
        return str(made)
