"""Actors of the head node that are stopped, not dead, are killed: the control plane's, which watch over each other and
which Ray starts again, and jobs' coordinators."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import ray
from ray._private import state as ray_state
from ray.exceptions import GetTimeoutError, RayError

from rlix.node.process import describe, kill, state, this_process
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Process
from rlix.protocol.types import COORDINATOR_ACTOR_NAME_PREFIX, NAMESPACE

logger = logging.getLogger(__name__)

COORDINATOR = "its coordinator"
"""So begins why a job ended with that."""
_EVERY_S = 0.5
_ANSWER_S = 1.0
_KILL_TIMEOUT_S = 5.0
_COORDINATORS_EVERY_S = 1.0


def here() -> Process:
    """This process, as another one of this node may look at it: what an actor's `process` method returns."""
    return this_process(ray.get_runtime_context().get_node_id(), f"control plane, process {os.getpid()}")


def watch_over(names: tuple[str, ...]) -> None:
    """From now on, in a thread, until this process ends. The actors are on this node and have a method `process`."""
    threading.Thread(target=_watch, args=(names,), name="watchdog", daemon=True).start()


def _watch(names: tuple[str, ...]) -> None:
    while True:
        time.sleep(_EVERY_S)
        for name in names:
            try:
                ray.get(ray.get_actor(name, NAMESPACE).process.remote(), timeout=_ANSWER_S)
            except GetTimeoutError:
                _look(name)
            except (ValueError, RayError) as error:
                logger.debug("%s is away: %s", name, error)


def _look(name: str) -> None:
    """Ray knows the process of an actor also when it has never answered."""
    actors = [actor for actor in ray_state.actors().values() if (actor["Name"], actor["State"]) == (name, "ALIVE")]
    for process in (describe(actor["Pid"]) for actor in actors):
        if process is not None and state(process) == "stopped":
            logger.error(
                "%s (process %d) is stopped and does not answer: it is killed, to start again", name, process.pid
            )
            kill([process], _KILL_TIMEOUT_S)


def watch_over_coordinators(stopped_s: float, end: Callable[[str, str], None]) -> None:
    """From now on, in a thread: whoever has asked a coordinator that was stopped for so long learns that it is dead.

    `end` ends a pipeline, and notes why, before its coordinator is killed.
    """
    watch = _Coordinators(stopped_s, end)
    threading.Thread(target=watch.look_forever, name="coordinators", daemon=True).start()


class _Coordinators:
    def __init__(self, stopped_s: float, end: Callable[[str, str], None]) -> None:
        self._stopped_s = stopped_s
        self._end = end
        self._processes: dict[tuple[str, str], Process] = {}  # by namespace and name
        self._stopped_at: dict[Process, float] = {}

    def look_forever(self) -> None:
        while True:
            time.sleep(_COORDINATORS_EVERY_S)
            try:
                self._find()
            except (ValueError, RayError) as error:
                logger.debug("cannot look for coordinators: %s", error)
            self._look(time.monotonic())

    def _find(self) -> None:
        named = ray.util.list_named_actors(all_namespaces=True)
        there = {(a["namespace"], a["name"]) for a in named if a["name"].startswith(COORDINATOR_ACTOR_NAME_PREFIX)}
        self._processes = {where: process for where, process in self._processes.items() if where in there}
        for namespace, name in there - self._processes.keys():
            actor = ray_state.actors(ray.get_actor(name, namespace)._actor_id.hex())
            if not actor or actor["State"] != "ALIVE" or actor["Address"]["NodeID"] != _node():
                continue
            if (process := describe(actor["Pid"])) is not None:
                self._processes[namespace, name] = process

    def _look(self, now: float) -> None:
        stopped = {process: name for (_, name), process in self._processes.items() if state(process) == "stopped"}
        self._stopped_at = {process: self._stopped_at.get(process, now) for process in stopped}
        for process, since in self._stopped_at.items():
            if now - since >= self._stopped_s:
                logger.error("%s (process %d) was stopped and did not go on: it is killed", process.name, process.pid)
                why = f"{COORDINATOR}, process {process.pid}, was stopped (SIGSTOP) and did not go on"
                with contextlib.suppress(RlixError, RayError):  # it has ended, or does not within its time
                    self._end(stopped[process].removeprefix(COORDINATOR_ACTOR_NAME_PREFIX), why)
                kill([process], _KILL_TIMEOUT_S, "it was stopped (SIGSTOP) and did not go on")


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())
