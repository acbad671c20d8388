"""A model that stays as it is while LoRA adapters on it learn, each as if it were alone."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlix.engine import lora
from rlix.engine.lora import WEIGHTS_FILE, AdapterConfig
from rlix.engine.weights.publication import PublishedAdapter, publish
from rlix.nn import configures, undoes
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.training.module import OptimizedModule, adjust
from rlix.pipeline.training.parameter_groups import ParameterGroup
from rlix.pipeline.training.schedule import learning_rate_factor
from rlix.protocol.errors import SpecError

STATE_FILE = "optimizer.safetensors"
PROGRESS_FILE = "optimizer.json"


class AdaptedModule(OptimizedModule):
    """Adapters lie outside the sharding, whole on every rank, so that they may come and go; their gradients are
    averaged in one flat reduction. Each has its own optimizer, learning-rate schedule and random stream, and a pass is
    made for one of them at a time: what it learns is equal, to the bit, to what it would learn alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter_configs: dict[str, AdapterConfig] = {}
        self.adapter_optimizers: dict[str, torch.optim.Optimizer] = {}
        self.adapter_schedulers: dict[str, torch.optim.lr_scheduler.LambdaLR] = {}
        self._adapter_seeds: dict[str, int] = {}
        self._adapter: str | None = None

    @configures
    def add_adapter(
        self,
        name: str,
        config: AdapterConfig,
        optimizer: OptimizerSpec,
        updates: int = 1,
        seed: int = 0,
    ) -> None:
        """From now on there is an adapter of this name, new, that takes `updates` steps in all; the model is frozen.

        Raises SpecError when the name is taken, or the model has no such layers.
        """
        lora.add(self, name, config, stream_seed(seed, "adapter"))
        self.adapter_configs[name], self._adapter_seeds[name] = config, seed
        self.adapter_optimizers[name] = torch.optim.AdamW(
            lora.parameters(self, name).values(),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            foreach=False,
        )
        factor = learning_rate_factor(optimizer, updates)
        self.adapter_schedulers[name] = torch.optim.lr_scheduler.LambdaLR(self.adapter_optimizers[name], factor)

    def load_adapter(
        self, name: str, folder: Path, optimizer: OptimizerSpec, updates: int = 1, *, goes_on: bool = True
    ) -> None:
        """Give an adapter the values that are in a PEFT folder.

        Args:
            goes_on: also its optimizer and schedule, where `save_adapter` wrote the folder.

        Raises WeightSyncError when they do not fit, SpecError when they cannot be read; nothing was changed then.
        """
        try:
            values = load_file(folder / WEIGHTS_FILE)
        except (SafetensorError, OSError) as error:
            raise SpecError(f"{folder / WEIGHTS_FILE}: cannot be read: {error}") from error
        progress = self._progress(name, folder) if goes_on and (folder / PROGRESS_FILE).is_file() else None
        lora.fill(self, name, values)
        if progress is not None:
            moments, schedule = progress
            self.adapter_optimizers[name].state.update(moments)
            self.adapter_schedulers[name].load_state_dict(schedule)
        group = ParameterGroup((), optimizer.learning_rate, optimizer.weight_decay)
        adjust(self.adapter_optimizers[name], self.adapter_schedulers[name], [group], optimizer, updates)

    @undoes("add_adapter")
    def remove_adapter(self, name: str) -> None:
        """Take it off, and its optimizer with it; the others notice nothing."""
        lora.remove(self, name)
        for held in (self.adapter_configs, self.adapter_optimizers, self.adapter_schedulers, self._adapter_seeds):
            held.pop(name, None)

    def adapters(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(self.adapter_configs)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Within the block the model computes with this adapter, its optimizer and its random numbers; None: as it is.

        Gradients that are left over when the block fails are dropped.
        """
        if not self.adapter_configs and name is None:
            yield
            return
        if name is not None and name not in self.adapter_configs:
            raise ValueError(f"there is no adapter {name!r}; there are {list(self.adapter_configs)}")
        lora.use(self, name)
        self._adapter = name
        try:
            with self.own_random_numbers():
                if name is not None:
                    update = self.adapter_schedulers[name].last_epoch
                    torch.manual_seed(stream_seed(self._adapter_seeds[name], "dropout", update, self.rank))
                yield
        finally:
            self.zero_grad(set_to_none=True)
            self._adapter = None
            lora.use(self, None)

    def own_random_numbers(self) -> AbstractContextManager[None]:
        """What is drawn within the block is not missing after it."""
        return cast(
            AbstractContextManager[None], torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        )

    def begin_training(self) -> None:
        super().begin_training()
        if self._adapter is not None and self.adapter_configs[self._adapter].dropout:
            lora.enable_dropout(self, self._adapter)

    def update(
        self, metrics: Mapping[str, float], max_grad_norm: float, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, float]:
        """One step of the adapter in use: nothing else has gradients."""
        if self._adapter is not None:
            optimizer = self.adapter_optimizers[self._adapter]
            self._average_gradients(self._adapter)
        return super().update(metrics, max_grad_norm, optimizer)

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().step_optimizer(optimizer)
        if self._adapter is not None:
            self.adapter_schedulers[self._adapter].step()

    def _average_gradients(self, name: str) -> None:
        """Over all ranks, as FSDP does with what it shards."""
        group = self.context.groups.world
        if group is None or self.context.world_size == 1:
            return
        own = list(lora.parameters(self, name).values())
        for parameter in own:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in own if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= self.context.world_size
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    # ---- for others --------------------------------------------------------------------------------------------

    def publish_adapter(self, name: str, version: int) -> PublishedAdapter:
        """The adapter alone, its bytes and no references, for replicas that have the model. Reads only."""
        named = ((key, value.detach()) for key, value in lora.parameters(self, name).items())
        return PublishedAdapter(name, self.adapter_configs[name], publish(named, version, put=np.array))

    def save_adapter(self, name: str, folder: Path, base: str = "") -> None:
        """Write a folder that PEFT loads, with what training goes on from beside it. Reads only; rank 0 writes.

        `base` names the model that the adapter belongs on.
        """
        if self.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        own, optimizer = lora.parameters(self, name), self.adapter_optimizers[name]
        self.adapter_configs[name].write(folder, base)
        save_file(_contiguous(own), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        state = {f"{key}.{part}": t for key, value in own.items() for part, t in optimizer.state.get(value, {}).items()}
        save_file(_contiguous(state), folder / STATE_FILE)
        progress = {"scheduler": self.adapter_schedulers[name].state_dict()}
        (folder / PROGRESS_FILE).write_text(json.dumps(progress))

    def _progress(self, name: str, folder: Path) -> tuple[dict[torch.Tensor, dict[str, Any]], dict[str, Any]]:
        """What the optimizer of an adapter knew of each parameter, and its schedule. Raises SpecError, as it says."""
        own = lora.parameters(self, name)
        moments: dict[torch.Tensor, dict[str, Any]] = {}
        try:
            schedule = dict(json.loads((folder / PROGRESS_FILE).read_bytes())["scheduler"])
            for key, value in load_file(folder / STATE_FILE).items():
                owner, _, part = key.rpartition(".")
                moments.setdefault(own[owner], {})[part] = value if part == "step" else _like(own[owner], key, value)
            return moments, {**schedule, "last_epoch": int(schedule["last_epoch"])}
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, SafetensorError) as error:
            files = f"{PROGRESS_FILE} and {STATE_FILE}"
            raise SpecError(f"{folder}: training cannot go on from {files}: {type(error).__name__}: {error}") from error


def _like(parameter: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
    """On the parameter's device. Raises ValueError for another shape."""
    if value.shape != parameter.shape:
        raise ValueError(f"{key} has the shape {list(value.shape)}, and the adapter's is {list(parameter.shape)}")
    return value.to(parameter.device)


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
