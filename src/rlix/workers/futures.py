"""Answers of ranks as futures, and which of them failed first."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import ray


def futures_of(refs: "Iterable[ray.ObjectRef[Any]]") -> list[Future[Any]]:
    """Unlike `ray.get`, these may be waited for in any thread of an async actor."""
    return [ref.future() for ref in refs]


def failures(futures: Sequence[Future[Any]]) -> list[int]:
    """A list to which the numbers of those that fail are added as they do."""
    failed: list[int] = []

    def watch(number: int, future: Future[Any]) -> None:
        def note(ended: Future[Any]) -> None:
            if not ended.cancelled() and ended.exception() is not None:
                failed.append(number)

        future.add_done_callback(note)

    for number, future in enumerate(futures):
        watch(number, future)
    return failed


def read_error(future: "asyncio.Future[Any]") -> None:
    """Have the errors read that nobody waits for any more, or asyncio logs each of them."""
    if not future.cancelled():
        future.exception()
