"""A plan's transfers in buckets and rounds: who writes and reads what, where and in which order. Pure.

A *load* is one bucket that a source fills in one round: in memory that it shares with the targets on its node, each box
written once for all that read it there, or in a message to one target. All sources end a round at the same tensor. So
whoever takes the loads of all sources in the order of rounds never waits for one that waits for another of its own,
also where sources must compute a tensor together before they can send it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from rlix.engine.weights.buckets import ALIGNMENT, WeightEntry, itemsize
from rlix.engine.weights.layout import Box, divided, elements
from rlix.engine.weights.plan import Transfer

Way = Literal["shm", "ipc", "p2p"]
"""Host memory shared on a node, memory of one GPU shared by processes (CUDA IPC), or messages (gloo, NCCL)."""

_Key = tuple[int, Way, int]  # of a stream: its source, the way, and of messages the target


@dataclass(frozen=True, slots=True)
class Load:
    """One bucket. `readers` has, for each entry, the targets that need it."""

    round: int
    source: int
    way: Way
    targets: tuple[int, ...]
    entries: tuple[WeightEntry, ...]
    readers: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].nbytes

    def only(self, names: Collection[str] | None) -> "Load | None":
        """What of it moves when only tensors of these names do; nothing else changes its place."""
        if names is None:
            return self
        kept = [(entry, who) for entry, who in zip(self.entries, self.readers, strict=True) if entry.name in names]
        if not kept:
            return None
        entries, readers = (tuple(column) for column in zip(*kept, strict=True))
        return replace(self, targets=_everyone(readers), entries=entries, readers=readers)

    def read_by(self, target: int) -> "Load | None":
        """As one target sees it."""
        kept = [entry for entry, who in zip(self.entries, self.readers, strict=True) if target in who]
        return replace(self, targets=(target,), entries=tuple(kept), readers=((target,),) * len(kept)) if kept else None


@dataclass(slots=True)
class _Stream:
    """What one source writes for one group of readers."""

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
    filled: defaultdict[tuple[int, _Key], list[tuple[WeightEntry, tuple[int, ...]]]] = defaultdict(list)
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
                    entry = WeightEntry(name, dtype, shapes[name], 0, stream.end, box=part)
                    filled[stream.round, key].append((entry, tuple(who)))
                    stream.end += size
            last = max(last, stream.round)
        current = last
    return tuple(
        Load(number, key[0], key[1], _everyone(who for _, who in rows), *(tuple(c) for c in zip(*rows, strict=True)))
        for (number, key), rows in sorted(filled.items())
    )


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


def _everyone(readers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({target for who in readers for target in who}))
