"""The control plane that a command works with: one that runs already, one started for everybody, or a private one."""

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayActorError

from rlix.cli.text import count
from rlix.control.announcement import (
    Announcement,
    find_or_start_daemon,
    how_gone,
    is_claimed,
    pool_text,
    read_announcement,
)
from rlix.control.init import check_size, detach, init, new_pool_size, shutdown
from rlix.control.rpc import comes_back, get, in_words
from rlix.control.settings import Settings
from rlix.node.plain import plain
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import ControlStatus, DeviceKind
from rlix.protocol.types import ORCHESTRATOR_ACTOR_NAME

STATUS_TIMEOUT_S = 5.0
_FIRST_TIMEOUT_S = 20.0  # the control plane's actors may just be starting again
_AGAIN_S = 0.2
_LOG_LEVEL = "WARNING"
_PRINT = ray_worker.print_worker_logs


class ControlPlaneDiedError(RlixError):
    """There is nobody left to ask; what jobs held is gone with it."""


@dataclass(frozen=True, slots=True)
class Pool:
    """An attached control plane. `said`: in words, which one it is and how it came about."""

    orchestrator: Any
    said: str
    daemon: Announcement | None = None
    home: Path | None = None

    def check_alive(self) -> None:
        """Ray itself would notice after a minute that its daemon is gone, and then end this process.

        Raises:
            ControlPlaneDiedError: it is gone.
        """
        if self.home is not None and not is_claimed(self.home):
            raise self.death("")

    def death(self, error: str) -> ControlPlaneDiedError:
        """What there is to say when it is gone; `error` is how that was noticed."""
        on = "and its jobs with it; `rlix run --resume` goes on from their latest checkpoints"
        if self.daemon is None or self.home is None:
            return ControlPlaneDiedError(f"the control plane died, {on}: {error}")
        how = how_gone(self.home, self.daemon)
        return ControlPlaneDiedError(f"the control plane (process {self.daemon.pid}) {how}, {on}")


class StatusSource:
    """Asks the orchestrator; a late answer shows the last known status, a dead control plane is an error."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last: ControlStatus | None = None

    def __call__(self) -> ControlStatus:
        """Raises ControlPlaneDiedError, or RlixError when the first answer does not come."""
        deadline = time.monotonic() + _FIRST_TIMEOUT_S
        while True:
            self._pool.check_alive()
            left_s = STATUS_TIMEOUT_S if self._last else max(0.0, deadline - time.monotonic())
            try:
                self._last = get(self._pool.orchestrator.status.remote(), what="its status", timeout_s=left_s)
            except WaitTimeoutError:
                if self._last is None:
                    raise RlixError(f"the control plane did not answer within {_FIRST_TIMEOUT_S:.0f} s") from None
            except RayActorError as error:
                if not comes_back(ORCHESTRATOR_ACTOR_NAME):
                    raise self._pool.death(in_words(error)) from error
                if self._last is None:
                    if time.monotonic() > deadline:
                        raise RlixError(f"the control plane does not come back: {in_words(error)}") from error
                    time.sleep(_AGAIN_S)
                    continue
            assert self._last is not None
            return self._last


@contextlib.contextmanager
def private_pool(settings: Settings, virtual_gpus: int) -> Iterator[Pool]:
    """A control plane that lives as long as the block, and that nobody else finds."""
    _let_ray_print(workers=True)
    try:
        orchestrator = init(
            virtual_gpus=virtual_gpus, settings=replace(settings, ray_address="local"), log_level=_LOG_LEVEL
        )
        yield Pool(orchestrator, "a control plane of its own, which ends with this run")
    finally:
        shutdown()


@contextlib.contextmanager
def shared_pool(settings: Settings, wanted: int | None, enough: int) -> Iterator[Pool]:
    """The control plane of RAY_ADDRESS or of RLIX_HOME's daemon, started where there is none; it outlives the block.

    `wanted` is how many virtual GPUs the user asks for, `enough` how many a new daemon gets otherwise.

    Raises:
        SpecError: there is one already and it has another number of devices than the user wants.
    """
    _let_ray_print(workers=True)
    try:
        if settings.ray_address:
            pool = _in_cluster(settings)
            found = len(StatusSource(pool)().devices)
            if wanted not in (None, found):
                raise SpecError(f"--gpus={wanted}: the pool at {settings.ray_address} has {found}; leave it out")
        else:
            pool = _of_daemon(settings, wanted, enough)
        yield pool
    finally:
        detach()


@contextlib.contextmanager
def running_pool(settings: Settings) -> Iterator[Pool | None]:
    """The control plane that runs already; None where there is none. What its jobs print is not for who only asks."""
    _let_ray_print(workers=False)
    try:
        if elsewhere(settings):
            try:
                orchestrator = init(create_if_missing=False, settings=settings, log_level=_LOG_LEVEL)
            except RlixError:
                if not ray.is_initialized():  # there is no such cluster: another matter than one without us
                    raise
                yield None
            else:
                yield _described(Pool(orchestrator, f"at {settings.ray_address}"))
        else:
            yield _join(settings, read_announcement(settings.home))
    finally:
        detach()


def _let_ray_print(*, workers: bool) -> None:
    """What workers print, or nothing. Ray's own pages about processes name no job, and the job says it all."""

    def print_logs(data: dict[str, Any], print_file: TextIO, *rest: Any) -> None:
        if workers and data.get("pid") != "raylet":
            lines = io.StringIO()
            _PRINT(data, lines, *rest)
            text = lines.getvalue()
            print_file.write(text if print_file.isatty() else plain(text))

    ray_worker.print_worker_logs = print_logs


def elsewhere(settings: Settings) -> bool:
    """Whether it is the control plane of a Ray cluster that is meant, not that of RLIX_HOME's daemon."""
    return settings.ray_address not in ("", "local")


def _join(settings: Settings, found: Announcement | None) -> Pool | None:
    if found is None:
        return None
    orchestrator = init(create_if_missing=False, settings=replace(settings, ray_address=""), log_level=_LOG_LEVEL)
    return _described(Pool(orchestrator, f"of process {found.pid}", found, settings.home))


def _of_daemon(settings: Settings, wanted: int | None, enough: int) -> Pool:
    if read_announcement(settings.home) is None:
        new_pool_size(settings)  # says what is wrong with this machine's GPUs before anything is started
    found, started = find_or_start_daemon(settings.home, wanted or enough)
    check_size(found, wanted, "--gpus")
    pool = _join(settings, found)
    assert pool is not None
    if not started:
        return replace(pool, said=f"joined {pool.said}")
    said = f"started a control plane (process {found.pid}); it ends {found.idle_s:g} s after its last job"
    return replace(pool, said=said)


def _in_cluster(settings: Settings) -> Pool:
    where = f"at {settings.ray_address}"
    try:
        orchestrator = init(create_if_missing=False, settings=settings, log_level=_LOG_LEVEL)
    except RlixError:
        if not ray.is_initialized():
            raise
        orchestrator = init(settings=settings, log_level=_LOG_LEVEL)
        return Pool(orchestrator, f"started a control plane in the Ray cluster {where}; it stays until `rlix down`")
    pool = _described(Pool(orchestrator, where))
    return replace(pool, said=f"joined {pool.said}")


def _described(pool: Pool) -> Pool:
    """The pool, of which so far is only said where it is."""
    status = StatusSource(pool)()
    virtual = any(device.kind is DeviceKind.CPU for device in status.devices)
    size, jobs = pool_text(len(status.devices), virtual=virtual), len(status.pipelines)
    said = f"the control plane {pool.said} ({size}, {count(jobs, 'job')} run{'' if jobs > 1 else 's'} there)"
    return replace(pool, said=said)
