import os
import re
import signal
import threading
from pathlib import Path

import pytest

from rlix.node.file_lock import FileBusyError, lock_file


def test_a_lock_has_one_owner_who_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock_file(path), pytest.raises(FileBusyError, match=rf"process {os.getpid()} \(since 20\d\d-.* UTC\)"):
        lock_file(path)
    lock_file(path).close()


def test_who_waits_gets_it_from_whoever_lets_go(tmp_path: Path) -> None:
    first = lock_file(tmp_path / "lock")
    timer = threading.Timer(0.1, first.close)
    timer.start()
    lock_file(tmp_path / "lock", wait_s=60.0).close()
    timer.join()


def test_a_lock_on_a_file_that_was_deleted_meanwhile_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    old = lock_file(path)
    path.unlink()
    with lock_file(path):
        old.close()
        with pytest.raises(FileBusyError):
            lock_file(path)


def test_a_fork_does_not_keep_its_parents_locks(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "lock")
    ready, said = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(said, b"1")
        signal.pause()
        os._exit(0)
    try:
        assert re.fullmatch(b"1", os.read(ready, 1))
        lock.close()
        lock_file(tmp_path / "lock").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(said)
