"""A small policy that trains, for the training engine's tests."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

import rlix.nn
from rlix.engine.train.worker import TrainWorker
from tests.engine.models import qwen


class Policy(rlix.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=50)
        self.steps = 0

    @rlix.nn.returns("first")
    def train_step(self, ids: list[list[int]]) -> dict[str, float]:
        tokens = torch.tensor(ids, device=self.device)
        logprobs = self(input_ids=tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        loss = self.global_mean(-logprobs)
        loss.backward()
        norm = self.clip_grad_norm(1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {"loss": self.dp_mean(loss.detach()).item(), "grad_norm": norm.item()}

    @torch.no_grad()
    def score(self, ids: list[list[int]]) -> torch.Tensor:
        return self(input_ids=torch.tensor(ids)).logits.log_softmax(-1).sum((1, 2))

    @rlix.nn.returns("mean")
    def mean_length(self, items: list[list[int]]) -> dict[str, float]:
        return {"length": sum(map(len, items)) / len(items)}

    @rlix.nn.returns("sum")
    def count(self, items: list[list[int]]) -> int:
        return len(items)

    @rlix.nn.returns("all")
    def where(self) -> tuple[int, int]:
        return self.dp_rank, self.dp_size

    def numbers(self) -> Iterator[int]:
        yield from range(3)

    def draw(self) -> list[float]:
        return torch.rand(3).tolist()

    def fail(self) -> None:
        raise KeyError("no such thing")

    def fail_on_one_rank(self) -> None:
        if self.rank == 1:
            raise KeyError("only here")
        self.dp_sum(1.0)  # waits for a rank that does not come

    def training_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_training_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def steps_done(self) -> int:
        return self.steps


def policy(**overrides: object) -> Policy:
    with torch.device("meta"):
        return Policy(qwen(**overrides))


def batch(seed: int, size: int = 9, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, 97, (size, length), generator=generator).tolist()
    return ids


class OneBatch(TrainWorker):
    """As of an executor whose ranks compute on one batch together."""

    def _data_part(self, shards: int) -> tuple[int, int]:
        return self.ctx.rank // shards, self.ctx.world_size // shards


class LoraPolicy(Policy):
    """Only adapters are trained; the base weights are frozen."""

    def __init__(self, config: Any) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__(config)
        lora = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
        inject_adapter_in_model(lora, self)

    def on_weights_materialized(self) -> None:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=50)
        self.steps = 0
