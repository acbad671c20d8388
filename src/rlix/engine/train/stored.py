"""Tensors that a module is filled with, read when it is their turn: all of one, or the box of it that is wanted."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from rlix.engine.weights.boxes import Box, slices
from rlix.engine.weights.naming import Made, in_memory

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


class Stored(Protocol):
    """A whole tensor that is read when it is its turn."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, box: Box | None = None) -> torch.Tensor:
        """What is in a box of it; None: all. It may share memory with what is stored."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, box: Box | None = None) -> torch.Tensor:
        return self.tensor if box is None else self.tensor[slices(box)]


@dataclass(frozen=True, slots=True)
class InFile:
    """`file` is an open file of safetensors, shared by all that are in it."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def scaled(self) -> bool:
        """Whether its numbers are meant to be multiplied by others, which a checkpoint has beside it."""
        return str(self.file.get_slice(self.name).get_dtype()).startswith(("F8", "F4"))

    def read(self, box: Box | None = None) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_slice(self.name)[slices(box)] if box else self.file.get_tensor(self.name)
        return tensor


@dataclass(frozen=True, slots=True)
class Converted:
    """One that is made of several."""

    name: str
    shape: tuple[int, ...]
    made: Made
    parts: Mapping[str, Stored]

    def read(self, box: Box | None = None) -> torch.Tensor:
        if box is None or not self.made.stacks:
            whole = self.made.of(lambda name: self.parts[name].read())[self.name]
            return whole if box is None else whole[slices(box)]
        rows, *rest = box
        some = self.made.of(lambda name: self.parts[name].read(), slice(*rows))[self.name]
        return some[(slice(None), *slices(tuple(rest)))]


def in_folder(folder: Path) -> dict[str, InFile]:
    """The tensors of a Hugging Face folder, by its names for them."""
    index = safetensors_index(folder)
    files = {path: safe_open(path, framework="pt") for path in set(index.values())}
    return {name: InFile(files[path], name) for name, path in index.items()}


def converted(module: torch.nn.Module, stored: Mapping[str, Stored], known: Iterable[str]) -> dict[str, Stored]:
    """A checkpoint's tensors as the module's, which knows them by the names `known`; see `naming`."""
    plain, groups = in_memory(module, stored, known)
    found: dict[str, Stored] = {key: stored[name] for name, key in plain.items()}
    for made in groups:
        parts = {name: stored[name] for names in made.names.values() for name in names}
        shapes = made.of(lambda name, parts=parts: torch.empty(parts[name].shape, device="meta"))  # type: ignore[misc]
        found |= {name: Converted(name, tuple(like.shape), made, parts) for name, like in shapes.items()}
    return found


def safetensors_index(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, of a Hugging Face folder with one safetensors file or several."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / WEIGHTS_FILE
    if not single.is_file():
        raise FileNotFoundError(f"no {WEIGHTS_FILE} or {INDEX_FILE} in {folder}; give a Hugging Face model folder")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
