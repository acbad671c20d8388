"""The processes of a Ray, and their end; those of a real one are in test_lifecycle."""

import time
from pathlib import Path

import psutil
import pytest

from rlix.control import ray_processes
from rlix.control.ray_processes import RayProcesses
from rlix.node.process import WatchedProcess
from rlix.protocol.messages import Fence
from tests.node.holders import without_its_first_thread


def test_one_whose_first_thread_alone_has_ended_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_its_first_thread(tmp_path, "GPU-0", Fence("pool", 1)) as pid:
        monkeypatch.setattr(ray_processes, "is_ray", lambda process: process.pid == pid)
        watched = WatchedProcess(pid)
        RayProcesses(psutil.Process()).end(0.0)
        assert watched.wait(time.monotonic() + 300.0)
