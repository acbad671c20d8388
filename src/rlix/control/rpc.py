"""Calls between Ray actors: bounded, and raising what the other side raised."""

import asyncio
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from rlix.protocol.errors import WaitTimeoutError


def root_cause(error: RayTaskError) -> BaseException:
    """The exception that was raised in the actor, through any number of actors in between."""
    cause: object = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, BaseException) else error


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
