"""Arguments of a call that goes to several ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument with one value for each rank called, in the order of `ranks`."""

    values: Sequence[Any]


def pick(value: Any, index: int) -> Any:
    """What the rank of this number gets."""
    return value.values[index] if isinstance(value, PerRank) else value


def check_per_rank(where: str, ranks: int, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError: a `PerRank` has not one value for each of so many ranks."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, PerRank) and len(value.values) != ranks:
            raise ValueError(
                f"{where} goes to {ranks} rank(s), but a PerRank argument has {len(value.values)} value(s)"
            )
