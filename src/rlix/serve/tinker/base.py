"""A base model that is offered: the jobs behind it, and what clients ask of them."""

import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlix.pipeline.requests.adapters import ServedAdapters
from rlix.pipeline.requests.served import ServedModel, served_job
from rlix.pipeline.requests.whole import ServedWhole
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.live import Live, Means
from rlix.serve.tinker.records import Model, Operation, Sampler
from rlix.serve.tinker.settings import FULL, OfferedModel

_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model before anything is built: its context, and its linear layers by kind."""

    context: int
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    architecture: str


class Base(Protocol):
    """By its name clients ask for models."""

    name: str
    offered: OfferedModel
    shape: Shape

    @property
    def whole(self) -> bool:
        """Whether every weight is trained."""
        ...

    def start(self) -> None: ...
    def close(self) -> None: ...

    def admit(self, models: int) -> None:
        """Raise SpecError if no more than these can be trained at a time."""

    def train(self, model: str) -> None:
        """There is something to do for a model, or soon will be."""

    def leave(self, model: str) -> None:
        """Nothing can be asked of a model any more."""

    def sample(self, operation: Operation) -> None: ...

    def state_folder(self, model: str, seq: int) -> Path:
        """Where the state of a model after an operation is kept."""
        ...

    def why(self, target: str) -> str:
        """Why something that was asked of a model or a sampler has no result yet."""
        ...


class SharedBase:
    """One job, with adapters of all clients."""

    whole = False

    def __init__(self, name: str, offered: OfferedModel, shape: Shape, means: Means) -> None:
        self.name, self.offered, self.shape, self._means = name, offered, shape, means
        options = {"adapters": offered.adapters + 1, "rank": offered.max_rank}
        job = _job(offered, ServedAdapters, f"tinker-{name}", name, options=options)
        self._live = Live(
            job, means, trains=self._is_own, samples=lambda sampler: sampler.base == name, adapters=offered.adapters
        )

    def _is_own(self, model: Model) -> bool:
        return model.base == self.name

    def start(self) -> None:
        self._live.start()

    def close(self) -> None:
        self._live.close()

    @property
    def live(self) -> Live:
        return self._live

    def admit(self, models: int) -> None:
        """There is always room for one more."""

    def train(self, model: str) -> None:
        self._live.train(model)

    def leave(self, model: str) -> None:
        self._live.leave(model)

    def sample(self, operation: Operation) -> None:
        self._live.sample(operation)

    def state_folder(self, model: str, seq: int) -> Path:
        return self._means.state_folder(model, seq)

    def why(self, target: str) -> str:
        return self._live.why(target)


class WholeBase:
    """A job for each model that is trained, from when it is made to when it leaves, and one for all samplers."""

    whole = True

    def __init__(self, name: str, offered: OfferedModel, shape: Shape, means: Means) -> None:
        self.name, self.offered, self.shape, self._means = f"{name}{FULL}", offered, shape, means
        self._path = offered.path or name
        self._trained: dict[str, Live] = {}
        self._ending: list[Live] = []
        self._sampled: Live | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Go on with what was asked before."""
        journal = self._means.journal
        waiting = journal.waiting()
        for model in journal.models():
            if model.base == self.name and model.unloaded:
                shutil.rmtree(self.state_folder(model.id, 0).parent, ignore_errors=True)
            elif model.base == self.name and model.id in waiting:
                self.train(model.id)
        if any(sampler.base == self.name and sampler.id in waiting for sampler in journal.samplers()):
            self._sampler()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            live = [*self._trained.values(), *self._ending, *filter(None, [self._sampled])]
        for each in live:
            each.request_stop()
        for each in live:
            each.close()

    def admit(self, models: int) -> None:
        if models >= self.offered.full:
            raise SpecError(
                f"{models} models of {self.name} are trained, and no more can be at a time (`full` of the server's "
                "settings): ask again when one of them is unloaded or its session has ended, or train an adapter"
            )

    def train(self, model: str) -> None:
        with self._lock:
            found = self._means.journal.model(model)
            if self._closed or found is None or found.unloaded:
                return
            live = self._trained.get(model)
            if live is None:
                job = _job(self.offered, ServedWhole, f"tinker-{self.name}", self._path, model, samples=False)
                live = Live(job, self._means, trains=lambda other: other.id == model, samples=_none)
                self._trained[model] = live
                live.start()
        live.train(model)

    def leave(self, model: str) -> None:
        kept = self.state_folder(model, 0).parent
        with self._lock:
            self._ending = [each for each in self._ending if not each.has_ended]
            live = self._trained.pop(model, None)
            if live is not None:
                live.forget(kept)
                self._ending.append(live)
                return
        shutil.rmtree(kept, ignore_errors=True)

    def sample(self, operation: Operation) -> None:
        if (live := self._sampler()) is not None:
            live.sample(operation)

    def _sampler(self) -> Live | None:
        with self._lock:
            if self._sampled is None and not self._closed:
                job = _job(self.offered, ServedWhole, f"tinker-{self.name}", self._path)
                self._sampled = Live(
                    job, self._means, trains=_none, samples=self._is_own, adapters=self.offered.adapters
                )
                self._sampled.start()
            return self._sampled

    def _is_own(self, sampler: Sampler) -> bool:
        return sampler.base == self.name

    def state_folder(self, model: str, seq: int) -> Path:
        return self._means.state_folder(model, seq)

    def why(self, target: str) -> str:
        live = self._sampled if self._means.journal.model(target) is None else self._trained.get(target)
        return "its job is about to start" if live is None else live.why(target)


def bases_of(name: str, offered: OfferedModel, shape: Shape, means: Means) -> Iterator[Base]:
    """All that a model is offered as."""
    yield SharedBase(name, offered, shape, means)
    if offered.full:
        yield WholeBase(name, offered, shape, means)


def _none(_: object) -> bool:
    return False


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _job(
    offered: OfferedModel,
    pipeline: type[ServedModel],
    name: str,
    path: str,
    model: str = "",
    *,
    samples: bool = True,
    options: Mapping[str, Any] | None = None,
) -> JobSpec:
    """`model`: whose job it is, if it is one model's."""
    tail = _file_name(f"-{model}" if model else "")
    rollout = {
        "executor": offered.executor,
        "executor_options": dict(offered.executor_options),
        "max_num_seqs": offered.max_num_seqs,
    }
    return served_job(
        _file_name(name)[: _LONGEST_NAME - len(tail)] + tail,
        pipeline,
        model={"path": offered.path or path, "dtype": offered.dtype},
        rollout=rollout if samples else None,
        clusters={"actor_train": {"gpus": offered.gpus}, "actor_infer": {"tensor_parallel": offered.tensor_parallel}},
        options=options or {},
        training={"micro_batch_tokens": offered.micro_batch_tokens, "executor": offered.training_executor},
        seed=offered.seed,
    )


def shape_of(folder: Path) -> Shape:
    """Of a local model folder."""
    from torch import nn
    from transformers import AutoConfig

    from rlix.engine.lora import linear_layers
    from rlix.pipeline.training.policy import policy_on_meta

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
