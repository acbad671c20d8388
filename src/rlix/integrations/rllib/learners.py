"""The bytes of an algorithm's learners, in this process or in Ray actors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
import torch

from rlix.engine.guarded import GuardedSet, Named, named_tensors
from rlix.integrations.rllib.learner_thread import ThreadGate
from rlix.node.process import this_process
from rlix.protocol.messages import Process

_GUARDED, _GATE = "_rlix", "_rlix_gate"


class LearnerSet:
    """Parameters, gradients, buffers and optimizer state of every learner of a group; they begin on the device."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._on_device = True

    @property
    def on_device(self) -> bool:
        return self._on_device

    def to_host(self) -> None:
        """Raises what a learner raised."""
        if self._on_device:
            self._each(_to_host)
            self._on_device = False

    def to_device(self) -> None:
        """Raises what a learner raised."""
        if not self._on_device:
            self._each(_to_device)
            self._on_device = True

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        raise NotImplementedError("learners are saved under a lease")

    def processes(self) -> dict[int, Process]:
        """Who keeps the bytes, by rank."""
        return dict(enumerate(self._each(_process)))

    def device_bytes(self) -> int:
        return sum(self._each(_device_bytes))

    def _each(self, call: Any) -> list[Any]:
        if not self._group.is_remote:
            return [call(self._group._learner)]
        return [result.get() for result in self._group.foreach_learner(call).result_or_errors]


def _guarded(learner: Any) -> GuardedSet:
    if not hasattr(learner, _GUARDED):
        device = torch.device(getattr(learner, "_device", "cpu"))
        setattr(learner, _GUARDED, GuardedSet("an RLlib learner", lambda: _named(learner), device))
    found: GuardedSet = getattr(learner, _GUARDED)
    return found


def _gate(learner: Any) -> ThreadGate | None:
    """Of learners that have a thread."""
    if not hasattr(learner, _GATE) and hasattr(learner, "_learner_thread"):
        setattr(learner, _GATE, ThreadGate(learner))
    found: ThreadGate | None = getattr(learner, _GATE, None)
    return found


def _named(learner: Any) -> Named:
    modules = []
    for module in learner.module._rl_modules.values():
        net = module.unwrapped() if hasattr(module, "unwrapped") else module
        if isinstance(net, torch.nn.Module):
            modules.append(net)
    return named_tensors(*modules, *learner._named_optimizers.values())


def _to_host(learner: Any, **_: Any) -> None:
    if gate := _gate(learner):
        gate.close()
    _guarded(learner).to_host()


def _to_device(learner: Any, **_: Any) -> None:
    _guarded(learner).to_device()
    if gate := _gate(learner):
        gate.open()


def _device_bytes(learner: Any, **_: Any) -> int:
    return _guarded(learner).device_bytes


def _process(learner: Any, **_: Any) -> Process:
    return this_process(ray.get_runtime_context().get_node_id(), "an RLlib learner")
