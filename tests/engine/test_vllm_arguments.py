"""What vLLM is started with, without vLLM."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.engine.executors import vllm_arguments
from rlix.engine.executors.base import ExecutorOptions, Site
from rlix.engine.executors.vllm_arguments import engine_arguments
from rlix.protocol.messages import DeviceKind

CONFIG = SimpleNamespace(num_key_value_heads=2, num_attention_heads=4, hidden_size=256, num_hidden_layers=3)
GPUS = Site(DeviceKind.CUDA, ("GPU-a", "GPU-b"))


def arguments(site: Site, **options: Any) -> dict[str, Any]:
    return engine_arguments(ExecutorOptions(**options), CONFIG, site, "/model", dummy=True, max_length=10_000)


def test_on_a_gpu_it_takes_of_what_is_free_and_can_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(keys: Sequence[str]) -> tuple[tuple[int, int], ...]:
        assert keys == GPUS.keys
        return (60, 80), (40, 80)  # another job has half of the second

    monkeypatch.setattr(vllm_arguments, "gpu_memory", memory)
    made = arguments(GPUS, tensor_parallel_size=2)
    assert made["gpu_memory_utilization"] == pytest.approx(0.45)
    assert (made["enable_sleep_mode"], made["kv_cache_memory_bytes"], made["dtype"]) == (True, None, "auto")
    assert arguments(GPUS, gpu_memory_utilization=0.3)["gpu_memory_utilization"] == 0.3


def test_a_virtual_gpu_has_a_small_cache_of_its_own() -> None:
    made = arguments(Site(DeviceKind.CPU))
    assert made["kv_cache_memory_bytes"] == 8 * 10_000 * 2 * 3 * 2 * 64 * 4  # eight sequences in float32
    assert (made["enable_sleep_mode"], made["dtype"], made["load_format"]) == (False, "float32", "dummy")
    assert arguments(Site(DeviceKind.CPU), kv_cache_bytes=7)["kv_cache_memory_bytes"] == 7


def test_on_a_virtual_gpu_prompts_are_computed_whole() -> None:
    made = arguments(Site(DeviceKind.CPU), more={"enable_chunked_prefill": True, "max_num_batched_tokens": 512})
    assert (made["enable_chunked_prefill"], made["max_num_batched_tokens"]) == (False, 10_000)
    assert "max_num_batched_tokens" not in arguments(Site(DeviceKind.CPU))
    assert "enable_chunked_prefill" not in arguments(GPUS, gpu_memory_utilization=0.3)


def test_what_sleeps_on_a_gpu_takes_its_graphs_along_unless_told_otherwise() -> None:
    name = "sleep_mode_offload_cudagraph"
    assert arguments(GPUS, gpu_memory_utilization=0.3)[name]
    assert not arguments(GPUS, gpu_memory_utilization=0.3, more={name: False})[name]
    assert not arguments(Site(DeviceKind.CPU))[name]


def test_a_users_options_are_passed_on_and_adapters_have_room() -> None:
    made = arguments(Site(DeviceKind.CPU), more={"block_size": 32, "enforce_eager": False}, adapters=3, adapter_rank=20)
    assert (made["block_size"], made["enforce_eager"]) == (32, False)
    assert (made["max_loras"], made["max_cpu_loras"], made["max_lora_rank"]) == (4, 5, 32)
    assert "enable_lora" not in arguments(Site(DeviceKind.CPU))
