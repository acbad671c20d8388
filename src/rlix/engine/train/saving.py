"""Saving a training state in the background: the worker's part, and the handle its user waits on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlix.engine.train import checkpoint
from rlix.engine.train.parts import Parts
from rlix.nn import BaseTrainModule
from rlix.protocol.errors import WaitTimeoutError, WorkerError

_SLICE_S = 0.1
"""Longest that one look at a save occupies a worker; training calls of other threads go in between."""


class BackgroundSaver:
    """One rank's saves, one after the other on a thread with a process group of its own.

    Args:
        timeout_s: longest a rank waits for the others, and for its own save before the one it is asked to start.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._saves: list[Future[None]] = []

    def start(self, module: BaseTrainModule, folder: Path, parts: Parts) -> int:
        """Copy the state, begin to write it and return the save's number. All ranks call it, in the same order.

        At most one copy exists at a time: a save still being written is waited for first.
        """
        self.drain(self._timeout_s)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
            if dist.is_initialized():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        snapshot = checkpoint.capture(module, copy=True, parts=parts)
        self._saves.append(self._pool.submit(checkpoint.write_state, snapshot, folder, self._group))
        return len(self._saves) - 1

    def result(self, number: int) -> tuple[bool, str | None]:
        """Whether it has ended (waiting a moment for that), and what went wrong."""
        save = self._saves[number]
        wait([save], timeout=_SLICE_S)
        if not save.done():
            return False, None
        error = save.exception()
        return True, None if error is None else f"{type(error).__name__}: {error}"

    def drain(self, timeout_s: float) -> None:
        """Raises WaitTimeoutError when the last save does not end in time; its own error is its handle's business."""
        last = self._saves[-1:]
        if wait(last, timeout=timeout_s).not_done:
            raise WaitTimeoutError(f"the save before this one did not end within {timeout_s:g} s")


class SaveHandle:
    """A save in progress. Training may go on at once; the folder appears when the save is complete.

    Args:
        results: asks every rank for `BackgroundSaver.result`.
    """

    def __init__(
        self,
        owner: str,
        folder: Path,
        results: Callable[[], list[tuple[bool, str | None]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._owner = owner
        self._results = results
        self._clock = clock
        self._done = False
        self._failed: WorkerError | WaitTimeoutError | None = None

    def done(self) -> bool:
        """Whether the folder is complete. Raises WorkerError when the save failed."""
        return not self._unfinished()

    def wait(self, timeout_s: float = 600.0) -> Path:
        """Block until the folder is complete and return it.

        Raises:
            WorkerError: a rank could not write; an older folder of the name is as it was.
            WaitTimeoutError: not complete within `timeout_s`; names the ranks that are still writing.
        """
        deadline = self._clock() + timeout_s
        while late := self._unfinished():
            if self._clock() >= deadline:
                raise WaitTimeoutError(
                    f"{self._owner}: rank(s) {', '.join(map(str, late))} did not finish saving to {self.folder} "
                    f"within {timeout_s:g} s"
                )
        return self.folder

    def settle(self, timeout_s: float) -> None:
        """Wait for the end, good or bad, before the workers end; `done` and `wait` remember it."""
        try:
            self.wait(timeout_s)
        except (WorkerError, WaitTimeoutError) as error:
            self._failed = error

    def _unfinished(self) -> list[int]:
        if self._failed is not None:
            raise self._failed
        if self._done:
            return []
        results: list[tuple[bool, Any]] = self._results()
        for rank, (_, error) in enumerate(results):
            if error is not None:
                raise WorkerError(f"{self._owner}: rank {rank} failed to save to {self.folder}: {error}")
        late = [rank for rank, (ended, _) in enumerate(results) if not ended]
        self._done = not late
        return late
