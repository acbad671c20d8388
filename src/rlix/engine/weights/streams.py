"""The two sides of a transfer through an open channel: sources fill buckets, targets read them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from rlix.engine.weights.buckets import WeightEntry, fill, part_of
from rlix.engine.weights.channel import SLOTS, Delivery, Member, joined, synchronize
from rlix.engine.weights.layout import Box, Piece, common, extent, moved, whole
from rlix.engine.weights.schedule import Load
from rlix.protocol.errors import WeightSyncError

Held = Sequence[tuple[Piece, torch.Tensor]]
"""What a process holds of one tensor: pieces, and the local tensors that they lie in."""


def send(delivery: Delivery, weights: Iterable[tuple[str, Callable[[], Held]]]) -> None:
    """Write the buckets of a source; `weights` are asked for one by one, each once, in the order of the plan.

    Raises as `Member.transfer`, and TransferError when a target has gone, or is late.
    """
    member = joined(delivery)
    with member.transfer(delivery) as loads:
        due: defaultdict[str, list[tuple[Load, WeightEntry]]] = defaultdict(list)
        for load in loads:
            for entry in load.entries:
                due[entry.name].append((load, entry))
        writer = _Writer(member)
        for name, held in weights:
            if delivery.names is None or name in delivery.names:
                writer.write(due[name], held())
        writer.finish()


class _Writer:
    """Fills the buckets of one round after the other."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._round = -1
        self._open: dict[int, tuple[Load, list[WeightEntry], list[torch.Tensor]]] = {}
        self._unread: list[tuple[Load, torch.Tensor]] = []

    def write(self, due: Sequence[tuple[Load, WeightEntry]], held: Held) -> None:
        for load, entry in due:
            if load.round > self._round:
                self._flush()
                self._round = load.round
            _, entries, tensors = self._open.setdefault(id(load), (load, [], []))
            entries.append(entry)
            tensors.append(cut_out(entry.box or whole(entry.shape), held))

    def finish(self) -> None:
        """Until every target has taken everything."""
        self._flush()
        self._reclaim(self._round)

    def _flush(self) -> None:
        self._reclaim(self._round - SLOTS)
        with torch.no_grad():
            for load, entries, tensors in self._open.values():
                bucket = self._member.bucket(load)
                staged = bucket
                if bucket.device != tensors[0].device:  # one transfer between devices instead of one for each tensor
                    staged = torch.empty_like(bucket, device=tensors[0].device)
                fill(staged, entries, tensors)
                if staged is not bucket:
                    bucket.copy_(staged)
                synchronize(self._member.device)
                self._member.send(load, bucket)
                self._unread.append((load, bucket))
        self._open.clear()

    def _reclaim(self, last: int) -> None:
        """Wait until the buckets of all rounds up to `last` have been taken."""
        for load, _ in self._unread:
            if load.round <= last:
                self._member.await_taken(load)
        self._unread = [(load, bucket) for load, bucket in self._unread if load.round > last]


def cut_out(box: Box, held: Held) -> torch.Tensor:
    """A box out of the local tensor that it lies in.

    Raises:
        WeightSyncError: it is in none of them.
    """
    for piece, tensor in held:
        if piece.box == box:
            return part_of(tensor, piece.at, extent(box))
        if common(piece.box, box) == box:
            return part_of(tensor, moved(box, piece), extent(box))
    raise WeightSyncError(f"{box} is not held here: weights are laid out in another way than when they were planned")


def receive(delivery: Delivery) -> Iterator[tuple[torch.Tensor, list[WeightEntry]]]:
    """The buckets of a target, one after the other; each may be written to again as soon as the next one is asked for.

    Raises as `Member.transfer`, and TransferError when a source has gone, or is late.
    """
    member = joined(delivery)
    with member.transfer(delivery) as loads:
        for load in loads:
            yield member.receive(load), list(load.entries)
            member.taken(load)


def expected(delivery: Delivery) -> Collection[WeightEntry]:
    """All that this member will receive."""
    loads = (each.only(delivery.names) for each in joined(delivery).ticket.loads)
    return [entry for load in loads if load is not None for entry in load.entries]
