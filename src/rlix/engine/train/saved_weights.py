"""The weights in a saved training state, one by one and without a process group, and a folder of them for others."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rlix.engine.train.checkpoint import ShardWriter, quiet_dcp

_PREFIX = "model."


def saved_names(state: Path) -> list[str]:
    """Of the weights in the state, as the module calls them; tied ones once."""
    return [name.removeprefix(_PREFIX) for name in _entries(state) if name.startswith(_PREFIX)]


def saved_weights(state: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in host memory, whatever the number of ranks that saved them; one at a time."""
    entries = _entries(state)
    for name in names:
        entry = entries[f"{_PREFIX}{name}"]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with quiet_dcp():
            load({f"{_PREFIX}{name}": tensor}, storage_reader=HuggingFaceStorageReader(str(state)), no_dist=True)
        yield name, tensor


def write_weights(weights: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype) -> None:
    """As safetensors files of bounded size, with Hugging Face's index when there are several."""
    writer = ShardWriter(folder)
    for name, tensor in weights:
        writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
    writer.close()


def _entries(state: Path) -> dict[str, TensorStorageMetadata]:
    found = HuggingFaceStorageReader(str(state)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
