"""Rows by the number of a group: every epoch all of them, none twice."""

from hypothesis import given
from hypothesis import strategies as st

from rlix.pipeline.sources.place import Place


@given(st.integers(1, 30), st.integers(0, 2**60), st.integers(0, 3))
def test_an_epoch_has_every_row_once(rows: int, seed: int, epoch: int) -> None:
    asked = [Place(number=epoch * rows + i, seed=seed).row(rows) for i in range(rows)]
    assert sorted(asked) == list(range(rows))


def test_orders_differ_by_epoch_and_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [Place(number=epoch * 20 + i, seed=seed).row(20) for i in range(20)]

    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert order(1, 0) == order(1, 0)
