"""Where a group of samples stands among all of its split: what whoever has its tasks in rows goes by."""

from dataclasses import dataclass
from functools import lru_cache

from rlix.pipeline.sources.tasks.base import random_stream

TRAIN, EVALUATION = "train", "evaluation"


@dataclass(frozen=True, slots=True)
class Place:
    """The same for all samples of a group. `split`: `train`, or `evaluation`, for which rows should be held out."""

    split: str = TRAIN
    number: int = 0
    """Of the group, counted from the split's first."""
    seed: int = 0
    """Of the order in which rows come."""

    def row(self, rows: int) -> int:
        """Which of so many rows is this group's: every epoch is a new shuffle of all of them."""
        epoch, at = divmod(self.number, rows)
        return _order(self.seed, epoch, rows)[at]


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, rows: int) -> list[int]:
    order = list(range(rows))
    random_stream("rows", seed, epoch).shuffle(order)
    return order
