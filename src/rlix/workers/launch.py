"""Groups as handles: `group.method(...)` calls every rank and returns a `Call`, a future."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import ray

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device
from rlix.workers.counts import check_count
from rlix.workers.group import WorkerGroup
from rlix.workers.placement import Placement, place
from rlix.workers.user_errors import sent
from rlix.workers.worker import Worker

DEFAULT_TIMEOUT_S = 600.0


class Call:
    """A method that runs on some ranks of a group. `timeout_s`: of a `wait` that is told no other."""

    def __init__(
        self,
        group: WorkerGroup,
        method: str,
        ranks: Sequence[int] | None,
        refs: list[Any],
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.refs = refs
        self._group, self._method, self._ranks, self._timeout_s = group, method, ranks, timeout_s
        self._started = time.monotonic()
        self._ended: list[float] = []
        self._watch()

    def _watch(self) -> None:
        for ref in self.refs:
            ref.future().add_done_callback(lambda _: self._ended.append(time.monotonic()))

    @property
    def done(self) -> bool:
        """Whether every rank has answered, with a result or an error."""
        return len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0]) == len(self.refs)

    @property
    def late(self) -> list[int]:
        """The ranks that have not answered."""
        ranks = range(self._group.world_size) if self._ranks is None else self._ranks
        answered = set(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0])
        return [rank for rank, ref in zip(ranks, self.refs, strict=True) if ref not in answered]

    @property
    def duration_s(self) -> float:
        """From the call to the last answer, or until now."""
        ended = self._ended
        return (max(ended) if len(ended) == len(self.refs) else time.monotonic()) - self._started

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """The results in the order of the ranks.

        Raises:
            WorkerError: a rank raised or died: the first one that did, with its own traceback.
            WaitTimeoutError: ranks, which are named, did not answer within `timeout_s` (None: the group's).
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        return self._group.results(self._method, self.refs, timeout_s=limit, ranks=self._ranks)


class Group:
    """The ranks of one worker class. Attributes are the methods of the class: `group.method(...)` is a `Call`.

    `timeout_s`: of calls that are told no other.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        ranks: Sequence[int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.workers, self.ranks, self.timeout_s = workers, ranks, timeout_s

    @property
    def name(self) -> str:
        return self.workers.name

    def on(self, *ranks: int) -> "Group":
        """The same group; calls go to these ranks only.

        Raises:
            SpecError: there are none.
        """
        if not ranks:
            raise SpecError(f"{self.name}: on() needs ranks, from 0 to {self.workers.world_size - 1}")
        return Group(self.workers, ranks, self.timeout_s)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Call:
        cls = self.workers.worker_cls
        if not callable(getattr(cls, method, None)):
            there = ", ".join(n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n)))
            raise SpecError(f"{self.name}: {cls.__name__} has no method {method}(); it has {there}")
        values = [*((f"argument {i}", value) for i, value in enumerate(args, 1)), *kwargs.items()]
        with sent(f"{self.name}: {method}()", values):
            refs = self.workers.submit(method, args, kwargs, ranks=self.ranks)
        return Call(self.workers, method.removeprefix("_rlix_"), self.ranks, refs, self.timeout_s)

    def close(self) -> None:
        self.workers.close()

    def __getattr__(self, method: str) -> Callable[..., Call]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self.call(method, *args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def launch(
    worker_cls: type[Worker],
    placement: Placement,
    devices: Sequence[Device],
    *,
    name: str | None = None,
    **options: Any,
) -> Group:
    """A group of `worker_cls` where `placement` says; `options` are those of `WorkerGroup`.

    `name` (default: the class's) is of this group alone, among those of a program that there are at a time.

    Raises what `place` and `WorkerGroup` raise.
    """
    if not (isinstance(worker_cls, type) and issubclass(worker_cls, Worker)):
        raise SpecError(f"{worker_cls!r} is not a class derived from rlix.flow.Worker")
    if name is not None and not isinstance(name, str):
        raise SpecError(f"launch: the name of a group is text, not {name!r}")
    check_count("launch: max_concurrency", options.get("max_concurrency", 1))
    placements = place(placement, devices)
    name = name or worker_cls.__name__
    with sent(name, (options.get("kwargs") or {}).items()):
        return Group(WorkerGroup(worker_cls, name=name, placements=placements, **options))
