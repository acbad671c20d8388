"""Every plan there is for a small flow, each played through chunk by chunk; shares no code with the planner."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product

from rlix.flow.planner import Component, Edge

INFINITE = float("inf")


def fastest(parts: list[Component], edges: list[Edge], items: int, devices: int, room: float) -> float:
    return min((seconds for seconds in _all(parts, edges, items, devices, room)), default=INFINITE)


def _all(parts: list[Component], edges: list[Edge], items: int, devices: int, room: float) -> Iterator[float]:
    count = len(parts)
    for where in product(product(range(count), repeat=2), repeat=count):  # a segment and a stage for each part
        place = {part.name: w for part, w in zip(parts, where, strict=True)}
        segments = sorted({s for s, _ in where})
        stages = sorted(set(where))
        if segments != list(range(len(segments))) or any(_gap(stages, s) for s in segments):
            continue
        if any(place[e.source] > place[e.target] for e in edges):
            continue
        if any(_alone(stages, s) and sum(w[0] == s for w in where) > 1 for s in segments):
            continue  # the same as segments of one part each
        for shares in product(range(1, devices + 1), repeat=len(stages)):
            given = dict(zip(stages, shares, strict=True))
            if any(sum(n for st, n in given.items() if st[0] == s) > devices for s in segments):
                continue
            for chunks in product([d for d in range(1, items + 1) if items % d == 0], repeat=len(segments)):
                if any(_alone(stages, s) and chunks[s] != 1 for s in segments):
                    continue
                if any(items // chunks[place[part.name][0]] % part.chunk for part in parts):
                    continue
                yield _play(parts, edges, items, place, given, chunks, room)


def _play(
    parts: list[Component],
    edges: list[Edge],
    items: int,
    place: Mapping[str, tuple[int, int]],
    given: Mapping[tuple[int, int], int],
    chunks: tuple[int, ...],
    room: float,
) -> float:
    ranks = {p.name: given[place[p.name]] // p.unit for p in parts}
    if any(n == 0 for n in ranks.values()):
        return INFINITE
    size = {s: items // m for s, m in enumerate(chunks)}
    seconds, swaps = {}, {}
    for stage in given:
        mine = [p for p in parts if place[p.name] == stage]
        held = sum(_best(p, ranks[p.name], size[stage[0]], room)[1] for p in mine)
        work = max(_best(p, ranks[p.name], size[stage[0]], room)[2] for p in mine)
        swaps[stage] = len(mine) > 1 and held + work > room
        seconds[stage] = sum(_best(p, ranks[p.name], size[stage[0]], room)[0] for p in mine)
        seconds[stage] += sum(p.switch_s for p in mine) if swaps[stage] else 0.0
        inside = [e for e in edges if place[e.target] == stage and place[e.source][0] == stage[0]]
        seconds[stage] += sum(e.latency_s + e.item_s * size[stage[0]] for e in inside if place[e.source] != stage)
    total = 0.0
    for segment, m in enumerate(chunks):
        mine = [stage for stage in given if stage[0] == segment]
        done: dict[tuple[tuple[int, int], int], float] = {}
        for chunk in range(m):
            for stage in sorted(mine):
                before = {place[e.source] for e in edges if place[e.target] == stage and not e.ahead}
                before &= set(mine) - {stage}
                start = max([done.get((stage, chunk - 1), 0.0), *(done[b, chunk] for b in before)])
                done[stage, chunk] = start + seconds[stage]
        total += max(done.values())
    apart = any(not _alone(list(given), s) for s in range(len(chunks)))
    crossing = [e for e in edges if place[e.source][0] != place[e.target][0]]
    total += sum(e.latency_s + e.item_s * items for e in crossing) if apart else 0.0
    if len(chunks) > 1:
        total += _switching(parts, place, given, ranks, size, swaps, room)
    return total


def _switching(parts, place, given, ranks, size, swaps, room) -> float:  # type: ignore[no-untyped-def]
    held: dict[int, float] = {}
    load: dict[int, float] = {}
    work = 0.0
    for stage in given:
        mine = [p for p in parts if place[p.name] == stage]
        costs = [_best(p, ranks[p.name], size[stage[0]], room) for p in mine]
        held[stage[0]] = max(held.get(stage[0], 0.0), sum(c[1] for c in costs))
        work = max(work, *(c[2] for c in costs))
        once = 0.0 if swaps[stage] else sum(p.switch_s for p in mine)
        load[stage[0]] = max(load.get(stage[0], 0.0), once)
    if not any(swaps.values()) and sum(held.values()) + work <= room:
        return 0.0
    return sum(load.values())


@lru_cache(1000)
def _best(part: Component, ranks: int, items: int, room: float) -> tuple[float, float, float]:
    """Seconds, resident bytes and what work needs more, on the best number of these ranks."""
    found = (INFINITE, 0.0, 0.0)
    for n in range(1, min(ranks, items, part.most or ranks) + 1):
        peak, held = float(part.table.peak_bytes([n], items)[0]), float(part.table.resident_bytes([n])[0])
        seconds = part.table.seconds(n, items)
        if (n in part.widths or not part.widths) and max(peak, held) <= room and seconds < found[0]:
            found = (seconds, held, max(peak, held) - held)
    return found


def _gap(stages: list[tuple[int, int]], segment: int) -> bool:
    numbers = [stage for s, stage in stages if s == segment]
    return numbers != list(range(len(numbers)))


def _alone(stages: list[tuple[int, int]], segment: int) -> bool:
    return sum(s == segment for s, _ in stages) == 1
