"""How the ranks of a training engine divide the work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks are numbered so that those that compute on one batch together are next to each other.

    `data`: parts a batch is split into. `sequence`: ranks that compute on one part together, each on a stretch of every
    sequence; `tensor`: each with a part of every layer. `shard`: how many of the ranks that compute with whole layers
    hold one copy of weights and optimizer state between them (FSDP); there are `data * sequence / shard` copies.

    Raises:
        ValueError: a size below 1, or `shard` does not divide `data * sequence`.
    """

    data: int = 1
    tensor: int = 1
    shard: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.shard, self.sequence) < 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor}, sequence_parallel_size={self.sequence}, "
                f"data_parallel_size={self.data}, shard={self.shard}: at least 1 each"
            )
        if self.data * self.sequence % self.shard:
            times = f" x sequence_parallel_size={self.sequence}" if self.sequence > 1 else ""
            raise ValueError(f"shard={self.shard} does not divide data_parallel_size={self.data}{times}")

    @property
    def world(self) -> int:
        return self.data * self.together

    @property
    def together(self) -> int:
        """Ranks that compute on one part of a batch."""
        return self.tensor * self.sequence

    @property
    def copy(self) -> int:
        """Ranks that hold one copy of the weights between them, best on one node."""
        return self.shard * self.tensor

    def data_part(self, rank: int) -> int:
        """Which part of a split batch a rank computes on."""
        return rank // self.together

    def data_ranks(self) -> list[list[int]]:
        """For each place among those that compute together: those that do the same for different parts of a batch."""
        return [list(range(first, self.world, self.together)) for first in range(self.together)]

    def tensor_ranks(self) -> list[list[int]]:
        """For each stretch of each part of a batch: the ranks that compute on it, each with a part of every layer."""
        return [list(range(first, first + self.tensor)) for first in range(0, self.world, self.tensor)]

    def sequence_ranks(self) -> list[list[int]]:
        """For each part of a batch and of the layers: the ranks that compute on its stretches, in their order."""
        firsts = [part + place for part in range(0, self.world, self.together) for place in range(self.tensor)]
        return [list(range(first, first + self.together, self.tensor)) for first in firsts]


def asked_layout(
    tensor_parallel_size: int,
    data_parallel_size: int | None,
    shard: int | None,
    devices: int | None,
    sequence_parallel_size: int = 1,
) -> Layout:
    """The sizes a user gave; data parallelism is as wide as `devices` (their number) allow, else as `shard`.

    Raises:
        ValueError: sizes and number of devices do not agree.
    """
    given = (tensor_parallel_size, sequence_parallel_size, data_parallel_size, shard)
    if any(size is not None and size < 1 for size in given):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}, sequence_parallel_size={sequence_parallel_size}, "
            f"data_parallel_size={data_parallel_size}, shard={shard}: at least 1 each"
        )
    together = tensor_parallel_size * sequence_parallel_size
    if data_parallel_size is not None:
        width = data_parallel_size
    elif devices is not None:
        width = max(devices // together, 1)
    else:
        width = -(-(shard or 1) // sequence_parallel_size)
    if devices is not None and devices != width * together:
        sequences = f"sequence_parallel_size={sequence_parallel_size} x " if sequence_parallel_size > 1 else ""
        raise ValueError(
            f"{devices} device(s) do not fit tensor_parallel_size={tensor_parallel_size} x {sequences}"
            f"data_parallel_size={data_parallel_size or 'any'}"
        )
    return Layout(width, tensor_parallel_size, shard or 1, sequence_parallel_size)


def as_wide(layout: Layout, devices: int) -> Layout:
    """The same on another number of devices: one copy of the weights stays one copy.

    Raises:
        ValueError: as many ranks cannot be arranged so.
    """
    width = max(devices // layout.together, 1)
    sharded = width * layout.sequence if layout.copy == layout.world else layout.shard
    return Layout(width, layout.tensor, sharded, layout.sequence)
