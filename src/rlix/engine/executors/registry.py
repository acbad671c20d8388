"""Which backends there are, and what has to be known of one before its module can be imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.messages import DeviceKind


@dataclass(frozen=True, slots=True)
class Backend:
    """What has to be known of a backend beside its class.

    Attributes:
        target: the class, or its "module:Class" where this process must not import it.
        start: how its replicas start; "spawn" when the class must be the first to import something.
        prefix_cache: whether it keeps what it computed of a prompt's beginning, so that it pays to ask a replica again.
        spans: whether a replica may be on several nodes, with as many devices on each: `Site.further` says which.
        environment: variables that a replica's process needs before it imports anything, from the devices' kind, the
            threads of a virtual GPU, and whether the model is on this machine's disk. Raises RlixError when the
            backend is not installed.
    """

    target: str | type[Any]
    start: Literal["fork", "spawn"] = "fork"
    prefix_cache: bool = False
    spans: bool = False
    environment: Callable[[DeviceKind, int, bool], Mapping[str, str]] = lambda *_: {}

    def load(self) -> Any:
        """The class. Raises SpecError when there is none."""
        if isinstance(self.target, type):
            return self.target
        module, _, name = self.target.partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SpecError(f"executor {self.target!r}: {error}; it must be module:Class, importable here") from None


def register(name: str, backend: Backend) -> None:
    """Make a backend known as `InferenceEngine(..., executor=name)` in this program."""
    if ":" in name:
        raise ValueError(f"executor name {name!r}: without a colon, which is for module:Class")
    _BACKENDS[name] = backend


def backend(executor: str | type[Any] | Backend) -> Backend:
    """By its name, its class or that one's "module:Class", which is imported.

    Raises SpecError for what is no `InferenceExecutor`.
    """
    if isinstance(executor, Backend):
        return executor
    if isinstance(executor, str) and executor in _BACKENDS:
        return _BACKENDS[executor]
    if isinstance(executor, str) and ":" not in executor:
        known = ", ".join(_BACKENDS)
        raise SpecError(f"unknown executor {executor!r} for InferenceEngine; known: {known}, or module:Class")
    from rlix.engine.executors.base import InferenceExecutor

    made = Backend(executor)
    found = made.load()
    if not (isinstance(found, type) and issubclass(found, InferenceExecutor)):
        raise SpecError(f"executor {executor!r} is no {InferenceExecutor.__module__}.InferenceExecutor")
    return made


def _vllm_environment(kind: DeviceKind, cpu_threads: int, local: bool) -> Mapping[str, str]:
    if find_spec("vllm") is None:
        raise RlixError('executor="vllm" needs vLLM, which is not installed: pip install rlix[vllm]')
    environment = {"HF_HUB_OFFLINE": "1"} if local else {}
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's own, not the user's
        # The engine runs inside the replica: one process less to start, and none to outlive a replica that is killed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # tensor-parallel workers
    }
    if kind is DeviceKind.CPU:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # virtual GPUs share the cores
            "OMP_NUM_THREADS": str(cpu_threads),
            "TORCHDYNAMO_DISABLE": "1",  # compiling costs seconds at the first request and gains nothing here
        }
    return environment


_BACKENDS = {
    "transformers": Backend("rlix.engine.executors.transformers:TransformersExecutor"),
    "vllm": Backend(
        "rlix.engine.executors.vllm:VllmExecutor",
        start="spawn",
        prefix_cache=True,
        spans=True,
        environment=_vllm_environment,
    ),
}
