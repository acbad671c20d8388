"""What vLLM is started with: `EngineArgs` from a replica's options. Imports nothing of vLLM."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from rlix.engine.executors.base import DEFAULT_SHARE, ExecutorOptions, Site
from rlix.engine.model_source import ModelSource
from rlix.node.devices import gpu_memory
from rlix.protocol.messages import DeviceKind

WORKER = "rlix.engine.executors.vllm_worker.ReplicaWorker"

_MIN_VIRTUAL_KV_BYTES = 64 * 2**20
_VIRTUAL_KV_SEQUENCES = 8  # of the greatest length; the default size of a virtual GPU's KV cache
_FLOAT32_BYTES = 4
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def engine_arguments(
    options: ExecutorOptions, config: Any, site: Site, path: str, *, dummy: bool, max_length: int
) -> dict[str, Any]:
    """Of `EngineArgs`: the defaults that a user may change, and what RLix depends on.

    Args:
        path: the model's folder. dummy: its weights come later.
    """
    virtual, parallel = site.kind is DeviceKind.CPU, options.tensor_parallel_size
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": virtual,
        "sleep_mode_offload_cudagraph": not virtual,  # what is asleep leaves nothing of its graphs to the next holder
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **options.more,
        "model": str(Path(path)),
        "load_format": "dummy" if dummy else load_format(options),
        "dtype": "float32" if virtual and options.dtype == "auto" else options.dtype,
        "tensor_parallel_size": parallel,
        "distributed_executor_backend": "mp" if parallel > 1 else "uni",
        "max_model_len": max_length,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": _utilization(options.gpu_memory_utilization, None if virtual else site.keys),
        "kv_cache_memory_bytes": _virtual_kv_bytes(options, config, max_length) if virtual else options.kv_cache_bytes,
        "enable_sleep_mode": not virtual,
        "logprobs_mode": "raw_logprobs",
        # A step in flight while weights change would label its tokens with the wrong version.
        "async_scheduling": False,
        "worker_extension_cls": WORKER,
        **_adapter_arguments(options),
        **(_whole_prefills(options, max_length) if virtual else {}),
    }


def load_format(options: ExecutorOptions) -> str:
    """In which vLLM reads the model's folder."""
    return str(options.more.get("load_format", "auto"))


def _whole_prefills(options: ExecutorOptions, max_length: int) -> Mapping[str, Any]:
    """Room for the longest prompt in one step.

    On a CPU a prompt that is computed in parts ends in an error: a request's seeded generator cannot be set back there
    (`GPUModelRunner._bookkeeping_sync`).
    """
    wanted = options.more.get("max_num_batched_tokens")
    room = {} if wanted is None else {"max_num_batched_tokens": max(wanted, max_length)}
    return {"enable_chunked_prefill": False, **room}


def model_folder(source: ModelSource, config: Any, scratch: str) -> str:
    """What vLLM takes for a model: the source's folder or hub name, or for a mere configuration one in `scratch`."""
    if source.path is not None:
        return source.path
    if not config.architectures:
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(scratch)
    return scratch


def _adapter_arguments(options: ExecutorOptions) -> Mapping[str, Any]:
    if not options.adapters:
        return {}
    rank = next((rank for rank in _RANKS if rank >= options.adapter_rank), _RANKS[-1])
    # One that is dropped for want of room could not be found again: it was never in a folder.
    room = options.adapters
    return {"enable_lora": True, "max_loras": room + 1, "max_cpu_loras": room + 2, "max_lora_rank": rank}


def _utilization(wanted: float | None, gpus: Sequence[str] | None) -> float:
    """vLLM takes a share of all memory, and starts only where that much is free."""
    if wanted is not None or gpus is None:
        return DEFAULT_SHARE if wanted is None else wanted
    return DEFAULT_SHARE * min(free / total for free, total in gpu_memory(gpus))


def _virtual_kv_bytes(options: ExecutorOptions, config: Any, max_length: int) -> int:
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * _FLOAT32_BYTES
    return int(max(_MIN_VIRTUAL_KV_BYTES, _VIRTUAL_KV_SEQUENCES * max_length * per_token))
