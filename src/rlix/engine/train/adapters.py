"""What a training module shows the world: its weights by their exported names, LoRA adapters merged into them.

Adapters are recognised by the attributes that PEFT's layers have; PEFT itself is not needed here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rlix.engine.weights.publication import named_weights, tied_names
from rlix.nn import BaseTrainModule

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Exported:
    """One tensor by its exported names. `tensor` gives it, sharded as it is; all ranks call it, in the same order.

    `base` has its shape and dtype, and says what of it this rank holds.
    """

    name: str
    aliases: tuple[str, ...]
    base: torch.Tensor
    tensor: Callable[[], torch.Tensor]


def exported(module: BaseTrainModule) -> list[Exported]:
    """Every weight under the names that a model without adapters has.

    The weight of a layer with LoRA is `base + sum over active adapters of (alpha / r) * B @ A`, as PEFT merges it.
    Modules that PEFT trains whole (`modules_to_save`) replace their originals.

    Raises:
        NotImplementedError: an adapter that changes more than the weight (DoRA, LoRA with bias).
    """
    named = named_weights(module)
    names = base_names(module)
    result = []
    for name, more in tied_names({name: tensor for name, tensor in named.items() if name in names}).items():
        merging = [n for n in (name, *more) if n.endswith(".base_layer.weight")]
        for merged in merging:
            layer = module.get_submodule(merged.removesuffix(".base_layer.weight"))
            # Tied to others or not: with its adapters merged it is a tensor of its own.
            base = named[merged]
            result.append(Exported(module.export_name(names[merged]), (), base, partial(_merged, layer, base)))
        plain = [module.export_name(names[n]) for n in (name, *more) if n not in merging]
        if plain:
            result.append(Exported(plain[0], tuple(plain[1:]), named[name], partial(_itself, named[name])))
    return result


def answers_plainly(module: BaseTrainModule) -> bool:
    """Whether it is a causal LM as transformers calls it, without adapters, so that it computes what is published."""
    if not isinstance(module, PreTrainedModel) or not type(module).forward.__module__.startswith("transformers."):
        return False
    plain: PreTrainedModel = module
    return plain.get_output_embeddings() is not None and not any(_is_lora(part) for part in plain.modules())


def to_publish(module: BaseTrainModule, weights: list[Exported]) -> list[Exported]:
    """The weights with parameters in the module's `publish_dtype`, cast as they are asked for, shard by shard."""
    dtype = module.publish_dtype
    if dtype is None:
        return weights

    def cast(weight: Exported) -> Exported:
        base = weight.base
        if not isinstance(base, nn.Parameter) or not base.is_floating_point() or base.dtype == dtype:
            return weight
        like = torch.empty_like(base.detach(), dtype=dtype, device="meta")  # placed on ranks as the base is
        return Exported(weight.name, weight.aliases, like, lambda: weight.tensor().detach().to(dtype))

    return [cast(weight) for weight in weights]


def tensors_of(weights: list[Exported]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, merged ones made as they are asked for, so that few exist at a time."""
    return ((weight.name, weight.tensor()) for weight in weights)


def aliases_of(weights: list[Exported]) -> dict[str, tuple[str, ...]]:
    """First name -> further names, of tied weights."""
    return {weight.name: weight.aliases for weight in weights if weight.aliases}


def base_names(module: torch.nn.Module) -> dict[str, str]:
    """State-dict name -> the name without adapters, of every tensor that a model without adapters has."""
    adapters: set[str] = set()  # prefixes of what belongs to adapters alone
    renamed: dict[str, str] = {}  # prefixes -> what stands for them in the base model
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        if _is_lora(child):
            adapters.update(f"{prefix}{name}." for name in child.adapter_layer_names)
            renamed[f"{prefix}base_layer."] = prefix
        elif hasattr(child, "modules_to_save") and hasattr(child, "original_module"):
            adapters.update((f"{prefix}original_module.", f"{prefix}modules_to_save."))
            renamed.update((f"{prefix}modules_to_save.{active}.", prefix) for active in child.active_adapters)
        elif hasattr(child, "peft_config") and hasattr(child, "base_model"):
            renamed[f"{prefix}{_PEFT_PREFIX}"] = prefix
    if not renamed:
        return {name: name for name in named_weights(module)}
    bases = ((name, _base_name(name, adapters, renamed)) for name in named_weights(module))
    return {name: base for name, base in bases if base is not None}


def _base_name(name: str, adapters: set[str], renamed: dict[str, str]) -> str | None:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:count]) + "."
        if not name.startswith(prefix):
            continue  # a longer prefix was renamed
        if prefix in renamed:
            name = renamed[prefix] + name.removeprefix(prefix)
        elif prefix in adapters:
            return None
    return name


def _is_lora(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@torch.no_grad()
def _merged(layer: Any, base: torch.Tensor) -> torch.Tensor:
    if layer.merged:
        return base
    merged = base
    for adapter in layer.active_adapters:
        if adapter not in layer.scaling:
            continue
        if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
            raise NotImplementedError(f"only plain LoRA can be merged on publication, not adapter {adapter!r}'s kind")
        delta = layer.get_delta_weight(adapter)
        if isinstance(base, DTensor):
            place = base.device_mesh, base.placements
            if isinstance(delta, DTensor):
                delta = delta.redistribute(*place)
            else:  # put on after the sharding: every rank has all of it
                delta = distribute_tensor(delta, *place, src_data_rank=None)
        merged = merged + delta.to(merged.dtype)
    return merged
