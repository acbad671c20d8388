"""What the benchmark of a mixed pool starts: no program waits for who reads what it prints, or outlives its bound."""

import sys
from pathlib import Path

import pytest

from benchmarks import mixed_pool


def test_a_program_that_prints_much_waits_for_no_reader(tmp_path: Path) -> None:
    running = mixed_pool.Terminal(tmp_path / "own").start(sys.executable, "-S", "-c", "print('x' * 200_000)")
    assert running.process.wait(300) == 0
    assert len(running.end()) == 200_001


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("TIMEOUT_S", "POOL_TIMEOUT_S"):
        monkeypatch.setattr(mixed_pool, bound, 0.01)
    terminal = mixed_pool.Terminal(tmp_path / "own")
    for end, said in ((mixed_pool.Running.end, "none within"), (terminal.await_pool, "started no control plane")):
        running = terminal.start(sys.executable, "-S", "-c", "import time; time.sleep(600)")
        with pytest.raises(SystemExit, match=said):
            end(running)
        assert running.process.returncode is not None
