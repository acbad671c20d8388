"""One trajectory's environment behind bounds: every call ends in time, and what fails is tried again or given up."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from rlix.pipeline.sources.environments.base import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentFailedError,
    EnvironmentTimeoutError,
    Instance,
    Observation,
    Transition,
    checked,
    observed,
)
from rlix.pipeline.spec.named import own_traceback, where_raised

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """`attempts`: how many environments a trajectory may use up; `backoff_s` doubles from the second one on."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    attempts: int = 2
    backoff_s: float = 0.1


@dataclass(slots=True)
class Tally:
    """What a trajectory's environment cost. `seconds`: spent waiting for it, backing off included."""

    seconds: float = 0.0
    timeouts: int = 0
    failures: int = 0
    retries: int = 0


class Runner(Protocol):
    """Where environments run."""

    async def start(self, instance: Instance) -> Environment:
        """A fresh environment; may wait for its turn. Raises EnvironmentFailedError when there is none to be had."""
        ...

    async def stop(self, environment: Environment, *, failed: bool) -> None:
        """Take it back. One that `failed` may be hanging: whatever it takes, it must be gone afterwards."""
        ...


class InProcessRunner:
    """Environments as objects in this event loop. One that never yields stops everything: those need a process."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory

    async def start(self, instance: Instance) -> Environment:
        try:
            return self._factory(instance)
        except Exception as error:  # a user's code may raise anything; it costs this trajectory only
            raise EnvironmentFailedError(f"could not be built: {where_raised(error)}", own_traceback(error)) from error

    async def stop(self, environment: Environment, *, failed: bool) -> None:
        if not failed:
            await bounded("close", environment.close(), _CLOSE_TIMEOUT_S)


@dataclass(slots=True)
class GuardedEnvironment:
    """Resets, steps and, where an environment failed, replays the trajectory's actions in a fresh one.

    A replay must give the observations and rewards it gave before, or the attempt counts as failed too.
    """

    runner: Runner
    instance: Instance
    limits: Limits
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    tally: Tally = field(default_factory=Tally)
    _environment: Environment | None = None
    _seed: int = 0
    _first: Observation | None = None
    _history: list[tuple[Action, Transition]] = field(default_factory=list)

    async def reset(self, seed: int) -> Observation:
        """Raises EnvironmentFailedError when no attempt is left."""
        self._seed = seed
        await self._with_retries(self._replayed)
        assert self._first is not None
        return self._first

    async def step(self, action: Action) -> Transition:
        """Raises EnvironmentFailedError when no attempt is left."""

        async def call() -> Transition:
            environment = await self._replayed()
            return await self._stepped(environment, action)

        transition = await self._with_retries(call)
        self._history.append((action, transition))
        return transition

    async def close(self, *, failed: bool = False) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            try:
                await self.runner.stop(environment, failed=failed)
            except EnvironmentFailedError as error:
                logger.warning("the environment of %s did not stop cleanly: %s", self.instance.trajectory, error)

    async def _with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        start = self.clock()
        try:
            while True:
                try:
                    return await call()
                except EnvironmentFailedError as error:
                    await self._failed(error)
        finally:
            self.tally.seconds += self.clock() - start

    async def _failed(self, error: EnvironmentFailedError) -> None:
        """Give the environment up; wait before the next attempt, or raise when this was the last."""
        self.tally.failures += 1
        last = f"\n  the last action: {self._history[-1][0].text!r}" if self._history else ""
        logger.info(
            "the environment of %s (seed %d, attempt %d) failed: %s%s\n%s",
            self.instance.trajectory,
            self._seed,
            self.instance.attempt,
            error,
            last,
            error.trace,
        )
        self.tally.timeouts += isinstance(error, EnvironmentTimeoutError)
        await self.close(failed=True)
        attempt = self.instance.attempt + 1
        if attempt >= self.limits.attempts:
            raise EnvironmentFailedError(
                f"the environment of {self.instance.trajectory} failed {attempt} time(s), the last time: {error}"
            ) from error
        self.tally.retries += 1
        self.instance = replace(self.instance, attempt=attempt)
        await self.sleep(self.limits.backoff_s * 2 ** (attempt - 1))

    async def _replayed(self) -> Environment:
        """The environment, brought to where the trajectory is."""
        if self._environment is not None:
            return self._environment
        environment = await self.runner.start(self.instance)
        self._environment = environment  # from here on `close` must see to it
        first = observed("reset", await bounded("reset", environment.reset(self._seed), self.limits.reset_timeout_s))
        if self._first is not None and first != self._first:
            raise EnvironmentFailedError(f"reset({self._seed}) gave {first!r}, and {self._first!r} before")
        for number, (action, before) in enumerate(self._history):
            again = await self._stepped(environment, action)
            if again != before:
                raise EnvironmentFailedError(f"step {number} ({action.text!r}) gave {again}, and {before} before")
        self._first = first
        return environment

    async def _stepped(self, environment: Environment, action: Action) -> Transition:
        return checked(await bounded("step", environment.step(action), self.limits.step_timeout_s))


async def bounded(what: str, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The call's result. A call that is out of time is cancelled and left: even one that ignores that costs no more.

    Raises:
        EnvironmentTimeoutError: out of time. EnvironmentFailedError: it raised, whatever it raised.
    """
    if not inspect.isawaitable(call):
        raise EnvironmentFailedError(f"{what} is no coroutine; write 'async def {what}'")
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for it any more
    if not task.done():
        raise EnvironmentTimeoutError(f"{what} did not return within {timeout_s:g} s")
    if task.cancelled():
        raise EnvironmentFailedError(f"{what} cancelled itself")
    try:
        return task.result()
    except EnvironmentFailedError:
        raise
    except Exception as error:  # a user's code may raise anything; it costs this trajectory only
        raise EnvironmentFailedError(f"{what} raised {where_raised(error)}", own_traceback(error)) from error
