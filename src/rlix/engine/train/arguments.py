"""What each rank of a layout is called with: the arguments, or its part of those that are split over the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlix.engine.parallel import Items, scatter
from rlix.engine.train.layout import Layout
from rlix.workers.per_rank import PerRank


@dataclass(frozen=True, slots=True)
class Given:
    """`parts`: by rank, which part of the batch it computes on; `items`: which items each part has."""

    args: PerRank
    kwargs: PerRank
    items: Items | None
    parts: Sequence[int]


def for_ranks(layout: Layout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """Raises ValueError as `scatter`."""
    scattered = scatter(args, dict(kwargs), layout.data)
    parts = [layout.data_part(rank) for rank in range(layout.world)]
    return Given(
        PerRank([scattered.args[part] for part in parts]),
        PerRank([scattered.kwargs[part] for part in parts]),
        scattered.items,
        parts,
    )
