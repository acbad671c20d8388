"""Processes for a user's code: killed when they hang, reused when they do not, gone when whoever started them is."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlix.protocol.errors import RlixError

logger = logging.getLogger(__name__)

_REAPER_TIMEOUT_S = 5.0
_LINE_LIMIT = 64 * 1024 * 1024  # bytes of one message
_LOAD_S = 120.0  # what is imported first may import much


class ProcessError(RlixError):
    """The process, or the code that it called, failed. `trace`: the user's own traceback, where there is one."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Processes:
    """Those of one event loop; how many there are is decided by who takes them.

    Args:
        functions: "package.module:function" of those that each imports before it is used.
    """

    def __init__(self, functions: Sequence[str] = ()) -> None:
        self._functions = list(functions)
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def ids(self) -> list[int]:
        """Of those that exist now."""
        return sorted(child.process.pid for child in [*self._idle, *self._busy])

    async def take(self) -> "Child":
        """One that nobody else has, until it is given back. Raises ProcessError when none can be started."""
        for dead in [child for child in self._idle if not child.is_alive]:
            self._idle.remove(dead)
            await self._end(dead)
        child = self._idle.pop() if self._idle else await self._spawn()
        self._busy.add(child)
        return child

    async def give_back(self, child: "Child", *, failed: bool = False) -> None:
        """To be used again; one that failed, or still has something to answer, is killed with all it has started."""
        self._busy.discard(child)
        if failed or not child.is_idle:
            await self._end(child)
        else:
            self._idle.append(child)

    async def close(self) -> None:
        """Kill every process."""
        children = [*self._idle, *self._busy]
        self._idle, self._busy = [], set()
        for child in children:
            await self._end(child)
        if self._reaper is not None:
            self._reaper.communicate(timeout=_REAPER_TIMEOUT_S)
            self._reaper = None

    async def _spawn(self) -> "Child":
        child = await Child.spawn()
        self._tell_reaper(f"+{child.process.pid}")
        if self._functions:
            try:
                async with asyncio.timeout(_LOAD_S):
                    child.loaded = await child.ask("load", functions=self._functions)
            except TimeoutError:
                await self._end(child)
                raise ProcessError(f"its process did not import the rewards within {_LOAD_S:g} s") from None
            except BaseException:  # cancelled ones too: cleans up and raises again
                await self._end(child)
                raise
        return child

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is None:
            script = Path(__file__).with_name("reaper.py")
            command = [sys.executable, "-I", "-S", str(script)]
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(line.encode() + b"\n")
        self._reaper.stdin.flush()

    async def _end(self, child: "Child") -> None:
        await child.kill()
        self._tell_reaper(f"-{child.process.pid}")


class Child:
    """A process that runs `child.py`. Messages are lines of JSON; each request has a number, which its answer names."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.loaded: dict[str, Any] = {}
        """What it says of the functions that it has imported."""
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._unanswered = 0
        self._broken: str | None = None
        self._reading = asyncio.ensure_future(self._read())

    @staticmethod
    async def spawn() -> "Child":
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rlix.pipeline.sources.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
                start_new_session=True,  # a group of its own, so that what it starts dies with it
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        except OSError as error:
            raise ProcessError(f"its process could not be started: {error}") from error
        return Child(process)

    @property
    def is_idle(self) -> bool:
        """Whether it has answered all it was asked, also what nobody waits for any more."""
        return self._broken is None and self._unanswered == 0

    @property
    def is_alive(self) -> bool:
        return self._broken is None

    async def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer; several may be under way. Raises ProcessError: it failed, or has ended."""
        if self._broken is not None:
            raise ProcessError(self._broken)
        assert self.process.stdin is not None
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number], self._unanswered = answer, self._unanswered + 1
        text = json.dumps({"number": number, "method": method, **arguments}, default=str)
        try:
            self.process.stdin.write(text.encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # it has ended: `_read` says how
                await self.process.stdin.drain()
            found: dict[str, Any] = await answer
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise ProcessError(found["error"], found.get("trace", ""))
        return found

    async def kill(self) -> None:
        """With all that it has started. Where it has ended that was done then: its number may since be another's."""
        if self._broken is None or self.process.returncode is None:
            self._kill_group()
        await self.process.wait()
        await asyncio.wait([self._reading])

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                found = json.loads(line)
                self._unanswered -= 1
                if (answer := self._waiting.get(found["number"])) is not None and not answer.done():
                    answer.set_result(found)
            self._broken = f"its process ended with {await self.process.wait()}"
            self._kill_group()
        except (ConnectionError, ValueError) as error:
            self._broken = f"its process broke off: {error}"
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ProcessError(self._broken))
