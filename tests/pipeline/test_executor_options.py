from typing import Any

import pytest
from pydantic import ValidationError

from rlix.pipeline.spec.executor import build_arguments, executor_problems, longest_trajectory
from rlix.pipeline.spec.job import JobSpec


@pytest.mark.parametrize(
    ("executor", "options", "field", "message"),
    [
        ("transformers", {"enforce_eager": True}, "enforce_eager", "unknown key"),
        ("transformers", {"exat": True}, "exat", "did you mean 'exact'?"),
        ("vllm", {"max_num_seqs": 8}, "max_num_seqs", "is written as 'rollout.max_num_seqs'"),
        ("vllm", {"dtype": "bfloat16"}, "dtype", "is written as 'model.dtype'"),
        ("vllm", {"async_scheduling": True}, "async_scheduling", "is set by RLix"),
        ("vllm", {"enable_lora": True}, "enable_lora", "is set by RLix"),
        ("vllm", {"nnodes": 2}, "nnodes", "is set by RLix"),
        ("vllm", {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", "must be less than or equal to 1, not 1.5"),
        ("vllm", {"enforce_eager": "yes"}, "enforce_eager", "must be a valid boolean, not 'yes'"),
        ("vllm", {"max_model_len": 100}, "max_model_len", "100 leaves no room for a prompt before the 100 tokens"),
        ("vllm", {"enforce_eagr": True}, "enforce_eagr", "did you mean 'enforce_eager'?"),
        ("vllm", {"maxseqs": 8}, "maxseqs", "has no such option"),
    ],
)
def test_mistakes_are_found_before_the_start(executor: Any, options: dict[str, Any], field: str, message: str) -> None:
    (problem,) = executor_problems(executor, options, 100)
    assert problem.field == f"rollout.executor_options.{field}"
    assert message in problem.message


def test_what_the_executor_is_built_with() -> None:
    options = {
        "gpu_memory_utilization": 0.8,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 2**30,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 4096,
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
    }
    assert not list(executor_problems("vllm", options, 100))
    assert build_arguments("vllm", options) == {
        "gpu_memory_utilization": 0.8,
        "max_model_len": 4096,
        "kv_cache_bytes": 2**30,
        "executor_options": {
            "quantization": "fp8",
            "kv_cache_dtype": "fp8",
            "max_num_batched_tokens": 4096,
            "compilation_config": {"cudagraph_mode": "PIECEWISE"},
        },
    }
    assert build_arguments("transformers", {"exact": False}) == {"exact": False, "executor_options": {}}
    assert build_arguments("transformers", {}) == {"executor_options": {}}
    assert [longest_trajectory("vllm", options, context) for context in (2048, 8192)] == [2048, 4096]


def test_a_job_with_a_mistake_in_them_is_no_job() -> None:
    rollout = {"max_new_tokens": 5, "executor_options": {"exat": True}}
    values: Any = {
        "name": "job",
        "steps": 1,
        "source": {"task": "sort_digits"},
        "clusters": {"actor_train": {"gpus": 1}},
    }
    with pytest.raises(ValidationError, match=r"rollout\.executor_options\.exat: unknown key; did you mean 'exact'"):
        JobSpec.model_validate(values | {"rollout": rollout})
