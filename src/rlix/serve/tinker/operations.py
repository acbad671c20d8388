"""What each operation of a model is: what it does on the engine, and what is answered."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlix.pipeline.requests.losses import RequestedLoss
from rlix.pipeline.requests.module import AdamStep
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.answers import PROTOBUF, answer
from rlix.serve.tinker.batches import Limits, batch_of, rows_of
from rlix.serve.tinker.given import section
from rlix.serve.tinker.records import Model, Operation
from rlix.serve.tinker.store import KINDS, Store
from rlix.serve.tinker.wire import pass_answer, read_pass

PASS, FORWARD, STEP = "forward_backward", "forward", "optim_step"
SAVE, SAVE_SAMPLER, SAVE_EXTERNAL, LOAD = (
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
)
_HIGHEST = 1e300
_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Trained(Protocol):
    """What operations need of the engine behind a base model."""

    @property
    def ranks(self) -> int: ...
    def run_pass(self, name: str, batch: Any, loss: RequestedLoss, *, backward: bool) -> tuple[Tensor, float]: ...
    def take_step(self, name: str, adam: AdamStep) -> dict[str, float]: ...
    def save_training(self, name: str, folder: Path, *, optimizer: bool) -> None: ...


def needs_devices(operation: Operation) -> bool:
    """Whether it can only be done with the engine on its devices: what is saved is read where it waits."""
    return operation.kind in (PASS, FORWARD, STEP)


class Work:
    """Does operations, each for one model.

    Args:
        state_folder: where a model's state after an operation is kept.
    """

    def __init__(self, engine: Trained, limits: Limits, store: Store, state_folder: Callable[[str, int], Path]) -> None:
        self._engine, self._limits, self._store, self._state_folder = engine, limits, store, state_folder
        self._gradients: set[str] = set()  # models that have some

    def begin(self, model: str) -> None:
        """The model is as it was saved."""
        self._gradients.discard(model)

    def do(self, model: Model, operation: Operation) -> tuple[str, bytes]:
        """Media type and body of the answer. Raises SpecError: it cannot be done, and nothing was changed."""
        if operation.kind in (PASS, FORWARD):
            return self._pass(model, operation)
        given = json.loads(operation.body)
        if operation.kind == STEP:
            return self._step(model, given)
        if operation.kind == LOAD:
            source = self._store.readable(model.owner, given.get("path"), model)
            folder = self._state_folder(model.id, operation.seq)
            self._store.copy(source, folder, optimizer=bool(given.get("optimizer")))
            return answer(type=LOAD, path=given["path"], model_id=model.id)
        goes_on = KINDS[operation.kind][1] == "training"
        write = partial(self._engine.save_training, model.id, optimizer=goes_on)
        return self._store.save(model, operation.kind, given, write)

    def do_again(self, model: Model, operation: Operation) -> None:
        """What an operation changed, changed again."""
        if operation.kind in (PASS, STEP):
            self.do(model, operation)

    def _pass(self, model: Model, operation: Operation) -> tuple[str, bytes]:
        asked = read_pass(operation.body)
        loss, limits = RequestedLoss.named(asked.loss, asked.options), self._limits
        batch = batch_of(asked.data, loss, limits, self._engine.ranks)
        log_probs, total = self._engine.run_pass(model.id, batch, loss, backward=not asked.forward_only)
        if not asked.forward_only:
            self._gradients.add(model.id)
        return PROTOBUF, pass_answer(rows_of(log_probs, asked.data), {"loss:sum": total})

    def _step(self, model: Model, given: dict[str, Any]) -> tuple[str, bytes]:
        adam = adam_step(given)
        if model.id not in self._gradients:
            raise SpecError("optim_step: there are no gradients; call forward_backward before it")
        metrics = self._engine.take_step(model.id, adam)
        self._gradients.discard(model.id)
        return answer(type=STEP, metrics=metrics)


def adam_step(given: dict[str, Any]) -> AdamStep:
    """Raises SpecError: another optimizer, or a number that makes no sense."""
    params = section(given, "adam_params") or section(given, "optim_params")
    if not params and given.get("adam_params") is None and given.get("optim_params") is None:
        kind = section(given, "optimizer_params").get("type", "none")
        raise SpecError(f"optim_step: the optimizer here is AdamW (tinker.AdamParams), not {kind!r}")
    numbers = {name: params.get(name, default) for name, default in _ADAM.items()}
    for name, value in numbers.items():
        high = 1.0 if name.startswith("beta") else _HIGHEST
        if not isinstance(value, int | float) or not 0 <= value < high:
            raise SpecError(f"optim_step: {name} is {value!r}; it must be a number from 0, and below {high}")
    clip = numbers.pop("grad_clip_norm")
    return AdamStep(**{name: float(value) for name, value in numbers.items()}, max_grad_norm=float(clip))
