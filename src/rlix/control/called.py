"""Waiting in the event loop until somebody tells that something has changed."""

import asyncio
from collections.abc import Callable


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
