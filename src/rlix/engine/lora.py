"""LoRA adapters on one model that stays as it is: several by name, put on and taken off while it lives, one in use.

The layers are PEFT's. They are put into the model after it was filled and cut, so an adapter is whole on every rank and
FSDP knows nothing of it. Tensors go by the names that PEFT's folders have.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlix.protocol.errors import SpecError, WeightSyncError

ALL_LINEAR = "all-linear"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BASE = "__base__"  # PEFT's name of rows without an adapter
_ODD = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter is, whatever it has learnt.

    Attributes:
        alpha: the update is scaled by alpha / rank. dropout: of what goes into the adapter, in training steps.
        targets: last names of the linear layers that get one ("q_proj"); `ALL_LINEAR`: all but the head.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @classmethod
    def of_folder(cls, folder: Path) -> "AdapterConfig":
        """What the adapter in a PEFT folder is.

        Raises:
            SpecError: there is none, or it is of a kind that is not trained here.
        """
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise SpecError(f"{folder} is no PEFT adapter: {CONFIG_FILE} is missing")
        try:
            found: dict[str, Any] = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise SpecError(f"{path}: cannot be read: {error}") from error
        odd = [key for key in _ODD if found.get(key)]
        if found.get("peft_type") != "LORA" or found.get("bias", "none") != "none" or odd:
            kind = ", ".join(odd) or found.get("peft_type")
            raise SpecError(f"{path}: only plain LoRA can be continued, not {kind}")
        try:
            given = found["target_modules"]
            targets = (given,) if isinstance(given, str) else tuple(sorted({name.split(".")[-1] for name in given}))
            return cls(int(found["r"]), float(found["lora_alpha"]), float(found.get("lora_dropout", 0.0)), targets)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"{path}: does not say what the adapter is: {error!r}") from error

    def write(self, folder: Path, base: str) -> None:
        """As PEFT has it; `base` names the model that it belongs on."""
        from peft import LoraConfig

        given: Any = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=given,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            inference_mode=True,
        ).save_pretrained(str(folder))


def add(model: nn.Module, name: str, config: AdapterConfig, seed: int = 0) -> None:
    """Put an adapter that changes nothing yet on a model, whose own weights are frozen. None is in use afterwards.

    Raises:
        SpecError: the name is taken, or the model has no layers of the names in `targets`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if any(name in layer.lora_A for layer in layers(model)):
        raise SpecError(f"there is an adapter {name!r} already")
    adapter = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_targets(model, config.targets),
    )
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are what is wanted
        torch.manual_seed(seed)
        inject_adapter_in_model(adapter, model, name)
        _renew(model, name, config.rank, seed)
    use(model, None)


def remove(model: nn.Module, name: str) -> None:
    """Take an adapter off; what it was on computes as if it had never been there."""
    use(model, None)
    for layer in layers(model):
        if name in layer.lora_A:
            layer.delete_adapter(name)
    use(model, None)


def use(model: nn.Module, name: str | None) -> None:
    """From now on the model computes with this adapter, and only that can learn; None: without any."""
    for layer in layers(model):
        layer.set_adapter([name] if name is not None and name in layer.lora_A else [])


@contextmanager
def row_by_row(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block each row of a batch is computed with the adapter of its name; "": without any.

    For generation: rows with other adapters beside it change how a row is rounded.
    """
    if len(set(names)) == 1:
        use(model, names[0] or None)
        yield
        return

    def named(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "adapter_names": [name or _BASE for name in names]}

    hooks = [layer.register_forward_pre_hook(named, with_kwargs=True) for layer in layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def enable_dropout(model: nn.Module, name: str) -> None:
    """Until the model's next `eval` or `train`."""
    for layer in layers(model):
        if name in layer.lora_A:
            layer.lora_dropout[name].train()


def parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's tensors by the names that PEFT's folders have."""
    found = {}
    for path, layer in model.named_modules():
        if _is_layer(layer) and name in layer.lora_A:
            for half in ("lora_A", "lora_B"):
                found[f"{_PREFIX}{path}.{half}.weight"] = getattr(layer, half)[name].weight
    return found


@torch.no_grad()
def fill(model: nn.Module, name: str, given: Mapping[str, torch.Tensor]) -> None:
    """Give an adapter its values.

    Raises:
        WeightSyncError: names or shapes are not the adapter's; nothing was changed.
    """
    own = parameters(model, name)
    _compare(name, {key: list(value.shape) for key, value in own.items()}, given)
    for key, value in given.items():
        own[key].copy_(value)


def check(model: nn.Module, name: str, config: AdapterConfig, given: Mapping[str, torch.Tensor]) -> None:
    """Return when these are the tensors of such an adapter on such a model, which has none on it.

    Raises:
        SpecError: the model has no layers of the names in `targets`. WeightSyncError: names or shapes are others.
    """
    targets, shapes = _targets(model, config.targets), {}
    for path, layer in model.named_modules():
        if path.split(".")[-1] in targets and isinstance(layer, nn.Linear):
            shapes[f"{_PREFIX}{path}.lora_A.weight"] = [config.rank, layer.in_features]
            shapes[f"{_PREFIX}{path}.lora_B.weight"] = [layer.out_features, config.rank]
    _compare(name, shapes, given)


def _compare(name: str, shapes: Mapping[str, list[int]], given: Mapping[str, torch.Tensor]) -> None:
    problems = [f"missing: {key}" for key in shapes if key not in given]
    problems += [f"unknown here: {key}" for key in given if key not in shapes]
    problems += [
        f"shape of {key}: given {list(value.shape)}, here {shapes[key]}"
        for key, value in given.items()
        if key in shapes and list(value.shape) != shapes[key]
    ]
    if problems:
        raise WeightSyncError(f"adapter {name!r} does not fit; nothing was changed: " + "; ".join(problems[:8]))


def without_adapters(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors by the names that they have where nothing was put on."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in named.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def layers(model: nn.Module) -> Iterator[Any]:
    """Those that have adapters, or had some."""
    return (module for module in model.modules() if _is_layer(module))


def _is_layer(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _renew(model: nn.Module, name: str, rank: int, seed: int) -> None:
    """Whole tensors, the same on every layout: PEFT takes a sharded weight for one that computes on its shard."""
    torch.manual_seed(seed)
    for layer in layers(model):
        if name in layer.lora_A:
            base = layer.base_layer
            layer.in_features, layer.out_features = base.in_features, base.out_features
            first, second = (
                nn.Linear(base.in_features, rank, bias=False),
                nn.Linear(rank, base.out_features, bias=False),
            )
            nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
            nn.init.zeros_(second.weight)
            layer.lora_A[name], layer.lora_B[name] = first.to(base.weight.device), second.to(base.weight.device)


def linear_layers(model: nn.Module) -> set[str]:
    """Last names of those that adapters may go on: all but the head. PEFT would count layers of adapters as well."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    inside = {id(part) for layer in layers(model) for part in layer.modules() if part is not layer}
    return {
        path.split(".")[-1]
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or _is_layer(module)) and id(module) not in inside and module is not head
    }


def _targets(model: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """Last names of the linear layers that get an adapter."""
    linear = linear_layers(model)
    if wanted == (ALL_LINEAR,):
        return sorted(linear)
    if unknown := sorted(set(wanted) - linear):
        raise SpecError(
            f"lora.targets: the model has no linear layers called {unknown}; it has {sorted(linear)}, or write "
            f"{ALL_LINEAR!r}"
        )
    return sorted(wanted)
