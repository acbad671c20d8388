"""Which parts of a checkpoint's tensors one of vLLM's workers reads, asked of vLLM's own loader.

A second model is built on meta, where it costs nothing, and loads tensors that have a shape and no bytes, while every
operation that reads from one of them is noted. So whatever a loader does with a tensor (cut out this worker's rows or
columns, put it into a fused parameter, repeat heads, pad a vocabulary) is known without knowing the loader.
"""

import copy
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlix.engine.weights.boxes import Box, whole, without
from rlix.engine.weights.buckets import WeightEntry
from rlix.engine.weights.naming import as_stored
from rlix.engine.weights.publication import Wanted

logger = logging.getLogger(__name__)


def needed(model: torch.nn.Module, entries: Iterable[WeightEntry], trained: torch.nn.Module) -> Wanted:
    """What `model.load_weights`, of a model on meta, reads of these tensors of `trained`, transformers' model."""
    reads = Reads(entries)
    try:
        with reads:
            model.load_weights(as_stored(trained, reads.tensors()))  # type: ignore[operator]
    except (RuntimeError, NotImplementedError) as error:  # a loader that looks at values, which nothing on meta has
        logger.warning("this worker will receive whole tensors, because vLLM's loader does not run on meta: %s", error)
        reads.note_all()
    return reads.boxes()


def meta_model(vllm_config: Any) -> torch.nn.Module:
    """Another model like the worker's, without bytes and unknown to the rest of vLLM."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}  # where layers enter their names, each once
    with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
        model: torch.nn.Module = initialize_model(config)
    return model


class Reads(TorchDispatchMode):
    """Notes what is read of tensors that it hands out."""

    def __init__(self, entries: Iterable[WeightEntry]) -> None:
        super().__init__()
        self._given = {
            entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta") for entry in entries
        }
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in self._given.items()}
        self._boxes: dict[str, list[Box]] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._given.items()

    def boxes(self) -> Wanted:
        return {name: self._read(name) for name in self._given}

    def note_all(self) -> None:
        for name, tensor in self._given.items():
            self._boxes[name] = [whole(tensor.shape)] if tensor.numel() else []

    def _read(self, name: str) -> list[Box]:
        boxes: list[Box] = []
        for read in self._boxes.get(name, ()):
            fresh = [read]
            for known in boxes:
                fresh = [rest for box in fresh for rest in without(box, known)]
            boxes += fresh
        return boxes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    self._note(tensor)
        return func(*args, **(kwargs or {}))

    def _note(self, read: torch.Tensor) -> None:
        name = self._names.get(read.untyped_storage()._cdata)
        if name is None:
            return
        whole_tensor = self._given[name]
        box = box_of(read, whole_tensor) or whole(whole_tensor.shape)
        if read.numel():
            self._boxes.setdefault(name, []).append(box)


def box_of(view: torch.Tensor, tensor: torch.Tensor) -> Box | None:
    """The box that a view of a contiguous tensor shows; None when it is not one."""
    starts, left = [], view.storage_offset()
    for stride in tensor.stride():
        starts.append(left // stride)
        left %= stride
    sizes = [1] * tensor.dim()
    dims = list(range(tensor.dim()))
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = next((d for d in dims if tensor.stride(d) == stride and tensor.shape[d] > 1), None)
        if dim is None:
            return None
        sizes[dim] = size
        dims.remove(dim)
    box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
    inside = all(stop <= size for (_, stop), size in zip(box, tensor.shape, strict=True))
    return box if inside else None
