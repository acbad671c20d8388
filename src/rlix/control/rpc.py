"""Calls between Ray actors: bounded, and raising what the other side raised."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from rlix.node.plain import plain
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.types import NAMESPACE

logger = logging.getLogger(__name__)

UNREACHABLE_S = 300.0
"""So long somebody may be out of reach whom Ray does not give up; it gives up hosts within about a minute."""
_PROBE_S = 10.0
_SILENT = 4  # times longer is waited for who is silent than for who is away
_RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:: (?s:.+))?)$", re.MULTILINE)  # what follows the frames of a traceback
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


def root_cause(error: RayTaskError) -> BaseException:
    """The exception that was raised in the actor, through any number of actors in between."""
    cause: object = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, BaseException) else error


def in_words(error: RayError, who: str = "") -> str:
    """In place of Ray's page: who did not answer, and why. `who`: in words, where that is known."""
    text = str(error)
    if isinstance(error, GetTimeoutError):
        return "the control plane did not answer in time"
    if not isinstance(error, RayActorError):
        return f"Ray: {next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)}"
    if error.actor_init_failed:
        page = plain(text)
        raised = _RAISED.search(page, max(0, page.rfind('\n  File "')))
        return raised[1].strip() if raised else "it could not be created"
    name, pid = (re.search(rf"^\s*{key}: (.+)$", text, re.MULTILINE) for key in ("name", "pid"))
    if not who:
        who = f"process {pid[1]}" if pid else "a process"
        who = f"{who} ({_called(name[1])})" if name else who
    elif pid:
        who = f"{who}, process {pid[1]},"
    if isinstance(error, ActorUnavailableError):
        return f"{who} cannot be reached just now"
    if "OUT_OF_MEMORY" in text:
        return f"{who} was killed: its node ran out of memory"
    if "node has died" in text or "NODE_DIED" in text:
        return f"{who} died with its node"
    if "ray.kill" in text:
        return f"{who} was ended"
    return f"{who} died: it was killed (by somebody, or by the kernel for want of memory), or crashed"


def _called(name: str) -> str:
    """A process by what it does, in place of its actor's name."""
    kind, _, pipeline_id = name.removeprefix("rlix:").partition(":")
    words = kind.replace("_", " ")
    return {"pipeline": f"job {pipeline_id}", "coordinator": f"the coordinator of {pipeline_id}"}.get(kind, words)


def get(ref: Any, *, what: str, timeout_s: float) -> Any:
    """The value behind an object reference.

    Raises:
        WaitTimeoutError: nothing came within `timeout_s` seconds; `what` says what was awaited and on whom.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeoutError(f"no answer within {timeout_s:.1f} s: {what}") from None
    except RayTaskError as error:
        raise root_cause(error) from None


async def call(ref: Any, *, what: str, timeout_s: float) -> Any:
    """`get` for asynchronous actors."""
    try:
        return await asyncio.wait_for(_value(ref), timeout_s)
    except TimeoutError as error:
        if isinstance(error, WaitTimeoutError):
            raise
        raise WaitTimeoutError(f"no answer within {timeout_s:.1f} s: {what}") from None


async def _value(ref: Any) -> Any:
    try:
        return await ref
    except RayTaskError as error:
        raise root_cause(error) from None


async def outlast(actor: Any, ask: Callable[[], Any], *, what: str, patience_s: float = UNREACHABLE_S) -> Any:
    """What an actor answers, asked again whenever the connection to it was lost: that is no death.

    For calls that may be made twice.

    Raises:
        RayActorError: the actor has died.
        WaitTimeoutError: it could not be reached for `patience_s` seconds, and Ray does not count it as dead.
    """
    while True:
        try:
            return await ask()
        except ActorUnavailableError as error:
            if isinstance(error, RayTaskError):  # it was there, and this is what it raised
                raise
            logger.warning("%s cannot be reached: waiting for it, or for Ray to know that it is dead: %s", what, error)
            await _reachable(actor, what, patience_s)


async def _reachable(actor: Any, what: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            await asyncio.wait_for(_value(actor.__ray_ready__.remote()), _PROBE_S)
        except (ActorUnavailableError, TimeoutError):
            if time.monotonic() > deadline:
                text = f"{what} could not be reached for {patience_s:g} s, although Ray does not count it as dead"
                raise WaitTimeoutError(f"{text}: is its host cut off?") from None
            await asyncio.sleep(_LONGEST_PAUSE_S)
        else:
            return


def comes_back(name: str) -> bool:
    """Whether an actor that cannot be reached is being started again: else Ray has forgotten it."""
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


class Patient:
    """An actor that may be killed and comes back: calls wait for it, and are made again.

    Only for calls that may be made twice. Args: `find` looks the actor up; `patience_s` is how long it may be away.
    """

    def __init__(self, find: Callable[[], Any], name: str, *, patience_s: float = 60.0) -> None:
        self._find = find
        self._name = name
        self._patience_s = patience_s
        self._handle = find()

    def ask(self, method: str, *args: object, timeout_s: float) -> Any:
        """What the actor's method returns.

        Raises:
            RlixError: the actor did not come back within `patience_s`, or this process has left Ray.
            WaitTimeoutError: it is there and does not answer within `timeout_s`, nor, for five times `patience_s`,
                when it is asked again: an answer may be lost with its connection, of which Ray does not always know.
        """
        deadline = time.monotonic() + self._patience_s
        pause_s, away = _FIRST_PAUSE_S, False
        while True:
            if not ray.is_initialized():  # else to look for it, or to call it, would start a Ray of its own
                raise RlixError(f"{self._name} cannot be asked: this process has left Ray")
            if away:
                try:
                    self._handle = self._find()
                except (ValueError, RlixError):
                    logger.debug("%s is not there yet", self._name)
            ref, away = None, True
            try:
                ref = getattr(self._handle, method).remote(*args)
                return get(ref, what=f"{self._name}'s {method}", timeout_s=timeout_s)
            except WaitTimeoutError as error:
                answered = ray.wait([ref], timeout=0)[0]  # then this is what it raised
                if answered or time.monotonic() >= deadline + _SILENT * self._patience_s:
                    raise
                logger.warning("%s; asking again", error)
            except RayActorError as error:
                if time.monotonic() > deadline:
                    raise RlixError(
                        f"{self._name} has been away for {self._patience_s:g} s: {in_words(error)}"
                    ) from None
                if pause_s == _FIRST_PAUSE_S:
                    logger.info("%s is away: waiting for it to come back", self._name)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
