"""What is kept of a run's checkpoints."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlix.node.manifest import damage
from rlix.node.run_folder import RunFolder, list_checkpoints
from rlix.pipeline.jobs.checkpoints import Checkpoints
from rlix.pipeline.spec.evaluation import EvaluationSpec
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError


def write(path: Path) -> None:
    (path / "weights").write_text("1")


def opened(path: Path, *, resume: bool = False, saved: list[int] | None = None, **evaluation: object) -> Checkpoints:
    folder, _ = RunFolder.open(path, resume=resume)
    folder.close()
    spec = EvaluationSpec(every=1, **evaluation)  # type: ignore[arg-type]
    return Checkpoints(folder, 2, spec, lambda step, _: None if saved is None else saved.append(step))


def steps(path: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(path / "checkpoints")]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saved: list[int] = []
    made = opened(tmp_path, saved=saved)
    assert made.better(1, {"eval/reward": float("nan")}) is None
    for step, value in ((1, 0.1), (2, 0.7), (3, 0.7), (4, 0.2), (5, 0.3)):
        made.begin(step, write, made.better(step, {"eval/reward": value}))
    assert saved == [1, 2, 3, 4, 5]
    assert steps(tmp_path) == [2, 4, 5]
    best = tmp_path / "checkpoints" / "best"
    assert best.resolve() == tmp_path / "checkpoints" / "step_2"  # a tie stays with the older one
    again = opened(tmp_path, resume=True)
    assert again.better(6, {"eval/reward": 0.6}) is None
    assert again.better(6, {"reward": 0.9}) is None  # not evaluated at this step
    again.begin(6, write, again.better(6, {"eval/reward": 0.8}))
    assert steps(tmp_path) == [5, 6]
    assert (best / "weights").read_text() == "1"


def test_best_may_be_lowest_and_another_metric_begins_anew(tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.begin(1, write, made.better(1, {"eval/reward": 0.9}))
    lowest = opened(tmp_path, resume=True, best="eval/length", best_is="lowest")
    assert lowest.better(2, {"eval/length": 7.0}) is not None
    lowest.begin(2, write, lowest.better(2, {"eval/length": 7.0}))
    assert lowest.better(3, {"eval/length": 8.0}) is None
    assert lowest.better(3, {"eval/length": 6.0}) is not None
    assert opened(tmp_path, resume=True, best=None).better(3, {"eval/reward": 9.0}) is None


def test_a_metric_that_does_not_exist_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = opened(tmp_path, best="eval/acuracy")
    for step in (1, 2):
        assert made.better(step, {"eval/accuracy": 0.5}) is None
    assert caplog.text.count("there is no metric eval/acuracy, only eval/accuracy") == 1


class Slow:
    """A save that ends when a test says so."""

    def __init__(self, path: Path) -> None:
        self.folder, self.ended, self.failed = path / "state", False, False
        self.folder.mkdir()
        (self.folder / "state.json").write_text('{"world_size": 2}')
        for rank in range(2):
            (self.folder / f"rng_{rank}.json").touch()

    def done(self) -> bool:
        if self.failed:
            raise RlixError("rank 0 failed to save: No space left on device")
        return self.ended

    def wait(self, timeout_s: float) -> None:
        if not self.done():
            raise WaitTimeoutError(f"not complete within {timeout_s:g} s")


def slow(into: list[Slow]) -> Any:
    def begin(path: Path) -> list[Slow]:
        write(path)
        into.append(Slow(path))
        return into[-1:]

    return begin


def test_a_checkpoint_in_which_a_ranks_part_is_missing_does_not_count(tmp_path: Path) -> None:
    for lost in ("rng_1.json", "state.json"):
        made, savings = opened(tmp_path / lost), list[Slow]()
        made.begin(1, slow(savings))
        (savings[0].folder / lost).unlink()
        savings[0].ended = True
        with pytest.raises(RlixError, match=f"{lost} of .* did not come to host .*must share its run folder"):
            made.settle()
        assert steps(tmp_path / lost) == []


def test_a_checkpoint_counts_when_all_of_it_is_written(tmp_path: Path) -> None:
    saved: list[int] = []
    made, savings = opened(tmp_path, saved=saved), list[Slow]()
    best = made.better(1, {"eval/reward": 0.5})
    made.begin(1, slow(savings), best)
    made.look()
    assert (steps(tmp_path), saved) == ([], [])
    assert made.better(2, {"eval/reward": 0.4}) is None  # the one under way is the best
    savings[0].ended = True
    made.look()
    made.look()
    assert (steps(tmp_path), saved) == ([1], [1])
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_1"
    made.begin(2, slow(savings))
    savings[1].ended = True
    made.begin(3, slow(savings))  # waits for the one before
    assert steps(tmp_path) == [1, 2]
    with pytest.raises(WaitTimeoutError, match=r"not complete within 0\."):
        opened_clock(made).settle(0.5)
    made.settle()  # there is nothing left to wait for
    assert steps(tmp_path) == [1, 2]


def opened_clock(made: Checkpoints) -> Checkpoints:
    made._clock = lambda: 0.0
    return made


def test_a_save_that_fails_is_the_jobs_error_and_counts_for_nothing(tmp_path: Path) -> None:
    made, savings = opened(tmp_path), list[Slow]()
    made.begin(1, slow(savings))
    savings[0].failed = True
    with pytest.raises(RlixError, match="No space left"):
        made.look()
    assert steps(tmp_path) == []
    assert opened_after(tmp_path) is None


def opened_after(path: Path) -> int | None:
    folder, checkpoint = RunFolder.open(path, resume=True)
    folder.close()
    return None if checkpoint is None else checkpoint[0]


def test_a_checkpoint_that_lost_something_is_not_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = opened(tmp_path, resume=True)
    for step in (1, 2):
        made.begin(step, write)
    (tmp_path / "checkpoints" / "step_2" / "weights").write_text("")
    folder, checkpoint = RunFolder.open(tmp_path, resume=True)
    folder.close()
    assert checkpoint == (1, tmp_path / "checkpoints" / "step_1")
    assert folder.set_aside == ["step_2 is broken: weights has 0 of 1 bytes"]
    assert "step_2 is not gone on from" in caplog.text
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_1", "step_2.broken"}
    (tmp_path / "checkpoints" / "step_1" / "weights").unlink()
    with pytest.raises(SpecError, match=r"no checkpoint is whole \(step_1: weights is missing\); run without --resume"):
        RunFolder.open(tmp_path, resume=True)
    (tmp_path / "checkpoints" / "step_1" / "manifest.json").write_text("{")
    assert "manifest.json cannot be read" in str(damage(tmp_path / "checkpoints" / "step_1"))
    (tmp_path / "checkpoints" / "step_1" / "manifest.json").unlink()
    assert damage(tmp_path / "checkpoints" / "step_1") == "manifest.json is missing"


def test_the_same_step_may_be_broken_again(tmp_path: Path) -> None:
    for _ in range(2):
        made = opened(tmp_path, resume=True)
        for step in (1, 2):
            made.begin(step, write)
        (tmp_path / "checkpoints" / "step_2" / "weights").write_text("")
        assert opened_after(tmp_path) == 1
        shutil.rmtree(tmp_path / "checkpoints" / "step_1")


def test_a_death_while_the_best_is_marked_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(tmp_path)
    made.begin(1, write, made.better(1, {"eval/reward": 0.1}))
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(Path, "symlink_to", MagicMock(side_effect=KeyboardInterrupt))
        made.begin(2, write, made.better(2, {"eval/reward": 0.5}))
    again = opened(tmp_path, resume=True)
    assert again.better(3, {"eval/reward": 0.3}) is None
    for step in (3, 4, 5):
        again.begin(step, write)
    assert steps(tmp_path) == [1, 2, 4, 5]  # that which the link names, and that which is the best
    again.begin(6, write, again.better(6, {"eval/reward": 0.7}))
    assert steps(tmp_path) == [5, 6]
