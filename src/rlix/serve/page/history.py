"""Devices over time, by the leases that were given: folded from the control plane's records, bounded in memory, and
told in as many numbers as a page can draw, however many devices there are."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlix.protocol.messages import LeaseRecord

LANES = 64
"""So many rows are drawn at most; where there are more devices, neighbours share one."""
BINS = 120
"""So many parts a stretch of time has at most, where single leases are too many to tell."""
EXACT = 4000
"""So many single leases are told at most."""
SHOWN = 2
"""In one part of a lane so many jobs and phases are told; the others together."""
OTHERS = "others"
_BIN_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_KEPT = 300_000  # leases of devices that have ended
_KEPT_S = 86400.0

Past = tuple[float, float, str, str]
"""From when to when, of which pipeline, in which phase."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Of which devices, as "8–15"."""

    label: str
    devices: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows are (lane, pipeline, phase, from, to, share of the lane), with indices into the names, in unix seconds."""

    start: float
    end: float
    lanes: tuple[Lane, ...]
    pipelines: tuple[str, ...]
    phases: tuple[str, ...]
    rows: list[tuple[int, int, int, float, float, float]] = field(default_factory=list)


class History:
    """Takes records in any portions; one that it has had changes nothing."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._most = kept
        self._past: dict[int, list[Past]] = defaultdict(list)  # by device, in order of their ends
        self._kept = 0
        self._open: dict[int, dict[int, tuple[float, str, str]]] = defaultdict(dict)  # by device and epoch
        self._last: dict[str, int] = {}  # number of the last record, by pipeline

    def take(self, records: Iterable[LeaseRecord]) -> None:
        for record in sorted(records, key=lambda record: (record.time, record.number)):
            lease = record.lease
            if record.number <= self._last.get(lease.pipeline_id, -1):
                continue
            self._last[lease.pipeline_id] = record.number
            for device in lease.devices:
                if record.event == "granted":
                    self._open[device][lease.epoch] = (record.time, lease.pipeline_id, lease.phase.name.lower())
                elif record.event == "released":
                    self._end(device, lease.epoch, record.time)
        if self._kept > self._most:
            self._forget()

    def only(self, epochs: Collection[int], now: float) -> None:
        """These leases are held, and no others: a control plane that went took its records with it."""
        gone = [(device, epoch) for device, held in self._open.items() for epoch in held if epoch not in epochs]
        for device, epoch in gone:
            self._end(device, epoch, now)

    def since(self) -> int:
        """The number of a record from which on they should be read: a little before the last, for pipelines' records
        do not come in one order."""
        newest = max(self._last.values(), default=0)
        if len(self._last) > 4096:
            self._last = {id: number for id, number in self._last.items() if number > newest - int(3600e6)}
        return max(0, newest - 1_000_000)

    def told(self, devices: Sequence[int], start: float, end: float, whole_s: float) -> Timeline:
        """What a page draws of a stretch from `start` on; of `whole_s` seconds, or the newest part of so much."""
        size = max(1, math.ceil(len(devices) / LANES))
        groups = [devices[first : first + size] for first in range(0, len(devices), size)]
        lanes = tuple(Lane(str(g[0]) if len(g) == 1 else f"{g[0]}–{g[-1]}", len(g)) for g in groups)
        found = [[each for device in group for each in self._of(device, start, end)] for group in groups]
        pipelines = (*sorted({each[2] for lane in found for each in lane}), OTHERS)
        phases = (*sorted({each[3] for lane in found for each in lane}), "")
        jobs, names = {id: i for i, id in enumerate(pipelines)}, {phase: i for i, phase in enumerate(phases)}
        timeline = Timeline(start, end, lanes, pipelines, phases)
        if size == 1 and sum(map(len, found)) <= EXACT:
            for lane, mine in enumerate(found):
                timeline.rows.extend((lane, jobs[id], names[phase], a, b, 1.0) for a, b, id, phase in mine)
            return timeline
        bin_s = next((s for s in _BIN_S if s * BINS >= whole_s), whole_s / BINS)
        for lane, (group, mine) in enumerate(zip(groups, found, strict=True)):
            for id, phase, a, b, share in _merged(_binned(mine, start, end, bin_s, len(group)), start, bin_s, end):
                timeline.rows.append((lane, jobs[id], names[phase], a, b, share))
        return timeline

    def aligned(self, at: float, whole_s: float) -> float:
        """The begin of the part of time in which this is."""
        bin_s = next((s for s in _BIN_S if s * BINS >= whole_s), whole_s / BINS)
        return at // bin_s * bin_s

    def _of(self, device: int, start: float, end: float) -> Iterator[Past]:
        past = self._past.get(device, [])
        for a, b, id, phase in past[bisect_right(past, start, key=lambda each: each[1]) :]:
            if a < end:
                yield max(a, start), min(b, end), id, phase
        for a, id, phase in self._open.get(device, {}).values():
            if a < end:
                yield max(a, start), end, id, phase

    def _end(self, device: int, epoch: int, at: float) -> None:
        found = self._open[device].pop(epoch, None)
        if found is not None and at > found[0]:
            self._past[device].append((found[0], at, found[1], found[2]))
            self._kept += 1

    def _forget(self) -> None:
        """What ended more than a day ago, and of the rest, where it is still too much, the older half."""
        ends = sorted(each[1] for past in self._past.values() for each in past)
        cut = max(ends[len(ends) // 2], ends[-1] - _KEPT_S)
        for device in list(self._past):
            self._past[device] = [each for each in self._past[device] if each[1] > cut]
        self._kept = sum(map(len, self._past.values()))


def _binned(
    leases: Iterable[Past], start: float, end: float, bin_s: float, devices: int
) -> dict[tuple[str, str], list[float]]:
    """Of each job and phase, which share of the lane it had in each part of the time."""
    bins = max(1, math.ceil((end - start) / bin_s))
    sums: dict[tuple[str, str], list[float]] = {}
    for a, b, id, phase in leases:
        shares = sums.setdefault((id, phase), [0.0] * bins)
        for index in range(int((a - start) / bin_s), min(bins, int((b - start) / bin_s) + 1)):
            begin = start + index * bin_s
            finish = min(begin + bin_s, end)
            shares[index] += max(0.0, min(b, finish) - max(a, begin)) / ((finish - begin) * devices)
    return sums


def _merged(
    sums: dict[tuple[str, str], list[float]], start: float, bin_s: float, end: float
) -> Iterator[tuple[str, str, float, float, float]]:
    """The largest shares of each part, and the others together; parts that are alike as one."""
    bins = max((len(shares) for shares in sums.values()), default=0)
    going: dict[tuple[str, str], tuple[int, float]] = {}  # since which part with which share
    for index in range(bins + 1):
        now: dict[tuple[str, str], float] = {}
        if index < bins:
            there = sorted(((shares[index], key) for key, shares in sums.items() if shares[index] > 0), reverse=True)
            now = {key: round(share, 2) for share, key in there[:SHOWN]}
            if rest := round(sum(share for share, _ in there[SHOWN:]), 2):
                now[OTHERS, ""] = rest
        for key, (since, share) in list(going.items()):
            if now.get(key) != share:
                yield *key, start + since * bin_s, min(end, start + index * bin_s), share
                del going[key]
        for key, share in now.items():
            if share > 0:
                going.setdefault(key, (index, share))
