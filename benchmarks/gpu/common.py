"""What the sections share: rows of the table, timing, and a model."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and what it is compared with, in the same unit; `ratio` is value over reference."""

    what: str
    value: float
    unit: str
    reference: str
    reference_value: float
    goal: str = ""

    @property
    def ratio(self) -> float:
        return self.value / self.reference_value

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def line(self) -> str:
        against = f"{self.reference} {self.reference_value:,.4g}"
        return f"{self.what:<38} {self.value:>9,.4g} {self.unit:<5} {against:>28} {self.ratio:>7.2f}  {self.goal}"


def seconds(action: Callable[[], object], device: torch.device, repeat: int = 5, warm_up: int = 1) -> float:
    """The fastest of `repeat` runs, each until the device is idle."""
    best = float("inf")
    for number in range(warm_up + repeat):
        settle(device)
        start = time.perf_counter()
        action()
        settle(device)
        if number >= warm_up:
            best = min(best, time.perf_counter() - start)
    return best


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def qwen_config(hidden: int, layers: int, vocabulary: int) -> Any:
    """Two ranks of vLLM can divide its heads among them."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 128),
        num_key_value_heads=max(2, hidden // 1024 * 2),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
