"""The control plane's actors watch over each other: one that is stopped, not dead, is killed; Ray starts it again."""

import logging
import os
import threading
import time

import ray
from ray._private import state as ray_state
from ray.exceptions import GetTimeoutError, RayError

from rlix.node.process import describe, kill, state, this_process
from rlix.protocol.messages import Process
from rlix.protocol.types import NAMESPACE

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
_ANSWER_S = 1.0
_KILL_TIMEOUT_S = 5.0


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
