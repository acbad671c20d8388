"""A base model that is offered: the job behind it, whatever becomes of that, and what clients ask of it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from rlix.pipeline.requests.served import ServedAdapters, served_job
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import RlixError
from rlix.serve.tinker.batches import Limits
from rlix.serve.tinker.journal import Journal, Operation
from rlix.serve.tinker.operations import Work
from rlix.serve.tinker.sampling import Samples
from rlix.serve.tinker.settings import OfferedModel
from rlix.serve.tinker.store import Store
from rlix.serve.tinker.training import Trainer, state_folder

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_AGAIN_S = 5.0
_STOP_S = 60.0

Start = Callable[[JobSpec, Path], ServedAdapters]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model before anything is built: its context, and its linear layers by kind."""

    context: int
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    architecture: str


class Base:
    """Builds the model's job in the background, and again whenever it ends before the server does.

    Args:
        shape: of the model. start: begins its job, in a run folder, in the background. finished: told the id of an
            operation that has a result.
    """

    def __init__(
        self,
        name: str,
        offered: OfferedModel,
        shape: Shape,
        *,
        journal: Journal,
        store: Store,
        folder: Path,
        start: Start,
        finished: Callable[[str], None],
        state_every: int,
    ) -> None:
        self.name, self.offered, self.shape = name, offered, shape
        self._journal, self._store, self._folder = journal, store, folder
        self._begin, self._finished, self._state_every = start, finished, state_every
        self._states = folder / "states"
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._trainer: Trainer | None = None
        self._samples: Samples | None = None
        self._why = "the model is being loaded"
        self._thread = threading.Thread(target=self._live, name=f"base-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_STOP_S)

    @property
    def ready(self) -> bool:
        return self._trainer is not None

    def train(self, model: str) -> None:
        """There is something to do for a model."""
        if (trainer := self._trainer) is not None:
            trainer.asked(model)

    def leave(self, model: str) -> None:
        if (trainer := self._trainer) is not None:
            trainer.leave(model)

    def sample(self, operation: Operation) -> None:
        with self._lock:
            if self._samples is not None:  # else it is in the journal, and found there when there are some
                self._samples.start(operation)

    def state_folder(self, model: str, seq: int) -> Path:
        """Where the state of a model after an operation is kept."""
        return state_folder(self._states, model, seq)

    def why(self, target: str) -> str:
        """Why something that was asked of a model or a sampler has no result yet."""
        trainer = self._trainer
        if trainer is None:
            return self._why
        return trainer.why(target) if self._journal.model(target) is not None else "is generated"

    # ---- its life --------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._closing.is_set():
            try:
                self._serve()
            except (RlixError, RayError, OSError) as error:
                self._why = f"the model could not be loaded, and will be tried again: {error}"
                logger.warning("%s: %s", self.name, self._why)
            self._closing.wait(_AGAIN_S)

    def _serve(self) -> None:
        pipeline = self._begin(self._job(), self._folder / "runs" / _file_name(self.name))
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

    def _open(self, pipeline: ServedAdapters) -> Trainer:
        limits = Limits(pipeline.vocabulary, pipeline.context, pipeline.pad_id)
        work = Work(pipeline, limits, self._store, self.state_folder)
        trainer = Trainer(
            *(self.name, self._journal, pipeline, work, self._states),
            state_every=self._state_every,
            finished=self._finished,
        )
        samples = Samples(
            *(self._journal, pipeline, limits),
            with_devices=trainer.with_devices,
            finished=self._finished,
            most=self.offered.adapters,
        )
        trainer.start()
        with self._lock:
            self._trainer, self._samples = trainer, samples
            own = {sampler.id for sampler in self._journal.samplers() if sampler.base == self.name}
            for operation in self._journal.queued():
                if operation.target in own:
                    samples.start(operation)
        return trainer

    def _shut(self, pipeline: ServedAdapters) -> None:
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

    def _job(self) -> JobSpec:
        offered = self.offered
        return served_job(
            f"tinker-{_file_name(self.name)}"[:60],
            {"path": offered.path or self.name, "dtype": offered.dtype},
            {
                "executor": offered.executor,
                "executor_options": dict(offered.executor_options),
                "max_num_seqs": offered.max_num_seqs,
            },
            {"actor_train": {"gpus": offered.gpus}, "actor_infer": {"tensor_parallel": offered.tensor_parallel}},
            {"adapters": offered.adapters + 1, "rank": offered.max_rank},
            offered.micro_batch_tokens,
            offered.seed,
        )


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def shape_of(folder: Path) -> Shape:
    """Of a local model folder."""
    from torch import nn
    from transformers import AutoConfig

    from rlix.engine.lora import linear_layers
    from rlix.pipeline.policy import policy_on_meta

    module: Any = policy_on_meta(folder)
    linear = linear_layers(module)
    paths = {path.split(".")[-1]: path for path, part in module.named_modules() if isinstance(part, nn.Linear)}
    attention = {name for name in linear if "attn" in paths[name] or "attention" in paths[name]}
    config = AutoConfig.from_pretrained(folder)
    return Shape(
        context=int(config.get_text_config().max_position_embeddings),
        attention=tuple(sorted(attention)),
        mlp=tuple(sorted(linear - attention)),
        architecture=str(config.model_type),
    )
