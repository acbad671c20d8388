"""A job of the pool that serves clients, whatever becomes of it."""

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError

from rlix.node.run_folder import moved_aside
from rlix.pipeline.requests.served import ServedModel
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import RlixError
from rlix.serve.tinker.batches import Limits
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.operations import Work
from rlix.serve.tinker.records import Model, Operation, Sampler
from rlix.serve.tinker.sampling import Samples
from rlix.serve.tinker.settings import Teams
from rlix.serve.tinker.store import Store
from rlix.serve.tinker.training import Trainer

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_AGAIN_S = 5.0
_STOP_S = 60.0
_RUNS_KEPT = 3
"""Of a job, how many of its earlier run folders; the newest."""

Start = Callable[[JobSpec, Path], ServedModel]


@dataclass(frozen=True, slots=True)
class Means:
    """What all that a server offers is done with.

    Attributes:
        start: begins a job, in a run folder, in the background.
        finished: told the id of an operation that has a result.
        state_every: optimizer steps between two kept states of a model.
    """

    journal: Journal
    store: Store
    folder: Path
    start: Start
    finished: Callable[[str], None]
    state_every: int
    teams: Teams

    def state_folder(self, model: str, seq: int) -> Path:
        """Where the state of a model after an operation is kept."""
        return self.folder / "states" / model.replace(":", "_") / f"step_{seq}"


class Live:
    """Has a job built in the background, and again whenever it ends before it is closed.

    Args:
        trains: whether a model is trained on it. samples: whether a sampler's weights are sampled on it.
        adapters: most weights that its replicas are offered at a time.
    """

    def __init__(
        self,
        job: JobSpec,
        means: Means,
        *,
        trains: Callable[[Model], bool],
        samples: Callable[[Sampler], bool],
        adapters: int = 1,
    ) -> None:
        self._job, self._means, self._trains, self._samples_of = job, means, trains, samples
        self._adapters = adapters
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._trainer: Trainer | None = None
        self._samples: Samples | None = None
        self._why = "the model is being loaded"
        self._thread = threading.Thread(target=self._live, name=job.name, daemon=True)
        self._kept: Path | None = None

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """End, without waiting for it."""
        self._closing.set()

    def forget(self, kept: Path) -> None:
        """The same, and nothing stays of its runs, nor of what is `kept`: nobody goes on from them."""
        self._kept = kept
        self._closing.set()

    def close(self) -> None:
        """End, and wait for it."""
        self._closing.set()
        self._thread.join(_STOP_S)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def ready(self) -> bool:
        return self._trainer is not None

    def train(self, model: str) -> None:
        """There is something to do for a model."""
        if (trainer := self._trainer) is not None:
            trainer.asked(model)

    def leave(self, model: str) -> None:
        """Nothing can be asked of a model any more."""
        if (trainer := self._trainer) is not None:
            trainer.leave(model)

    def sample(self, operation: Operation) -> None:
        with self._lock:
            if self._samples is not None:  # else it is in the journal, and found there when there are some
                self._samples.start(operation)

    def why(self, target: str) -> str:
        """Why something that was asked of a model or a sampler has no result yet."""
        trainer = self._trainer
        if trainer is None:
            return self._why
        return trainer.why(target) if self._means.journal.model(target) is not None else "is generated"

    # ---- its life --------------------------------------------------------------------------------------------

    def _live(self) -> None:
        folder = self._means.folder / "runs" / self._job.name
        while not self._closing.is_set():
            for old in moved_aside(folder)[_RUNS_KEPT:]:
                shutil.rmtree(old, ignore_errors=True)
            try:
                self._serve(folder)
            except (RlixError, RayError, OSError) as error:
                self._why = f"the model could not be loaded, and will be tried again: {error}"
                if not self._closing.is_set():
                    logger.warning("%s: %s", self._job.name, self._why)
            self._closing.wait(_AGAIN_S)
        if self._kept is not None:
            for left in (self._kept, folder, *moved_aside(folder)):
                shutil.rmtree(left, ignore_errors=True)

    def _serve(self, folder: Path) -> None:
        pipeline = self._means.start(self._job, folder)
        try:
            while not pipeline.ready.wait(_LOOK_S):
                if self._closing.is_set() or pipeline.has_ended:
                    raise RlixError(pipeline.status().error or "it ended while it was being loaded")
                self._why = f"the model is being loaded: {pipeline.status().phase}"
            trainer = self._open(pipeline)
            while not (self._closing.wait(_LOOK_S) or pipeline.has_ended or trainer.has_ended):
                pass
        finally:
            self._shut(pipeline)

    def _open(self, pipeline: ServedModel) -> Trainer:
        means, journal = self._means, self._means.journal
        limits = Limits(pipeline.vocabulary, pipeline.context, pipeline.pad_id)
        trainer = Trainer(
            *(self._job.name, self._trains, journal, pipeline),
            *(Work(pipeline, limits, means.store, means.state_folder), means.state_folder, means.teams),
            state_every=means.state_every,
            finished=means.finished,
        )
        samples = Samples(
            *(journal, pipeline, limits),
            with_devices=trainer.with_devices,
            finished=means.finished,
            most=self._adapters,
        )
        with self._lock:
            self._trainer, self._samples = trainer, samples
            trainer.start()  # after it is known: what was asked before is in the journal, and it is told of the rest
            waiting = journal.waiting()
            own = [each.id for each in journal.samplers() if self._samples_of(each) and each.id in waiting]
            for operation in (operation for sampler in own for operation in journal.queued(sampler)):
                samples.start(operation)
        return trainer

    def _shut(self, pipeline: ServedModel) -> None:
        with self._lock:
            trainer, samples, self._trainer, self._samples = self._trainer, self._samples, None, None
        if samples is not None:
            samples.close()
        if trainer is not None:
            trainer.stop()
        pipeline.request_stop()  # also of the wait for devices
        if trainer is not None:
            trainer.join()
        pipeline.wait_ended()
        self._why = "the model's job has ended and is started anew"
