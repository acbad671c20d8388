import multiprocessing
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rlix.workers.scratch import Scratch, sweep

SPAWNER = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_scratch_folder_goes_when_its_owner_says_so(temporary: Path) -> None:
    scratch = Scratch("job/actor_infer")
    folder = Path(scratch.name)
    assert folder.parent == temporary
    assert folder.name.startswith("rlix-job_actor_infer-")
    (folder / "vllm").mkdir()
    sweep()
    assert folder.is_dir()
    scratch.cleanup()
    scratch.cleanup()
    assert list(temporary.iterdir()) == []


def _own(temporary: Path, said: Connection) -> None:
    tempfile.tempdir = str(temporary)
    scratch = Scratch("killed")
    (Path(scratch.name) / "vllm-socket").write_text("")
    said.send(Path(scratch.name))
    signal.pause()


def test_the_next_one_removes_those_of_killed_owners_and_nothing_else(temporary: Path) -> None:
    here, there = SPAWNER.Pipe()
    owner = SPAWNER.Process(target=_own, args=(temporary, there))
    owner.start()
    try:
        assert here.poll(60)
        left = here.recv()
        alive = Scratch("alive")
        (temporary / "rlix-notes").mkdir()  # without a lock: not one of ours
        elsewhere = temporary / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / ".owner").write_text("")
        (temporary / "rlix-link").symlink_to(elsewhere)
        sweep()
        assert (left / "vllm-socket").exists()
    finally:
        owner.kill()
        owner.join()
    mine = Scratch("mine")
    assert {path.name for path in temporary.iterdir()} == {
        Path(alive.name).name,
        Path(mine.name).name,
        "rlix-notes",
        "rlix-link",
        "elsewhere",
    }
    assert (elsewhere / ".owner").exists()
