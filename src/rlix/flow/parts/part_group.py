"""`PartGroup`: the ranks of a flow's part, whose states come and go."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlix.flow.parts.flow_worker import FlowWorker, Piece, apart
from rlix.flow.parts.logged import Sums
from rlix.protocol.errors import WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Fence
from rlix.workers.futures import futures_of
from rlix.workers.group import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A method that runs on some ranks of a group."""

    method: str
    ranks: Sequence[int]
    futures: Sequence["Future[Any]"]

    @property
    def late(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, future in zip(self.ranks, self.futures, strict=True) if not future.done()]


class PartGroup(WorkerGroup):
    """A group that is an occupant of a `DeviceLock`. `options` are those of `WorkerGroup`.

    A rank that does not answer within `timeout_s` is ended: it would keep its devices from everybody else.

    `lease`: what `onload` locks the devices under; None: the program's own account. `logged`: what its ranks noted.
    """

    def __init__(
        self,
        worker_cls: type[FlowWorker],
        *,
        name: str,
        placements: Sequence[tuple[Device, ...]],
        timeout_s: float,
        **options: Any,
    ) -> None:
        self.timeout_s = timeout_s
        self.lease: Fence | None = None
        self.logged: list[Sums] = []
        self._open: list[Call] = []  # that were not answered when they were last looked at
        self._there: set[int] = set()  # ranks that may have state on their devices
        self._turn = 0  # it is over when a call has failed, or the states go: what was called before is late then
        super().__init__(worker_cls, name=name, placements=placements, **options)
        try:
            self.ask("_rlix_begin")
        except BaseException:  # raised again; nothing is left behind
            self.close()
            raise

    @property
    def late(self) -> list[int]:
        """The ranks that have not answered a call."""
        return sorted({rank for call in list(self._open) for rank in call.late})

    def onload(self) -> None:
        """Bring every rank's state onto its devices, and take their locks. Raises what `answers` raises."""
        self._there = set(range(self.world_size))
        self.answers(self._asked("onload", range(self.world_size), self.lease))

    def offload(self) -> None:
        """Bring the states off, when the ranks have ended what they do. Of a rank that has died nothing is there.

        Raises what `answers` raises, but not that a rank has died, and not before all have answered or were ended; and
        WaitTimeoutError: the process of one that has died, or was ended, is there still.
        """
        self._turn += 1
        living = [rank for rank in range(self.world_size) if rank not in self.lost]
        if living:
            self._bring_off(living)
        for rank in sorted(self._there & self.lost):
            self.kill(rank)  # Ray's word that it has died is not the kernel's
            self._there.discard(rank)

    def _bring_off(self, living: Sequence[int]) -> None:
        call = self._asked("offload", living, self._turn)
        failed: WorkerError | None = None
        try:
            wait(call.futures, self.timeout_s)
        finally:  # on Ctrl-C too
            late = set(call.late)
            for rank, future in zip(living, call.futures, strict=True):
                if rank not in late:
                    failed = self._left(rank, future) or failed
        if late:
            self.answers(call, 0.0)
        if failed is not None:
            raise failed

    def part(
        self, method: str, inputs: Sequence[Sequence[Sequence[Piece]]], ranks: Sequence[int] | None = None
    ) -> tuple[list[Any], Call]:
        """Give each of `ranks` (default: all) its lists of items; the results stay where they are made.

        Returns references to the ranks' results, and a call for `counts`.
        """
        self.check_usable(method)
        ranks = range(self.world_size) if ranks is None else ranks
        calls = [
            self.handles[rank]._rlix_part.options(num_returns=2).remote(method, bounds, self._turn, *refs)
            for rank, (bounds, refs) in zip(ranks, map(apart, inputs), strict=True)
        ]
        futures = futures_of(refs[1] for refs in calls)
        for refs, future in zip(calls, futures, strict=True):
            future.add_done_callback(partial(_read_error, refs[0]))
        return [refs[0] for refs in calls], self._note(Call(method, ranks, futures))

    def answers(self, call: Call, timeout_s: float | None = None) -> list[Any]:
        """The ranks' results, in their order; `timeout_s` (None): the group's.

        Raises:
            WorkerError: a rank raised or died.
            WaitTimeoutError: ranks did not answer, and were ended.
        """
        try:
            limit = self.timeout_s if timeout_s is None else timeout_s
            return self._wait(call.method, call.ranks, call.futures, limit)
        except WorkerError:
            self._turn += 1
            raise
        except WaitTimeoutError as error:
            self._turn += 1
            self._end(call.late)
            raise WaitTimeoutError(f"{error}, and were ended") from None

    def counts(self, call: Call) -> list[int]:
        """Of a call of `part`: how many items each rank has made; `logged` has what they noted. Raises as `answers`."""
        told = self.answers(call)
        self.logged += [logged for _, logged in told if logged]
        return [count for count, _ in told]

    def ask(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """`run` with the group's time limit."""
        called = self.call(method, *args, ranks=ranks)
        return self.results(method.removeprefix("_rlix_"), called, timeout_s=self.timeout_s, ranks=ranks)

    def end_late(self) -> None:
        """End the ranks that have not answered a call."""
        self._end(self.late)

    def end(self) -> None:
        """End the ranks that may have state on their devices, so that others can have these."""
        self._end([rank for rank in sorted(self._there) if self.placements[rank]])

    def _asked(self, method: str, ranks: Sequence[int], *args: Any) -> Call:
        return self._note(Call(method, ranks, futures_of(self.call(f"_rlix_{method}", *args, ranks=ranks))))

    def _note(self, call: Call) -> Call:
        self._open = [*(known for known in self._open if known.late), call]
        return call

    def _left(self, rank: int, offloaded: "Future[Any]") -> WorkerError | None:
        """The error with which a rank that has answered did not go."""
        try:
            self._wait("offload", [rank], [offloaded], self.timeout_s)
        except WorkerError as error:  # of one that has died `offload` waits until its process has
            return None if rank in self.lost else error
        self._there.discard(rank)
        return None

    def _end(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.lost and rank not in self._there:
                continue
            logger.warning("%s: rank %d is ended", self.name, rank)
            self.lost.add(rank)
            try:
                self.kill(rank)
                self._there.discard(rank)
            except WaitTimeoutError as error:  # whoever needs its devices is told, by `offload` and by their locks
                logger.error("%s", error)


def _read_error(made: Any, counted: "Future[Any]") -> None:
    """Of a call that failed both results are its error, and Ray writes one that nobody has read to the terminal."""
    if not counted.cancelled() and counted.exception() is not None:
        made.future()
