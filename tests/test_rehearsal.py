"""What the rehearsal of shared jobs counts."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rehearsal import counted, lateness, spread_of, steps_per_h
from rlix.monitor.records import load_run
from tests.monitor.synthetic import write_run


def test_only_what_was_late_while_steps_were_counted_counts(tmp_path: Path) -> None:
    late_s = (5.0, 7.0, 7.5, 9.0, 20.0)  # of decoding, since the job began
    metrics = [
        {"step": i, "time": 10.0 * i, "step_s": 10.0, "late_s": 0.5, "decode_late_s": late_s[i]} for i in range(5)
    ]
    record = counted(load_run(write_run(tmp_path / "run", events=[], metrics=metrics)), 10.0, 20.0)
    assert [row["step"] for row in record.metrics] == [1, 2, 3]
    assert steps_per_h(record) == pytest.approx(2 * 3600 / 20.0)
    assert lateness([record, record]) == pytest.approx((2 * 0.5 + 9.0 - 7.0) / 20.0)


def test_how_much_lengths_spread_is_told_by_the_longest() -> None:
    lengths = np.random.default_rng(0).lognormal(1.0, 0.5, (2000, 128))
    assert spread_of(float(lengths.max(1).mean() / lengths.mean()), 128) == pytest.approx(0.5, rel=0.05)
