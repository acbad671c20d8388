"""A small policy that trains, for the training engine's tests."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

import rlix.nn
from rlix.engine.movers import Mover, SwapMover
from rlix.engine.train.fsdp2 import Fsdp2Executor
from rlix.engine.train.layout import Layout
from tests.engine.models import qwen
from tests.waiting import until


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

    @rlix.nn.returns("first")
    def counted(self, items: list[list[int]]) -> int:
        return int(self.dp_sum(len(items)))

    @rlix.nn.returns("all")
    def groups(self) -> tuple[int, ...]:
        """Data rank and size, and the sizes of the world, data and tensor groups."""
        of = self.context.groups
        sizes = (1 if group is None else group.size() for group in (of.world, of.data, of.tensor))
        return self.dp_rank, self.dp_size, *sizes

    @rlix.nn.returns("all")
    def time_limits(self) -> set[float]:
        """Of collectives, in each of this rank's process groups."""
        backends = (group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map)
        return {backend.options._timeout.total_seconds() for backend in backends}

    def numbers(self) -> Iterator[int]:
        yield from range(3)

    def draw(self) -> list[float]:
        return torch.rand(3).tolist()

    @rlix.nn.returns("all")
    def draw_each(self) -> tuple[float, ...]:
        return tuple(self.draw())

    def fail(self) -> None:
        raise KeyError("no such thing")

    def step_on_one_rank(self) -> None:
        if self.rank == 1:
            raise KeyError("only here")
        with torch.no_grad():
            next(self.parameters()).mul_(2.0)
        self.dp_sum(1.0)  # waits for a rank that does not come

    def sleep_on_the_others(self, seconds: float) -> None:
        if self.rank == 1:
            raise KeyError("only here")
        self.draw()  # as dropout does
        time.sleep(seconds)

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.draw()
        self.dp_sum(1.0)  # waits for a rank that does not come

    @torch.no_grad()
    def change_and_die(self, rank: int, folder: str) -> None:
        """All ranks change their weights; this one dies before it has answered, while others have gone on."""
        next(self.parameters()).mul_(2.0)
        Path(folder, "changed").touch()
        if self.rank == rank:
            until(Path(folder, "went on").exists, "no rank went on to the next call")
            os.kill(os.getpid(), signal.SIGKILL)

    def go_on(self, folder: str) -> None:
        Path(folder, "went on").touch()
        self.dp_sum(1.0)  # waits for a rank that does not come

    def sleep_deaf(self, seconds: int) -> None:
        """No other thread of the process runs meanwhile."""
        ctypes.PyDLL(None).sleep(seconds)

    @rlix.nn.configures
    def use_sgd(self, learning_rate: float) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=learning_rate, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    def learning_rates(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def training_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_training_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        if state.get("broken") and self.dp_sum(1.0) and self.rank == 1:
            raise KeyError("only here")
        if state.get("broken"):
            self.dp_sum(1.0)  # waits for a rank that does not come

    def steps_done(self) -> int:
        return self.steps


def policy(**overrides: object) -> Policy:
    with torch.device("meta"):
        return Policy(qwen(**overrides))


def batch(seed: int, size: int = 9, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, 97, (size, length), generator=generator).tolist()
    return ids


class Descending(Policy):
    """Without AdamW, which makes whole steps of gradients that are rounding alone."""

    def on_weights_materialized(self) -> None:
        self.use_sgd(0.05)
        self.steps = 0


class Several(Policy):
    """Its optimizers are in a dictionary of lists; each has a part of the parameters."""

    def on_weights_materialized(self) -> None:
        parameters = list(self.parameters())
        self.by_part = {
            "first": [torch.optim.AdamW(parameters[:5], lr=1e-3)],
            "rest": [torch.optim.AdamW(parameters[5:], lr=2e-3)],
        }
        self.steps = 0

    @rlix.nn.returns("first")
    def train_step(self, ids: list[list[int]]) -> dict[str, float]:
        tokens = torch.tensor(ids, device=self.device)
        loss = self(tokens, labels=tokens).loss
        loss.backward()
        for optimizers in self.by_part.values():
            optimizers[0].step()
            optimizers[0].zero_grad()
        self.steps += 1
        return {"loss": loss.item()}


class OneBatch(Fsdp2Executor):
    """As of an executor whose ranks compute on one batch together."""

    @classmethod
    def arrange(cls, asked: Layout) -> Layout:
        return asked


class Swapping(Fsdp2Executor):
    """On a virtual GPU whose bytes leave it as they leave a real one."""

    def mover(self) -> Mover:
        return SwapMover(self.device)


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
