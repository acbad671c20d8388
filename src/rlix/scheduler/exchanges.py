"""Bundles that a division would pass round in a circle, so that everybody ends with as many as before.

Who takes whose bundle is a graph over rollouts. A circle in it costs a load each and changes nothing, whatever the
policy meant by it; without it everybody in it keeps the bundle it has.
"""

from collections.abc import Mapping, Sequence


def circles(takes: Mapping[int, tuple[int, int]]) -> set[int]:
    """Which of these are left out so that no circle remains.

    `takes`: what names a bundle that changes hands -> (the rollout that has it, the rollout that is to have it).
    """
    onwards: dict[int, list[int]] = {}
    for bundle, (giver, _) in takes.items():
        onwards.setdefault(giver, []).append(bundle)
    left_out: set[int] = set()
    for start in [giver for giver in onwards if any(giver == taker for _, taker in takes.values())]:
        while circle := _circle(start, takes, onwards):
            for bundle in circle:
                onwards[takes[bundle][0]].remove(bundle)
            left_out.update(circle)
    return left_out


def _circle(start: int, takes: Mapping[int, tuple[int, int]], onwards: Mapping[int, Sequence[int]]) -> list[int]:
    """The bundles of a shortest circle through this rollout; none: []."""
    came_by: dict[int, int] = {}  # rollout -> the bundle that it is to have
    frontier = [start]
    for rollout in frontier:  # grows while it is walked
        for bundle in onwards.get(rollout, ()):
            taker = takes[bundle][1]
            if taker in came_by:
                continue
            came_by[taker] = bundle
            if taker == start:
                return _back(start, came_by, takes)
            frontier.append(taker)
    return []


def _back(start: int, came_by: Mapping[int, int], takes: Mapping[int, tuple[int, int]]) -> list[int]:
    found = [came_by[start]]
    while (giver := takes[found[-1]][0]) != start:
        found.append(came_by[giver])
    return found
