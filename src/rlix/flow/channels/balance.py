"""Batches of about equal weight."""

import heapq
from collections.abc import Sequence


def balanced(weights: Sequence[float], ways: int) -> list[list[int]]:
    """Indexes of `weights` in `ways` parts whose sums differ little: the heaviest first, each to the lightest part.

    No part is heavier than 4/3 of the best division's heaviest. Within a part, indexes ascend.
    """
    parts: list[list[int]] = [[] for _ in range(ways)]
    heap = [(0.0, 0, way) for way in range(ways)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        weight, count, way = heapq.heappop(heap)
        parts[way].append(index)
        heapq.heappush(heap, (weight + weights[index], count + 1, way))
    return [sorted(part) for part in parts]
