"""Samples of one turn with given rewards."""

from collections.abc import Sequence

from rlix.pipeline.samples import Answer, End, Sample, Samples, Turn


def samples_of(rewards: Sequence[float], group_size: int, *, tokens: int | Sequence[int] = 1) -> Samples:
    """`tokens`: how many each has, or all."""
    lengths = [tokens] * len(rewards) if isinstance(tokens, int) else tokens
    turns = [Turn((3,), Answer((4,) * n, (-1.0,) * n, (0,) * n)) for n in lengths]
    made = [Sample(str(i), (turn,), r, None, End.DONE) for i, (turn, r) in enumerate(zip(turns, rewards, strict=True))]
    return Samples(made, group_size)
