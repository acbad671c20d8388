"""Between the tensors of a checkpoint and those of a model in memory, which transformers renames, fuses and splits.

A mixture of experts has a tensor for each expert in a checkpoint, and one for all of them in memory. Which goes where
is transformers' own conversion mapping; this applies it one tensor after the other, so that few are there at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class Made:
    """Tensors of a model in memory that are made together, of tensors that a checkpoint has by these names.

    Attributes:
        key: what transformers calls them between the two.
        names: in the checkpoint, by the converter's patterns, in order.
    """

    key: str
    converter: WeightConverter
    names: Mapping[str, Sequence[str]]
    model: torch.nn.Module

    @property
    def stacks(self) -> bool:
        """Whether each row of what is made is made of one tensor for each pattern, as experts are."""
        first, *more = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in more)
        )

    def of(self, read: Callable[[str], torch.Tensor], rows: slice | None = None) -> dict[str, torch.Tensor]:
        """What they are by their names in memory; with `rows`, where it `stacks`, only these of the first dimension."""
        converter = deepcopy(self.converter)
        for pattern, names in self.names.items():
            for name in names[rows or slice(None)]:
                converter.add_tensor(self.key, name, pattern, read(name))
        made = converter.convert(self.key, model=self.model, config=getattr(self.model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def in_memory(model: torch.nn.Module, stored: Iterable[str], known: Iterable[str]) -> tuple[dict[str, str], list[Made]]:
    """Names in memory of a checkpoint's tensors that are taken as they are, and how the others are made.

    Args:
        stored: the checkpoint's names.
        known: the model's, of which one that is stored needs no conversion.
    """
    renamings, converters = _split(_transforms(model))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    here = frozenset(known)
    plain: dict[str, str] = {}
    groups: dict[str, tuple[WeightConverter, defaultdict[str, list[str]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters)
        if key not in here and name in here:
            key, pattern = name, None
        if pattern is None:
            plain[name] = key
        else:
            groups.setdefault(key, (by_pattern[pattern], defaultdict(list)))[1][pattern].append(name)
    return plain, [Made(key, converter, dict(names), model) for key, (converter, names) in groups.items()]


def as_stored(model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model in memory as a checkpoint has them: those of single experts are views of the whole."""
    forward = [transform for transform in _transforms(model) if not isinstance(transform, PrefixChange)]
    renamings, converters = _split([transform.reverse_transform() for transform in reversed(forward)])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    waiting: dict[str, WeightConverter] = {}
    for name, tensor in named:
        key, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            yield key, tensor
        elif _unstacks(converter := by_pattern[pattern]):
            yield from _experts(converter.target_patterns, key, tensor)
        else:
            waiting.setdefault(key, deepcopy(converter)).add_tensor(key, name, pattern, tensor)
            if len(converter.source_patterns) == 1 and "*" not in pattern:
                yield from _converted(waiting.pop(key), key, model)
    for key, converter in waiting.items():
        yield from _converted(converter, key, model)


def _transforms(model: torch.nn.Module) -> list[Any]:
    return get_model_conversion_mapping(model, add_legacy=False) if isinstance(model, PreTrainedModel) else []


def _split(transforms: Iterable[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    rows = list(transforms)
    renamings = [transform for transform in rows if isinstance(transform, WeightRenaming)]
    return renamings, [transform for transform in rows if isinstance(transform, WeightConverter)]


def _unstacks(converter: WeightConverter) -> bool:
    """Whether it is the reverse of what `Made.stacks`: each part of what it makes is a box of what it is made of."""
    *chunks, last = converter.operations
    return (
        isinstance(last, SplitModulelist)
        and last.dim == 0
        and len(chunks) == (len(converter.target_patterns) > 1)
        and all(isinstance(chunk, Chunk) and chunk.dim == 1 for chunk in chunks)
    )


def _experts(patterns: Sequence[str], key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    before, _, after = key.partition(patterns[0])
    for number, expert in enumerate(tensor):
        for pattern, part in zip(patterns, expert.chunk(len(patterns)), strict=True):
            yield before + pattern.replace("*", str(number)) + after, part


def _converted(converter: WeightConverter, key: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    made = converter.convert(key, model=model, config=getattr(model, "config", None))
    for name, value in made.items():
        yield name, value[0] if isinstance(value, list) else value
