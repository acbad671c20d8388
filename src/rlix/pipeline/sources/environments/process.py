"""Environments in processes of their own."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from rlix.pipeline.sources.environments.base import (
    Action,
    Environment,
    EnvironmentFailedError,
    Instance,
    Observation,
    Transition,
    checked,
    observed,
)
from rlix.pipeline.sources.processes import Child, ProcessError, Processes


class SubprocessRunner:
    """Processes that each hold one environment at a time.

    Args:
        factory: "package.module:function", imported in the process and called with an `Instance` and `options`.
        max_processes: at most so many exist; `start` waits for one to be free.
        start_timeout_s: how long a process may take to start and to build its environment.
    """

    def __init__(
        self, factory: str, options: Mapping[str, Any], max_processes: int, start_timeout_s: float = 60.0
    ) -> None:
        self._factory, self._options = factory, dict(options)
        self._slots = asyncio.Semaphore(max_processes)
        self._start_timeout_s = start_timeout_s
        self.processes = Processes()
        self.close = self.processes.close

    async def start(self, instance: Instance) -> Environment:
        await self._slots.acquire()
        child: Child | None = None
        try:
            async with _as_its_failure():
                child = await self.processes.take()
                make = child.ask("make", factory=self._factory, options=self._options, instance=asdict(instance))
                await asyncio.wait_for(make, self._start_timeout_s)
        except BaseException as error:  # cancelled ones too: cleans up and raises again
            if child is not None:
                await self.processes.give_back(child, failed=True)
            self._slots.release()
            if isinstance(error, TimeoutError):
                raise EnvironmentFailedError(
                    f"its process did not build it within {self._start_timeout_s:g} s"
                ) from None
            raise
        return _Remote(child)

    async def stop(self, environment: Environment, *, failed: bool) -> None:
        assert isinstance(environment, _Remote)
        try:
            await self.processes.give_back(environment.child, failed=failed)
        finally:
            self._slots.release()


class _Remote:
    """The environment in a process. A caller that gives up must have it killed: it may still compute."""

    def __init__(self, child: Child) -> None:
        self.child = child

    async def reset(self, seed: int) -> Observation:
        async with _as_its_failure():
            return observed("reset", (await self.child.ask("reset", seed=seed))["observation"])

    async def step(self, action: Action) -> Transition:
        async with _as_its_failure():
            found = await self.child.ask("step", **asdict(action))
            return checked(Transition(**{name: found[name] for name in Transition.__dataclass_fields__}))

    async def close(self) -> None:
        """The next `make` closes what is there."""


@asynccontextmanager
async def _as_its_failure() -> AsyncIterator[None]:
    try:
        yield
    except ProcessError as error:
        raise EnvironmentFailedError(str(error), error.trace) from error
