"""Numbers that parts log: of each name the mean of a step counts, over calls and ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any

Sums = dict[str, tuple[float, int]]
"""By name: the sum, and of how many."""


def log(sums: Sums, values: Mapping[str, Any]) -> None:
    """Adds numbers, or tensors of one. Raises TypeError: one is neither."""
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # as torch says it of a tensor of several
            raise TypeError(f"log({name}=...) takes a number, not {type(value).__name__}: {error}") from error
        total, count = sums.get(name, (0.0, 0))
        sums[name] = total + number, count + 1


def means(logged: Iterable[Sums]) -> dict[str, float]:
    sums: Sums = {}
    for each in logged:
        for name, (total, count) in each.items():
            before, others = sums.get(name, (0.0, 0))
            sums[name] = before + total, others + count
    return {name: total / count for name, (total, count) in sums.items()}


def named_apart(logged: Mapping[str, Iterable[Sums]], taken: Set[str]) -> dict[str, float]:
    """Each part's means. A name that several log, or that is `taken`, has its part's before it: `judge.loss`."""
    parts = {part: means(sums) for part, sums in logged.items()}
    counts = Counter(name for values in parts.values() for name in values)
    return {
        f"{part}.{name}" if name in taken or counts[name] > 1 else name: value
        for part, values in parts.items()
        for name, value in values.items()
    }
