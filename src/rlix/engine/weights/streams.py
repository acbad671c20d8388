"""The two sides of a transfer through an open channel: sources fill buckets, targets read them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from rlix.engine.weights.buckets import Contents, WeightEntry, fill, part_of
from rlix.engine.weights.channel import SLOTS, Delivery, Member, joined
from rlix.engine.weights.layout import Box, Piece, common, extent, moved, whole
from rlix.engine.weights.schedule import Load
from rlix.flow.memory import synchronize
from rlix.protocol.errors import WeightSyncError

Held = Sequence[tuple[Piece, torch.Tensor]]
"""What a process holds of one tensor: pieces, and the local tensors that they lie in."""


def send(delivery: Delivery, weights: Iterable[tuple[str, Callable[[], Held]]]) -> None:
    """Write the buckets of a source; `weights` are asked for one by one, each once, in the order of the plan.

    Raises as `Member.transfer`, and TransferError when a target has gone, or is late.
    """
    member = joined(delivery)
    with member.transfer(delivery) as loads:
        writer = _Writer(member, loads)
        for name, held in weights:
            if delivery.names is None or name in delivery.names:
                writer.write(name, held())
        writer.finish()


class _Writer:
    """Fills the buckets of one round after the other."""

    def __init__(self, member: Member, loads: Sequence[Load]) -> None:
        self._member = member
        self._rounds: defaultdict[int, list[tuple[Load, dict[int, torch.Tensor]]]] = defaultdict(list)
        self._due: defaultdict[str, list[tuple[int, dict[int, torch.Tensor], int, Box]]] = defaultdict(list)
        for load in loads:
            parts: dict[int, torch.Tensor] = {}  # by their places among the load's entries
            self._rounds[load.round].append((load, parts))
            for place, entry in enumerate(load.entries):
                self._due[entry.name].append((load.round, parts, place, entry.box or whole(entry.shape)))
        self._round = -1
        self._unread: list[tuple[Load, torch.Tensor]] = []

    def write(self, name: str, held: Held) -> None:
        for number, parts, place, box in self._due[name]:
            if number > self._round:
                self._flush()
                self._round = number
            parts[place] = cut_out(box, held)

    def finish(self) -> None:
        """Until every target has taken everything."""
        self._flush()
        self._reclaim(self._round)

    def _flush(self) -> None:
        self._reclaim(self._round - SLOTS)
        with torch.no_grad():
            for load, parts in self._rounds.pop(self._round, ()):
                tensors = [parts[place] for place in range(len(load.entries))]
                bucket = self._member.bucket(load)
                staged = bucket
                if bucket.device != tensors[0].device:  # one transfer between devices instead of one for each tensor
                    staged = torch.empty_like(bucket, device=tensors[0].device)
                fill(staged, load.runs, tensors)
                if staged is not bucket:
                    bucket.copy_(staged)
                synchronize(self._member.device)
                self._member.send(load, bucket)
                self._unread.append((load, bucket))

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


def receive(delivery: Delivery) -> Iterator[Contents]:
    """The buckets of a target, one after the other; each may be written to again as soon as the next one is asked for.

    Raises as `Member.transfer`, and TransferError when a source has gone, or is late.
    """
    member = joined(delivery)
    with member.transfer(delivery) as loads:
        for load in loads:
            flat = member.receive(load)
            if load not in member.read:
                member.read[load] = Contents(flat, load.entries, load.runs)
            yield member.read[load]
            member.taken(load)


def expected(delivery: Delivery) -> Collection[WeightEntry]:
    """All that this member will receive."""
    return [entry for load in joined(delivery).loads(delivery) for entry in load.entries]
