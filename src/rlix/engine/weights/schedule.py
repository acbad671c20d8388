"""A plan's transfers in buckets and rounds: who writes and reads what, where and in which order. Pure.

A *load* is what a source has for the same targets in one round: a part of a bucket in memory that it shares with those
on its node, each box written once for all that read it there, or a message to one target. All sources end a round at
the same tensor. So whoever takes the loads of all sources in their order never waits for one that waits for another of
its own, also where sources must compute a tensor together before they can send it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal

from rlix.engine.weights.buckets import ALIGNMENT, Run, WeightEntry, itemsize, runs_of
from rlix.engine.weights.layout import Box, divided, elements
from rlix.engine.weights.plan import Transfer

Way = Literal["shm", "ipc", "p2p"]
"""Host memory shared on a node, memory of one GPU shared by processes (CUDA IPC), or messages (gloo, NCCL)."""

_Key = tuple[int, Way, int]  # of a stream: its source, the way, and of messages the target
_Row = tuple[tuple[int, ...], WeightEntry]  # and who reads it


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What the same targets read of a bucket, from byte `start` of it on; `runs` copy all of it."""

    round: int
    source: int
    way: Way
    targets: tuple[int, ...]
    start: int
    entries: tuple[WeightEntry, ...]
    runs: tuple[Run, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", runs_of(self.entries))

    @property
    def nbytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].nbytes

    def only(self, names: Collection[str] | None) -> "Load | None":
        """What of it moves when only tensors of these names do; nothing else changes its place."""
        kept = tuple(entry for entry in self.entries if names is None or entry.name in names)
        return self if len(kept) == len(self.entries) else replace(self, entries=kept) if kept else None


@dataclass(slots=True)
class _Stream:
    """What one source writes in one way, in messages to one target."""

    round: int = 0
    end: int = 0  # of what is in the current round's bucket


def schedule(
    transfers: Sequence[Transfer],
    shapes: Mapping[str, tuple[int, ...]],
    way: Callable[[int, int], Way],
    bucket_bytes: int,
    first_target: int,
) -> tuple[Load, ...]:
    """The loads, in order of rounds and sources; in them targets are counted from `first_target`.

    `way` says how bytes go from a source to a target.
    """
    streams: defaultdict[_Key, _Stream] = defaultdict(_Stream)
    filled: defaultdict[tuple[int, _Key], list[_Row]] = defaultdict(list)
    current = 0
    for name, of_tensor in groupby(transfers, key=lambda transfer: transfer.name):
        boxes = _readers(of_tensor, way, first_target)
        entering = {key: sum(_aligned(box, dtype) for box, dtype in row) for key, row in boxes.items()}
        full = any(
            streams[key].round == current and streams[key].end and streams[key].end + size > bucket_bytes
            for key, size in entering.items()
        )
        current += full
        last = current
        for key, row in boxes.items():
            stream = streams[key]
            if stream.round < current:
                stream.round, stream.end = current, 0
            for (box, dtype), who in row.items():
                for part in divided(box, max(1, bucket_bytes // itemsize(dtype))):
                    size = _aligned(part, dtype)
                    if stream.end and stream.end + size > bucket_bytes:
                        stream.round, stream.end = stream.round + 1, 0
                    entry = WeightEntry(name, dtype, shapes[name], 0, 0, box=part)
                    filled[stream.round, key].append((tuple(who), entry))
                    stream.end += size
            last = max(last, stream.round)
        current = last
    return tuple(load for (number, key), rows in sorted(filled.items()) for load in _loads(number, key, rows))


def _loads(number: int, key: _Key, rows: Sequence[_Row]) -> Iterator[Load]:
    """One for each set of targets, so that what each of them reads lies together."""
    start = 0
    for targets, row in groupby(sorted(rows, key=itemgetter(0)), key=itemgetter(0)):
        end, entries = 0, []
        for _, entry in row:
            entries.append(replace(entry, offset=end))
            end += entry.nbytes + -entry.nbytes % ALIGNMENT
        yield Load(number, key[0], key[1], targets, start, tuple(entries))
        start += end


def _readers(
    transfers: Iterable[Transfer], way: Callable[[int, int], Way], first_target: int
) -> dict[_Key, dict[tuple[Box, str], list[int]]]:
    """Of one tensor: for each stream its boxes, and who reads each."""
    streams: dict[_Key, dict[tuple[Box, str], list[int]]] = {}
    for transfer in transfers:
        how = way(transfer.source, transfer.target)
        key = (transfer.source, how, -1 if how != "p2p" else transfer.target)
        streams.setdefault(key, {}).setdefault((transfer.box, transfer.dtype), []).append(
            first_target + transfer.target
        )
    return streams


def _aligned(box: Box, dtype: str) -> int:
    size = elements(box) * itemsize(dtype)
    return size + -size % ALIGNMENT
