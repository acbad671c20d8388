"""The GPU benchmarks' runner: what is missing of a library is skipped, what is missing of our own has failed."""

import pytest
import torch

from benchmarks.gpu.__main__ import SECTIONS, run
from benchmarks.gpu.common import qwen_config


@pytest.mark.parametrize(
    ("missing", "ended"),
    [
        ("vllm", "skipped: none"),
        ("benchmarks.gpu.engines", "failed: "),
        ("rlix.engine.gone", "failed: "),
        (None, "skipped: none"),
    ],
)
def test_only_a_missing_library_is_skipped(missing: str | None, ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise ImportError("none", name=missing)

    monkeypatch.setattr("importlib.import_module", refuse)
    rows, said = run(next(iter(SECTIONS)), torch.device("cpu"))
    assert rows == []
    assert said.startswith(ended)


@pytest.mark.parametrize("hidden", [64, 128, 1024, 1536])
def test_two_ranks_can_divide_the_heads_of_every_model(hidden: int) -> None:
    config = qwen_config(hidden, 2, 512)
    assert config.num_attention_heads % config.num_key_value_heads == config.num_key_value_heads % 2 == 0
