"""Waiting in the event loop until somebody tells that something has changed."""

import asyncio
from collections.abc import Callable

from rlix.control.core import Core
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import Process

_END_S = 60.0  # for every node to end a pipeline's processes and look at its devices
_PART_S = 60.0  # for a node to look at a part of a lease


async def called(watchers: list[Callable[[], None]], wait_s: float) -> bool:
    """Whether the watchers were called within `wait_s` seconds.

    `asyncio.wait_for` would answer a few turns of the loop later: it waits in a task of its own.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[bool] = loop.create_future()

    def decide(in_time: bool = True) -> None:
        if not outcome.done():
            outcome.set_result(in_time)

    timer = loop.call_later(wait_s, decide, False)
    watchers.append(decide)
    try:
        return await outcome
    finally:
        timer.cancel()
        if decide in watchers:
            watchers.remove(decide)


async def ended(core: Core, pipeline_id: str, reason: str, spare: Process | None) -> None:
    """Ends a pipeline; answers when it is over, or what is left of it is in quarantine."""
    core.end(pipeline_id, reason, spare)
    by = core.clock.time() + _END_S
    while (job := core.known.jobs.get(pipeline_id)) is not None and job.ending is not None and not job.ending.tried:
        left_s = by - core.clock.time()
        if left_s <= 0:
            epochs = ", ".join(str(status.lease.epoch) for status in core.state.leases_of(pipeline_id))
            raise WaitTimeoutError(
                f"pipeline {pipeline_id!r} did not end within {_END_S:g} s, because a node of its processes or devices "
                f"does not answer{f'; it still has the leases {epochs}' if epochs else ''}; it goes on ending"
            )
        await called(core.known.watchers(pipeline_id), left_s)


async def parts_seen(core: Core, epoch: int) -> None:
    """Answers when the parts of a lease that were given back are free, or it is over; or after a while."""
    by = core.clock.time() + _PART_S
    while core.known.hold(epoch).parts and core.clock.time() < by:
        await called(core.known.watchers(epoch), by - core.clock.time())
