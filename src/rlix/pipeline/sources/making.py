"""A step's samples in the making: its groups, spare ones among them, and others in place of what teaches nothing."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import tensor

from rlix.pipeline.algorithms.advantages import groups_with_spread
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import Sample

S = TypeVar("S", bound=Sample)


@dataclass(slots=True)
class Making:
    """`rounds` are the samples by group: first those of the step, then those drawn in place of the ones before;
    `looked_at`: in seconds with devices, when the loop that they are made on last did; `spare`: so many groups of the
    first round are not learnt from; `asked`: what each of their samples had generated, by group."""

    step: int
    further: int
    began: float
    looked_at: float
    spare: int = 0
    ended: float = 0.0
    rounds: list[list[list[Any]]] = field(default_factory=list)
    open: "dict[tuple[int, int], dict[str, asyncio.Task[Sample]]]" = field(default_factory=dict)
    asked: dict[int, list[list[Trajectory]]] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    flat: int = 0
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

    def needs_another(self, further: int, samples: Sequence[Sample]) -> bool:
        """Whether one is to be drawn in place of a group of that round: it is flat, and no spare one is left for it."""
        if further >= self.further or has_spread(samples):
            return False
        self.flat += further == 0
        return further > 0 or self.flat > self.spare

    def give_up_stragglers(self) -> None:
        """End the groups that cannot be among those of the step any more: enough shorter ones are there, and they only
        get longer. Which are left never depends on when anybody looks."""
        if not self.spare:
            return
        groups, needed = self.rounds[0], len(self.rounds[0]) - self.spare
        there = sorted(key for n in range(len(groups)) if groups[n] and not (key := self._rank(n))[0])
        if len(there) < needed:
            return
        for number in range(len(groups)):
            if not groups[number] and number not in self.given_up and self._rank(number) > there[needed - 1]:
                self.given_up.add(number)
                for episode in self.open[0, number].values():
                    episode.cancel()

    def leave_out_spare(self) -> None:
        """Keep of the first round what the step learns from."""
        groups = self.rounds[0]
        there = [number for number in range(len(groups)) if groups[number]]
        kept = sorted(there, key=self._rank)[: len(groups) - self.spare]
        self.rounds[0] = [groups[number] for number in sorted(kept)]

    def _rank(self, number: int) -> tuple[int, int, int]:
        """Of a group, the best first: whether something failed in it or it is flat, as far as it is there; the tokens
        that its longest sample had generated; its number."""
        samples = self.rounds[0][number]
        longest = max(sum(len(one.token_ids) for one in of_one) for of_one in self.asked[number])
        longest = max([longest, *(sample.generated for sample in samples)])
        failed, flat = any(sample.failed for sample in samples), self.further and samples and not has_spread(samples)
        return (2 if flat else int(failed)), longest, number

    def cancel(self) -> "list[asyncio.Task[Sample]]":
        """End the episodes that have not ended; all of them. One that was given up may still close its environment."""
        every = [episode for group in self.open.values() for episode in group.values()]
        for episode in every:
            if not episode.cancelling():
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
