"""Lives of a pool in which two or three faults overlap: what `python -m benchmarks.faults --virtual` does, a few."""

import logging

import pytest

from benchmarks.faults.virtual.faults import Kind, draws, live, name

LIVES = list(draws(24, seed=1))


@pytest.mark.parametrize(("seed", "kinds"), LIVES, ids=[name(kinds) for _, kinds in LIVES])
def test_faults_that_overlap_harm_nobody_but_whom_they_hit(seed: int, kinds: tuple[Kind, ...]) -> None:
    logging.getLogger("rlix").setLevel(logging.CRITICAL)
    verdict = live(seed, kinds)
    assert verdict.wrong == []
    assert verdict.faults == len(kinds)
