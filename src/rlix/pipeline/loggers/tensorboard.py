"""TensorBoard's event files, in `tensorboard/` of the run folder."""

from collections.abc import Mapping
from typing import Any

from rlix.pipeline.loggers.base import Logger, Run

_FLUSH_S = 10


class TensorBoardLogger(Logger):
    name = "TensorBoard"

    def open(self, run: Run) -> None:
        from tensorboardX import SummaryWriter

        # What an earlier session wrote of steps that are done again is not shown any more.
        again = run.first if run.first else None
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=again, flush_secs=_FLUSH_S)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, state: str) -> None:
        self._writer.close()
