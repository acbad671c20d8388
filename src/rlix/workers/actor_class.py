"""The class that Ray instantiates for a worker."""

from collections.abc import Mapping
from inspect import Parameter, Signature, iscoroutinefunction, isgeneratorfunction
from types import FunctionType
from typing import Any

import ray

from rlix.node.process import this_process
from rlix.protocol.messages import Process
from rlix.workers.once import Answers, once
from rlix.workers.worker import Worker, WorkerContext, prepare_process


def actor_class(worker_cls: type[Worker]) -> type[Worker]:
    """The class Ray instantiates: bare at first, so that the context is there before the worker's own `__init__`."""

    def bare(self: Any, context: WorkerContext) -> None:
        prepare_process(context)
        self.ctx = context
        self._rlix_constructed = False
        self._rlix_answers = Answers()

    def construct(self: Any, kwargs: Mapping[str, Any]) -> Process:
        worker_cls.__init__(self, **kwargs)
        self._rlix_constructed = True
        return this_process(ray.get_runtime_context().get_node_id())

    def close(self: Any) -> None:
        if self._rlix_constructed:  # a group may close while a rank of it is being started again
            worker_cls.close(self)

    members: dict[str, Any] = {name: getattr(worker_cls, name) for name in dir(worker_cls) if not name.startswith("__")}
    members |= {"__init__": bare, "_rlix_construct": construct, "close": close}
    members = {name: _without_types(m) for name, m in members.items() if isinstance(m, FunctionType)}
    members |= {name: once(m) for name, m in members.items() if may_be_made_again(worker_cls, name)}
    members["__module__"] = worker_cls.__module__
    return type(worker_cls.__name__, (worker_cls,), members)


def may_be_made_again(worker_cls: type[Worker], method: str) -> bool:
    """Whether a call of this method can be told from another one: that of a plain function's can."""
    found = getattr(worker_cls, method, None)
    return method != "__init__" and not (iscoroutinefunction(found) or isgeneratorfunction(found))


def _without_types(method: FunctionType) -> FunctionType:
    """A copy whose signature names no type and no default.

    Ray sends the signatures of an actor's methods with every handle, and whoever receives one imports what they name:
    the control plane, which is given handles so that it can kill, would import torch.
    """
    copy = FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    copy.__dict__.update(method.__dict__)
    kinds = {"self": Parameter.POSITIONAL_OR_KEYWORD, "args": Parameter.VAR_POSITIONAL, "kwargs": Parameter.VAR_KEYWORD}
    copy.__signature__ = Signature([Parameter(name, kind) for name, kind in kinds.items()])  # type: ignore[attr-defined]
    return copy
