"""Fixtures that several test folders share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before Ray is imported: a test that calls it without a Ray fails, instead of starting one without GPUs for all others.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import hypothesis
import psutil
import pytest
import ray

from rlix.control.init import init, shutdown
from rlix.control.settings import Settings
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  hooks of every test

VIRTUAL_GPUS = 8

# How long an example takes says how busy the machine is; tracing every line to explain failures triples the time.
PHASES = tuple(phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain)
hypothesis.settings.register_profile("rlix", deadline=None, phases=PHASES)
hypothesis.settings.load_profile("rlix")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that none is left when the other worker has nothing more to do; those that share the
    session's Ray last: what joins a pool in this process leaves it again, and with it the session's."""
    shared = {item.path for item in items if "ray_session" in getattr(item, "fixturenames", ())}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path in shared, item.path not in slow))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """Here and in what tests start: a shell lets what it runs in the background ignore SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _locks_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Device locks that are this run's alone: whoever uses virtual devices beside it has a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLIX_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The control plane's settings in tests: an isolated home, and short the waits that tests wait for."""
    return Settings(
        home=tmp_path_factory.mktemp("rlix_home"),
        ray_address="local",
        virtual_gpus=VIRTUAL_GPUS,
        shrink_deadline_s=10.0,
        stopped_s=2.0,
        idle_job_s=900.0,  # a job says nothing while its processes start, which takes long on busy cores
    )


@pytest.fixture(scope="session")
def ray_session(settings: Settings) -> Iterator[Any]:
    """A Ray of its own on loopback, with eight virtual GPUs and a control plane. Yields the orchestrator's handle.

    Tests share it: each allocates pipelines of its own and unregisters them (see `rlix.control.client.JobClient`).
    """
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_memory_usage_threshold", "0.001")  # above which Ray would end our control plane first
            orchestrator = init(virtual_gpus=VIRTUAL_GPUS, settings=settings, log_level="WARNING")
        yield orchestrator
    finally:
        children = psutil.Process().children(recursive=True)
        started = [p for p in children if p.pid not in before and not _ends_with_this_process(p)]
        try:
            shutdown()
        finally:
            ray.shutdown()
            _, alive = psutil.wait_procs(started, timeout=10)
            for process in alive:
                process.kill()
            psutil.wait_procs(alive, timeout=10)


def _ends_with_this_process(process: psutil.Process) -> bool:
    """Helpers of libraries, for which nobody needs to wait."""
    try:
        return any(word in " ".join(process.cmdline()) for word in ("resource_tracker", "wandb"))
    except psutil.Error:
        return False


@pytest.fixture
def rlix_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder for tests that call `rlix` in this process or a child one."""
    monkeypatch.setenv("RLIX_HOME", str(tmp_path))
    return tmp_path
