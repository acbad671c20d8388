"""Environments in processes of their own: killed when they hang, reused when they do not, never more than allowed."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
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

logger = logging.getLogger(__name__)

_REAPER_TIMEOUT_S = 5.0
_LINE_LIMIT = 64 * 1024 * 1024  # bytes of one message


class SubprocessRunner:
    """A pool of processes that each hold one environment at a time.

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
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def processes(self) -> list[int]:
        """Ids of the processes that exist now."""
        return sorted(child.process.pid for child in [*self._idle, *self._busy])

    async def start(self, instance: Instance) -> Environment:
        await self._slots.acquire()
        child: _Child | None = None
        try:
            child = self._idle.pop() if self._idle else await self._spawn()
            self._busy.add(child)
            make = child.ask("make", factory=self._factory, options=self._options, instance=asdict(instance))
            try:
                await asyncio.wait_for(make, self._start_timeout_s)
            except TimeoutError:
                raise EnvironmentFailedError(
                    f"its process {child.process.pid} did not build it within {self._start_timeout_s:g} s"
                ) from None
        except BaseException:  # cancelled ones too: cleans up and raises again
            if child is not None:
                await self._end(child)
            self._slots.release()
            raise
        return child

    async def stop(self, environment: Environment, *, failed: bool) -> None:
        assert isinstance(environment, _Child)
        try:
            if failed or not environment.is_idle:
                await self._end(environment)
            else:
                self._busy.discard(environment)
                self._idle.append(environment)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Kill every process."""
        for child in [*self._idle, *self._busy]:
            await self._end(child)
        if self._reaper is not None:
            self._reaper.communicate(timeout=_REAPER_TIMEOUT_S)
            self._reaper = None

    async def _spawn(self) -> "_Child":
        child = await _Child.spawn()
        self._tell_reaper(f"+{child.process.pid}")
        return child

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is None:
            script = Path(__file__).with_name("reaper.py")
            command = [sys.executable, "-I", "-S", str(script)]
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(line.encode() + b"\n")
        self._reaper.stdin.flush()

    async def _end(self, child: "_Child") -> None:
        self._busy.discard(child)
        if child in self._idle:
            self._idle.remove(child)
        await child.kill()
        self._tell_reaper(f"-{child.process.pid}")


class _Child:
    """A process that runs `child.py`, and the environment in it. Messages are lines of JSON, one answer per request."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.is_idle = True

    @staticmethod
    async def spawn() -> "_Child":
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rlix.pipeline.sources.environments.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
                start_new_session=True,  # a group of its own, so that what it starts dies with it
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        except OSError as error:
            raise EnvironmentFailedError(f"its process could not be started: {error}") from error
        return _Child(process)

    async def reset(self, seed: int) -> Observation:
        return observed("reset", (await self.ask("reset", seed=seed))["observation"])

    async def step(self, action: Action) -> Transition:
        return checked(Transition(**await self.ask("step", **asdict(action))))

    async def close(self) -> None:
        """The next `make` closes what is there."""

    async def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. A caller that gives up must kill the process: answers would be mixed up."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.is_idle = False
        try:
            self.process.stdin.write(json.dumps({"method": method, **arguments}).encode() + b"\n")
            await self.process.stdin.drain()
            line = await self.process.stdout.readline()
        except (ConnectionError, ValueError) as error:
            raise EnvironmentFailedError(f"its process {self.process.pid} broke off: {error}") from error
        if not line:
            code = await self.process.wait()
            raise EnvironmentFailedError(f"its process {self.process.pid} ended with {code}")
        answer: dict[str, Any] = json.loads(line)
        self.is_idle = True
        if "error" in answer:
            raise EnvironmentFailedError(answer["error"], answer.get("trace", ""))
        return answer

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
