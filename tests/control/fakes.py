"""Small Ray actors that stand in for a job's coordinator, its workers and its pipeline."""

import asyncio
import os
from typing import Any

from rlix.control.client import JobClient
from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase


class FakeCoordinator:
    """Answers as told: "ack", "hang" or "raise" for each of grow and shrink. Keeps what it was told."""

    def __init__(self, grow: str = "ack", shrink: str = "ack") -> None:
        self._answers = {"grow": grow, "shrink": shrink}
        self._calls: list[tuple[str, tuple[Lease, ...]]] = []
        self._changed = asyncio.Condition()

    async def grow_rollout(self, leases: tuple[Lease, ...]) -> None:
        await self._answer("grow", leases)

    async def shrink_rollout(self, leases: tuple[Lease, ...], deadline_s: float) -> None:
        assert deadline_s > 0
        await self._answer("shrink", leases)

    async def bundles_lost(self, leases: tuple[Lease, ...]) -> None:
        await self._note("lost", leases)

    async def closed(self) -> None:
        await asyncio.Event().wait()

    async def set_answer(self, call: str, answer: str) -> None:
        self._answers[call] = answer

    async def bundles_told(self, call: str, count: int) -> list[Lease]:
        """All leases of the calls of this name, once they are at least `count`."""

        def told() -> list[Lease]:
            return [lease for name, leases in self._calls if name == call for lease in leases]

        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: len(told()) >= count), 20)
        return told()

    async def pid(self) -> int:
        return os.getpid()

    async def _answer(self, call: str, leases: tuple[Lease, ...]) -> None:
        await self._note(call, leases)
        if self._answers[call] == "hang":
            await asyncio.Event().wait()
        if self._answers[call] == "raise":
            raise RuntimeError(f"this coordinator refuses to {call}")

    async def _note(self, call: str, leases: tuple[Lease, ...]) -> None:
        async with self._changed:
            self._calls.append((call, leases))
            self._changed.notify_all()


class FakeWorker:
    """Holds a device, and asks for devices as a pipeline would."""

    def ping(self) -> int:
        return os.getpid()

    def acquire(self, pipeline_id: str, cluster: str, phase: Phase) -> Any:
        return JobClient(pipeline_id, poll_s=0.2).acquire(cluster, phase)
