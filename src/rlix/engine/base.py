"""What every engine is: a handle on a group of workers whose bytes are on devices, in host memory or nowhere."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

import torch

from rlix.engine import placement
from rlix.engine.life_cycle import Life, Residency
from rlix.engine.residency import MoveReport
from rlix.protocol.errors import RlixError, WorkerError
from rlix.protocol.messages import Device, Process
from rlix.workers.group import WorkerGroup


class Engine(ABC):
    """`name` is that of the workers, in logs and errors; a unique end is added."""

    devices: tuple[Device, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._group: WorkerGroup | None = None
        self._life = Life()
        self._known = True  # whether that is what the workers last said; after a call that failed they are asked
        self._timeout_s = 0.0  # longest a call may take

    @property
    def processes(self) -> dict[int, Process]:
        """The workers' processes by rank: what a lease's holders are named by. Empty when nothing is built."""
        return {} if self._group is None else self._group.processes

    @property
    def life(self) -> Life:
        """Where the bytes are, and which weights they are, of all workers together."""
        if not self._known:
            self._known = True
            try:
                self._life = self._ask_workers()
            except BaseException:  # raised again: they are asked the next time
                self._known = False
                raise
        return self._life

    @abstractmethod
    def _ask_workers(self) -> Life:
        """What is so once they are through with whatever they were called for last."""

    @property
    def residency(self) -> Residency:
        return self.life.residency

    @property
    def device(self) -> torch.device:
        """Where the bytes are: the devices' kind ("cuda", "cpu"), "cpu" for the host, "meta" for nowhere."""
        if self.residency is Residency.DEVICE and self.devices:
            return torch.device(self.devices[0].kind.value)
        return torch.device("cpu" if self.residency is Residency.HOST else "meta")

    @property
    def leased(self) -> bool:
        """Whether it is on its devices under a job's lease, not on the program's own account."""
        return self.life.epoch > 0

    @abstractmethod
    def cuda(self, what: Literal["weights"] | None = None) -> MoveReport:
        """Bring the bytes, or only the weights, on the devices (virtual ones too)."""

    @abstractmethod
    def cpu(self) -> MoveReport:
        """Free the devices' memory; what is worth keeping waits in host memory."""

    @abstractmethod
    def meta(self) -> MoveReport:
        """Drop every byte."""

    def to(self, where: str | torch.device) -> MoveReport:
        """`cuda`, `cpu` or `meta`, as in PyTorch."""
        moves: dict[str, Callable[[], MoveReport]] = {"cuda": self.cuda, "cpu": self.cpu, "meta": self.meta}
        move = moves.get(str(where))
        if move is None:
            raise ValueError(
                f"cannot move an engine to {where!s}; known: {', '.join(moves)}, on the devices that it was built for"
            )
        return move()

    def close(self) -> None:
        """End the workers. Calling it twice is fine; the engine can be built again."""
        self._end(graceful=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for subclasses ----------------------------------------------------------------------------------------

    def _choose_devices(
        self, size: int, replicas: int | None, devices: Sequence[Device] | None, **where: Any
    ) -> tuple[Device, ...]:
        """Devices for `replicas` of `size` devices each; see `placement.choose` for `where`.

        Raises:
            RlixError: there are workers already.
            ValueError: sizes and devices do not agree, or no devices fit.
        """
        if self._group is not None:
            raise RlixError(f"{self.name} is built already; close() it first")
        count = _device_count(size, replicas, devices)
        return placement.choose(count, bundle=size, devices=devices, **where)

    def _workers(self) -> WorkerGroup:
        if self._group is None:
            why = f"given up after an error: {self._life.failure}" if self._life.failure else "not built, or closed"
            raise RlixError(f"{self.name} has no workers ({why}): build() it")
        return self._group

    def _end(self, *, graceful: bool) -> None:
        group, self._group = self._group, None
        placement.vacate(self)
        self._life, self._known = Life(self._life.whole), True
        self.devices = ()
        if group is not None:
            group.close(graceful=graceful)


def plainly(error: WorkerError) -> RlixError:
    """The error a worker raised, where it is one of ours: with its own type, and a message that names the worker."""
    cause = getattr(error.__cause__, "cause", None)
    return type(cause)(str(error)) if isinstance(cause, RlixError) else error


def named_dtype(dtype: str | torch.dtype) -> str:
    """As torch spells it, without the module. Raises ValueError for what is none."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}; use for instance 'float32' or 'bfloat16'")  # noqa: TRY004
    return name


def merged(reports: Iterable[MoveReport]) -> MoveReport:
    """One report of a move in which all workers took part at the same time."""
    each = list(reports)
    return MoveReport(
        bytes=sum(report.bytes for report in each),
        seconds=max(report.seconds for report in each),
        fragmentation_before=max(report.fragmentation_before for report in each),
        fragmentation_after=max(report.fragmentation_after for report in each),
    )


def _device_count(size: int, replicas: int | None, devices: Sequence[Device] | None) -> int:
    if size < 1 or (replicas is not None and replicas < 1):
        raise ValueError(f"tensor_parallel_size={size}, data_parallel_size={replicas}: at least 1 each")
    if devices is None:
        return size * (replicas or 1)
    if not devices or len(devices) % size or (replicas is not None and size * replicas != len(devices)):
        raise ValueError(
            f"{len(devices)} device(s) do not fit tensor_parallel_size={size} x data_parallel_size={replicas or 'any'}"
        )
    return len(devices)
