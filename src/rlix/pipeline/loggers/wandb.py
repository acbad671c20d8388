"""Weights & Biases. A resumed job goes on in the run that it had."""

from collections.abc import Mapping
from typing import Any

from rlix.pipeline.loggers.base import Logger, Run, remembered
from rlix.pipeline.spec.logging import WandbSpec

ID_FILE = ".wandb_run"


class WandbLogger(Logger):
    name = "Weights & Biases"

    def __init__(self, spec: WandbSpec) -> None:
        self._spec = spec

    def open(self, run: Run) -> None:
        import wandb

        file = run.folder / ID_FILE
        known = remembered(file)
        self._run: Any = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            group=self._spec.group,
            tags=list(self._spec.tags) or None,
            mode=self._spec.mode,
            name=run.name,
            config=dict(run.spec),
            dir=str(run.folder),
            id=known,
            resume=None if known is None else "allow",
            # What the job prints has its own way; runs of one process do not end each other.
            settings=wandb.Settings(console="off", silent=True, reinit="create_new"),
        )
        file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
