"""What RLix relies on in vLLM beyond what is documented: checked when a replica starts, not found out by an answer."""

import inspect
from collections.abc import Mapping
from typing import Any

from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import interface as platform
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2  # which CUDA takes
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from rlix.engine.executors import vllm_options
from rlix.protocol.errors import RlixError

KNOWN_VERSION = "0.32"

_CALLS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (LLMEngine, "from_engine_args", ()),
    (LLMEngine, "add_request", ("lora_request",)),
    (LLMEngine, "step", ()),
    (LLMEngine, "abort_request", ("internal",)),
    (LLMEngine, "reset_prefix_cache", ("reset_running_requests",)),
    (LLMEngine, "collective_rpc", ("args",)),
    (LLMEngine, "sleep", ("level",)),
    (LLMEngine, "wake_up", ("tags",)),
    (LLMEngine, "is_sleeping", ()),
    (Worker, "reload_weights", ()),
    *(
        (runner, "reload_weights", ("weights_iterator", "weights_path"))
        for runner in (GPUModelRunner, GPUModelRunnerV2)
    ),
    *((runner, "get_model", ()) for runner in (GPUModelRunner, GPUModelRunnerV2)),
    (LoRAModel, "from_lora_tensors", ("device", "dtype", "model_vocab_size")),
    (PEFTHelper, "from_dict", ()),
    (PEFTHelper, "validate_legal", ()),
    (LoRAModelManager, "add_adapter", ()),
    (LoRAModelManager, "remove_adapter", ()),
    (LoRAModelManager, "activate_adapter", ()),
    (LoRAModelManager, "create_dummy_lora", ("lora_id", "rank")),
    (layerwise, "finalize_layerwise_reload", ()),
    (EngineArgs, "create_engine_config", ("usage_context", "headless")),
    (MultiprocExecutor, "register_failure_callback", ()),
    (platform, "set_assigned_physical_gpu_ids", ()),
)
_OF_RUNNERS = ("kv_caches", "lora_manager", "model_config", "vllm_config")
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (LLMEngine, "engine_core"),
    (LLMEngine, "output_processor"),
    (OutputProcessor, "request_states"),
    (RequestState, "detokenizer"),
    (RequestState, "logprobs_processor"),
    (IncrementalDetokenizer, "output_token_ids"),
    (LogprobsProcessor, "logprobs"),
    *((runner, name) for runner in (GPUModelRunner, GPUModelRunnerV2) for name in _OF_RUNNERS),
    (Worker, "model_runner"),
    (Worker, "vllm_config"),
    (MultiprocExecutor, "shutting_down"),
    (ParallelConfig, "master_addr"),
    (ParallelConfig, "master_port"),
    (ParallelConfig, "nnodes"),
    (ParallelConfig, "node_rank"),
)


def check() -> None:
    """Raises RlixError naming everything that this vLLM lacks."""
    lacking = [
        f"{_called(owner)}.{name}({', '.join(parameters)})"
        for owner, name, parameters in _CALLS
        if not _takes(getattr(owner, name, None), parameters)
    ]
    lacking += [f"{_called(owner)}.{name}" for owner, name in _ATTRIBUTES if not _mentions(owner, name)]
    if lacking:
        raise RlixError(
            f"vLLM {vllm_options.installed()} does not have what RLix relies on: {'; '.join(lacking)}. Install "
            f'{KNOWN_VERSION}, with which RLix was tested, or use executor="transformers"'
        )


def check_options(more: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that vLLM does not know, or that is not the user's to set."""
    for name in more:
        if name in vllm_options.OURS:
            raise ValueError(f"executor_options: {name!r} is an argument of build(), or set by RLix")
    for name, problem in vllm_options.unknown(more).items():
        raise ValueError(f"executor_options: {name!r}: {problem}")


def _called(owner: Any) -> str:
    """The two model runners have the same name."""
    return "GPUModelRunner (V2)" if owner is GPUModelRunnerV2 else str(owner.__name__)


def _takes(function: Any, parameters: tuple[str, ...]) -> bool:
    return callable(function) and set(parameters) <= set(inspect.signature(function).parameters)


def _mentions(owner: Any, name: str) -> bool:
    """Whether instances have such an attribute: of the class, or set by its methods."""
    classes = owner.__mro__[:-1]
    return hasattr(owner, name) or any(
        name in getattr(cls, "__annotations__", {}) or f"self.{name}" in inspect.getsource(cls) for cls in classes
    )
