"""The process that keeps a control plane for whoever comes: `python -m rlix.control.daemon [VIRTUAL_GPUS]`.

It outlives the program that started it, and ends, with everything it started, on SIGTERM or when for a while no
pipeline has been registered and no other program attached.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private import state as ray_state
from ray.exceptions import GetTimeoutError, RayActorError

from rlix.control.announcement import Announcement, Claim, how_gone, note_end
from rlix.control.connect import authentication, daemon_authentication
from rlix.control.init import init, shutdown
from rlix.control.rpc import comes_back
from rlix.control.settings import Settings
from rlix.node.plain import PlainFormatter
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus
from rlix.protocol.types import ORCHESTRATOR_ACTOR_NAME

logger = logging.getLogger(__name__)

LOOK_S = 1.0
FIRST_S = 60.0
STATUS_TIMEOUT_S = 10.0


class Idle:
    """For how long there has been nothing to do. Times are seconds of one clock."""

    def __init__(self, idle_s: float, now: float) -> None:
        self._idle_s = idle_s
        self._since = now

    def over(self, *, busy: bool, visited: bool, now: float) -> bool:
        """Whether that has been long enough. `busy`: there is something to do now; `visited`: somebody has been here.

        Whoever starts a daemon joins it a moment later, which on a busy machine may be long.
        """
        if busy:
            self._since = now
        return now - self._since >= (self._idle_s if visited else max(self._idle_s, FIRST_S))


class Daemon:
    """Starts, announces and keeps a control plane."""

    def __init__(self, settings: Settings, claim: Claim) -> None:
        self._settings = settings
        self._claim = claim
        self._idle_s = settings.idle_s
        self._told = threading.Event()

    def run(self, virtual_gpus: int | None) -> None:
        """Returns when it is time to end; then nothing that it started is left."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # so that Ray's processes ignore it, too
        self._listen()
        token_path = self._make_token()
        try:
            orchestrator = init(virtual_gpus=virtual_gpus, settings=replace(self._settings, ray_address="local"))
            self._keep(orchestrator, self._announcement(orchestrator, token_path))
        finally:
            self._claim.withdraw()
            shutdown()
            if token_path is not None:
                Path(token_path).unlink(missing_ok=True)
            self._claim.disown()

    def _listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._told.set())

    def _make_token(self) -> str | None:
        """A token for this control plane alone, unless the user wants none: RLIX_HOME is all one needs to join."""
        if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            return None
        path = self._settings.home / "daemon.token"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        authentication.use(daemon_authentication(str(path)))
        return str(path)

    def _announcement(self, orchestrator: Any, token_path: str | None) -> Announcement:
        devices = _status(orchestrator).devices
        return Announcement(
            address=ray.get_runtime_context().gcs_address,
            pid=os.getpid(),
            started=time.time(),
            devices=len(devices),
            kind=str(devices[0].kind),
            idle_s=self._idle_s,
            token_path=token_path,
        )

    def _keep(self, orchestrator: Any, announcement: Announcement) -> None:
        if self._told.is_set():  # while it started
            return
        self._claim.announce(announcement)
        logger.info("%s at %s, until %g s after the last job", announcement.pool, announcement.address, self._idle_s)
        idle = Idle(self._idle_s, time.monotonic())
        while not self._told.wait(LOOK_S):
            visited = len(ray_state.jobs()) > 1  # the programs that have ended are in there, too
            if not idle.over(busy=self._busy(orchestrator), visited=visited, now=time.monotonic()):
                continue
            self._claim.withdraw()
            if not self._busy(orchestrator):  # nobody has come just before they no longer could
                logger.info("nothing to do: the control plane ends")
                return
            self._claim.announce(announcement)
        if how_gone(self._settings.home, announcement) == "died":  # nobody has said who tells it to end
            note_end(self._settings.home, announcement, "told to end (SIGTERM)")

    def _busy(self, orchestrator: Any) -> bool:
        if other_programs():
            return True
        try:
            return bool(_status(orchestrator).pipelines)
        except GetTimeoutError:
            return True
        except RayActorError as error:
            if comes_back(ORCHESTRATOR_ACTOR_NAME):
                return True
            raise RlixError(f"the control plane died: {error}") from error


def other_programs() -> list[int]:
    """The process ids of the programs that are attached to this Ray, besides this one."""
    mine = ray.get_runtime_context().get_job_id()
    return [job["DriverPid"] for job in ray_state.jobs() if not job["IsDead"] and job["JobID"] != mine]


def _status(orchestrator: Any) -> ControlStatus:
    status: ControlStatus = ray.get(orchestrator.status.remote(), timeout=STATUS_TIMEOUT_S)
    return status


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PlainFormatter())
    parser = argparse.ArgumentParser()
    parser.add_argument("virtual_gpus", type=int, nargs="?")
    parser.add_argument("--claim", type=int, metavar="FD", help="the home's lock, already taken")
    arguments = parser.parse_args()
    try:
        settings = Settings.from_env()
        claim = Claim(settings.home, arguments.claim)
        if claim.take():  # otherwise another one was faster
            Daemon(settings, claim).run(arguments.virtual_gpus)
    except RlixError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
