"""How the ranks of a training engine divide the work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks are numbered so that those that compute on one batch together are next to each other.

    `data`: parts a batch is split into. `tensor`: ranks that compute on one part together, each with a part of every
    layer. `shard`: how many of the data-parallel ranks hold one copy of weights and optimizer state between them
    (FSDP); there are `data / shard` copies.

    Raises:
        ValueError: a size below 1, or `shard` does not divide `data`.
    """

    data: int = 1
    tensor: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.shard) < 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor}, data_parallel_size={self.data}, shard={self.shard}: "
                "at least 1 each"
            )
        if self.data % self.shard:
            raise ValueError(f"shard={self.shard} does not divide data_parallel_size={self.data}")

    @property
    def world(self) -> int:
        return self.data * self.tensor

    @property
    def copy(self) -> int:
        """Ranks that hold one copy of the weights between them, best on one node."""
        return self.shard * self.tensor

    def data_part(self, rank: int) -> int:
        """Which part of a split batch a rank computes on."""
        return rank // self.tensor

    def data_ranks(self) -> list[list[int]]:
        """For each place in the tensor-parallel ranks: those that compute the same of different parts of a batch."""
        return [list(range(first, self.world, self.tensor)) for first in range(self.tensor)]

    def tensor_ranks(self) -> list[list[int]]:
        """For each part of a batch: the ranks that compute on it together."""
        return [list(range(first, first + self.tensor)) for first in range(0, self.world, self.tensor)]


def asked_layout(
    tensor_parallel_size: int, data_parallel_size: int | None, shard: int | None, devices: int | None
) -> Layout:
    """The sizes a user gave; data parallelism is as wide as `devices` (their number) allow, else as `shard`.

    Raises:
        ValueError: sizes and number of devices do not agree.
    """
    if any(size is not None and size < 1 for size in (tensor_parallel_size, data_parallel_size, shard)):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}, data_parallel_size={data_parallel_size}, shard={shard}: "
            "at least 1 each"
        )
    if data_parallel_size is None:
        width = shard or 1 if devices is None else max(devices // tensor_parallel_size, 1)
    else:
        width = data_parallel_size
    if devices is not None and devices != width * tensor_parallel_size:
        raise ValueError(
            f"{devices} device(s) do not fit tensor_parallel_size={tensor_parallel_size} x "
            f"data_parallel_size={data_parallel_size or 'any'}"
        )
    return Layout(width, tensor_parallel_size, shard or 1)
