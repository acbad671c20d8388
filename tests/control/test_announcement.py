"""A daemon is found, awaited and ended by its home: the claim and the announcement, without a daemon."""

import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rlix.cli.jobs import take_down
from rlix.control import announcement
from rlix.control.announcement import (
    Announcement,
    Claim,
    DeathNotice,
    await_end,
    await_start,
    find_or_start_daemon,
    is_claimed,
    note_end,
    read_announcement,
)
from rlix.protocol.errors import RlixError, WaitTimeoutError

READY = Announcement("127.0.0.1:1", 4711, 1e9, 2, "cpu", 30.0, None)


def test_a_daemon_that_starts_is_awaited_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    assert await_start(tmp_path) is None
    with contextlib.closing(Claim(tmp_path)) as claim:
        assert claim.take()
        with pytest.raises(WaitTimeoutError, match="no control plane was ready within 0 s in"):
            await_start(tmp_path, 0.0)
        found: list[Announcement | None] = []
        waiting = threading.Thread(target=lambda: found.append(await_start(tmp_path)))
        waiting.start()
        claim.announce(READY)
        waiting.join()
        assert found == [READY]
    assert await_start(tmp_path) is None  # what it has left deceives nobody


def test_a_daemon_has_its_claim_before_it_has_run_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    daemon = announcement._spawn(tmp_path / "home", 2)
    assert daemon is not None
    try:
        assert is_claimed(tmp_path / "home")
        assert announcement._spawn(tmp_path / "home", 2) is None
    finally:
        daemon.kill()
        daemon.wait()
    await_end(tmp_path / "home", 300.0)


def test_who_interrupts_a_start_leaves_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))

    def ctrl_c(_: float) -> None:
        assert is_claimed(tmp_path / "home")
        raise KeyboardInterrupt

    monkeypatch.setattr("rlix.control.announcement.time.sleep", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        find_or_start_daemon(tmp_path / "home", 2)
    monkeypatch.undo()
    await_end(tmp_path / "home", 300.0)


def test_a_home_is_claimed_until_the_process_is_gone_whatever_python_forgets(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    assert claim.take()
    descriptor = claim.descriptor
    del claim
    assert is_claimed(tmp_path)
    os.close(descriptor)  # what the kernel does at the end of the process
    assert not is_claimed(tmp_path)


@pytest.mark.parametrize(("left", "how"), [(False, "died"), (True, "died"), (False, "was ended by `rlix down`")])
def test_who_is_connected_to_a_daemon_is_told_at_once_how_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: bool, how: str
) -> None:
    note_end(tmp_path, replace(READY, started=0.0), "told to end")  # of an earlier one with that process id
    if how != "died":
        note_end(tmp_path, READY, how.removeprefix("was "))
    with contextlib.closing(Claim(tmp_path)) as claim:
        assert claim.take()
        notice = DeathNotice(tmp_path, READY)
        if left:
            notice.cancel()
            notice.thread.join(300.0)
    notice.thread.join(300.0)
    assert not notice.thread.is_alive()
    assert (f"the control plane (process 4711) {how}, and its Ray" in caplog.text) is not left


def test_down_waits_for_a_daemon_that_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLIX_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    awaited: list[Path] = []
    monkeypatch.setattr("rlix.cli.jobs.await_start", awaited.append)
    with contextlib.closing(Claim(tmp_path)) as claim:
        assert claim.take()
        assert take_down() == 0
        assert awaited == [tmp_path]
        assert "is starting or ending here" in capsys.readouterr().out
    assert take_down() == 0
    assert awaited == [tmp_path]
    assert "no control plane runs here" in capsys.readouterr().out


def test_a_home_of_another_host_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim(tmp_path)
    assert claim.take()
    claim.announce(READY)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(announcement, "host_name", lambda: "login2")
    for command in (lambda: read_announcement(tmp_path), Claim(tmp_path).take):
        with pytest.raises(RlixError, match=f"RLIX_HOME {tmp_path} is that of a control plane on host .*login2"):
            command()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    claim.close()  # killed: on a disk of this host its lock says so, on others' it may not
    monkeypatch.setattr(announcement, "on_network", lambda folder: True)
    with pytest.raises(RlixError, match="any more, delete"):
        read_announcement(tmp_path)
    monkeypatch.setattr(announcement, "on_network", lambda folder: False)
    assert read_announcement(tmp_path) is None
    later = Claim(tmp_path)
    assert later.take()
    later.disown()
    later.close()
    monkeypatch.setattr(announcement, "on_network", lambda folder: True)
    monkeypatch.setattr(announcement, "host_name", lambda: "login3")
    assert Claim(tmp_path).take()
