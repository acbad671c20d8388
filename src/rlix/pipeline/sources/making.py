"""A step's samples in the making: its groups, and those that are drawn in place of groups that teach nothing."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import tensor

from rlix.pipeline.algorithms.advantages import groups_with_spread
from rlix.pipeline.samples import Sample

S = TypeVar("S", bound=Sample)


@dataclass(slots=True)
class Making:
    """`rounds` are the samples by group: first those of the step, then those drawn in place of the ones before;
    `looked_at`: in seconds with devices, when the loop that they are made on last did."""

    step: int
    further: int
    began: float
    looked_at: float
    ended: float = 0.0
    rounds: list[list[list[Any]]] = field(default_factory=list)
    open: "dict[tuple[int, int], dict[str, asyncio.Task[Sample]]]" = field(default_factory=dict)
    made: "Future[None]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.rounds = [[] for _ in range(self.further + 1)]

    @property
    def samples(self) -> list[Any]:
        """Of all rounds."""
        return [sample for groups in self.rounds for group in groups for sample in group]

    @property
    def late(self) -> list[str]:
        """Ids of what has not ended."""
        return [id for group in self.open.values() for id, episode in group.items() if not episode.done()]

    def cancel(self) -> "list[asyncio.Task[Sample]]":
        """End the episodes that have not ended; all of them."""
        every = [episode for group in self.open.values() for episode in group.values()]
        for episode in every:
            episode.cancel()
        return every


def has_spread(group: Sequence[Sample]) -> bool:
    """Whether there is something to learn from a group: rewards (of samples that count) that differ."""
    rewards, counts = tensor([s.reward for s in group]), tensor([s.counts for s in group])
    return bool(groups_with_spread(rewards, len(group), counts=counts)[0])


def chosen(rounds: Sequence[Sequence[Sequence[S]]]) -> tuple[list[Sequence[S]], int]:
    """The groups that a step learns from, those without spread replaced as far as there is something in their place;
    and how many were. What is flat after the last round stays, so that a batch always has the same size.

    Which group replaces which depends on their numbers alone, never on when they ended.
    """
    kept, replaced = list(rounds[0]), 0
    if len(rounds) == 1:
        return kept, replaced
    flat = [number for number, group in enumerate(kept) if not has_spread(group)]
    for further in rounds[1:]:
        useful = [group for group in further if has_spread(group)]
        for number, group in zip(flat, useful, strict=False):
            kept[number] = group
        replaced += len(useful)
        flat = flat[len(useful) :]
    return kept, replaced
