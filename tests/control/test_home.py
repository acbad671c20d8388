"""An RLIX_HOME that cannot be used is one sentence, whichever command meets it."""

import errno
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import typer
from ray.exceptions import RayTaskError
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.cli.mistakes import one_message_per_mistake
from rlix.control.announcement import find_or_start_daemon, read_announcement
from rlix.control.home import check_folders, in_home
from rlix.control.init import init
from rlix.control.journal import JournalError
from rlix.control.settings import Settings
from rlix.node.device_lock import DeviceLocks, holder
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Fence

NOBODY = 65534
CANNOT = "RLIX_HOME, .*, cannot be used \\(it is no folder\\): set RLIX_HOME to a folder of yours"


def test_a_home_that_can_be_used_is_made_and_left_empty(tmp_path: Path) -> None:
    check_folders(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("use", [read_announcement, check_folders, lambda home: find_or_start_daemon(home, 1)])
def test_a_file_is_no_home(tmp_path: Path, use: object) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(SpecError, match=CANNOT):
            use(home)  # type: ignore[operator]


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_of_locks_that_cannot_be_used_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLIX_LOCK_DIR", str(tmp_path / "file" / below))
    said = r"^RLIX_LOCK_DIR, .*, cannot be used \(it is no folder\): set RLIX_LOCK_DIR to a folder that every user"
    with pytest.raises(SpecError, match=said):
        find_or_start_daemon(tmp_path / "home", 1)
    with pytest.raises(SpecError, match=said):
        init(settings=Settings(home=tmp_path / "home", ray_address="local"), virtual_gpus=1)
    with pytest.raises(SpecError, match=said):
        DeviceLocks(["virtual-0"]).acquire(Fence("pool", 1), 1.0)
    with pytest.raises(SpecError, match=said):
        holder("virtual-0")


def test_a_private_control_plane_needs_one_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=CANNOT):
        init(settings=Settings(home=tmp_path / "file", ray_address="local"), virtual_gpus=1)


@pytest.mark.parametrize("command", [("status",), ("stop", "--all"), ("down",), ("watch",)])
def test_commands_that_only_look_say_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLIX_HOME", str(tmp_path / "file"))
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code == 2
    assert "set RLIX_HOME to a folder of yours" in result.stderr
    assert "Traceback" not in result.stderr


def test_another_users_home_is_named_with_its_owner(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    if os.getuid() != 0:
        home.chmod(0)
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_as_nobody, args=(home, there))
    child.start()
    child.join()
    said = here.recv()
    assert "cannot be used (Permission denied; /" in said
    assert "'s): set RLIX_HOME to a folder of yours" in said


def _as_nobody(home: Path, there: Connection) -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)
    try:
        check_folders(home)
    except SpecError as error:
        there.send(str(error))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(SpecError, match=r"^the disk of RLIX_HOME, .*, is full: free some space there"):
        check_folders(tmp_path)


def test_what_is_no_folders_fault_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), in_home(tmp_path):
        raise ValueError("mine")


def test_what_an_actor_raised_is_said_without_rays_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    said = JournalError("cannot write to the journal: the disk is full")
    outer = RayTaskError("register", "Traceback (most recent call last): ...", said).as_instanceof_cause()
    with pytest.raises(typer.Exit), one_message_per_mistake():
        raise outer
    assert capsys.readouterr().err == "rlix: cannot write to the journal: the disk is full\n"
