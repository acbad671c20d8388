"""`FlowWorker`: a worker of a user's flow, whose state comes and goes."""

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray import cloudpickle

from rlix.flow.parts.items import Items
from rlix.flow.parts.logged import Sums, log
from rlix.node.device_lock import DeviceLocks
from rlix.node.pinned_memory import memory_bytes
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Fence
from rlix.protocol.types import Phase
from rlix.workers.worker import LOCK_TIMEOUT_S, Worker

if TYPE_CHECKING:
    from rlix.flow.parts.own_state import OwnState

Piece = tuple["ray.ObjectRef[Any]", int, int]
"""A part of `Items` in the object store: from one index to another."""
Bounds = tuple[int, int]


class FlowWorker(Worker):
    """Override what the part has, and nothing else.

    `onload` and `offload` are called in turns, under the devices' locks. By themselves they move what the worker keeps
    in its attributes on its devices (modules, optimizers, tensors, and lists and dicts of them), and refuse whoever
    touches it meanwhile; a CUDA graph must be captured anew. What is offloaded must have left the device when
    `offload` returns: on GPUs it is looked at.
    """

    phase: ClassVar[Phase] = Phase.ACTOR_TRAINING
    """What the part does: its place in the queue of the pool. A gang's: not a rollout's."""

    _logged: Sums | None = None  # by the call under way
    _locks: DeviceLocks | None = None
    _own: "OwnState | None" = None
    _turn = 0  # the newest that it knows of
    _came = False  # its onload has begun, and no offload has ended since
    _busy: contextlib.AbstractContextManager[Any] | None = (
        None  # a turn ends when one rank has failed; the others may still compute
    )

    def onload(self) -> None:
        """Bring the state onto `self.ctx.devices`: what `offload` has brought off."""
        if self._own is not None:
            self._own.to_device()

    def offload(self) -> None:
        """Bring it off: what the attributes hold."""
        if self._own is None and self._uses_torch():
            from rlix.flow.parts.own_state import OwnState, devices_of

            self._own = OwnState(self.ctx.group, self, devices_of(self.ctx.kind))
        if self._own is not None:
            self._own.to_host()

    def save(self) -> Any:
        """What a new worker needs to go on, from rank 0: when a new plan moves the part."""

    def restore(self, state: Any) -> None:
        """Go on from what `save` returned."""

    def log(self, **values: Any) -> None:
        """Note numbers (or tensors of one) of the call under way: the step's metrics have the mean of each name."""
        self._logged = {} if self._logged is None else self._logged
        log(self._logged, values)

    def memory(self) -> tuple[float, float]:
        """Bytes on the fullest device: now, and at most since the last call. On a virtual one, what attributes hold."""
        if not self.ctx.devices or self.ctx.kind != "cuda":
            held = 0.0 if self._own is None else float(self._own.device_bytes)
            return held, held
        if not self._uses_torch():
            return 0.0, 0.0
        import torch

        mine = range(torch.cuda.device_count())  # only this worker's are visible
        peak = max(float(torch.cuda.max_memory_allocated(device)) for device in mine)
        for device in mine:
            torch.cuda.reset_peak_memory_stats(device)
        return max(float(torch.cuda.memory_allocated(device)) for device in mine), peak

    def room(self) -> float:
        """Bytes of the smallest device; a virtual one's memory is the host's."""
        if not self.ctx.devices:
            return float("inf")
        if self.ctx.kind != "cuda":
            return float(memory_bytes())
        import torch

        every = range(torch.cuda.device_count())  # only this worker's are visible
        return min(float(torch.cuda.get_device_properties(device).total_memory) for device in every)

    def _rlix_begin(self) -> None:
        """What was made while nobody had a device is brought off."""
        if type(self).offload is FlowWorker.offload:
            self.offload()

    def _rlix_save(self) -> Any:
        """`save` between turns, when the bytes are away: in a copy, since nobody sees them later."""
        with self._readable() as away:
            return pickle.loads(cloudpickle.dumps(self.save())) if away else self.save()

    def _rlix_restore(self, state: Any) -> None:
        """On the devices, as when it was made: what an optimizer loads goes where its parameters are."""
        if self._own is not None:
            self._own.to_device()
        self.restore(state)
        if self._own is not None:
            self._own.to_host()

    @contextlib.contextmanager
    def _readable(self) -> Iterator[bool]:
        if self._own is None or self._own.on_device:
            yield False
            return
        with self._own.readable():
            yield True

    def _uses_torch(self) -> bool:
        """Whether there may be tensors on its devices: nobody is made to import torch, or to begin with CUDA."""
        torch = sys.modules.get("torch")
        return bool(self.ctx.devices and torch and (self.ctx.kind != "cuda" or torch.cuda.is_initialized()))

    def _check_gone(self) -> None:
        if self.ctx.kind != "cuda" or not self._uses_torch():  # a virtual device's memory is host memory
            return
        from rlix.flow.parts.own_state import SMALL, left_behind

        if (left := left_behind()) > SMALL:
            raise RlixError(
                f"offload() left {left / 2**20:.0f} MiB on its device: bring off all of it, or leave `onload` and "
                "`offload` alone and keep what is there in attributes"
            )

    def _rlix_onload(self, lease: Fence | None) -> None:
        if self._locks is None:
            self._locks = self.ctx.device_locks()
        self._locks.acquire(self.ctx.fence(lease), LOCK_TIMEOUT_S)
        self._came = True
        self._busy = self._busy or threading.Lock()
        self.onload()

    def _rlix_offload(self, turn: int) -> None:
        self._turn = max(self._turn, turn)
        with self._busy or contextlib.nullcontext():
            if self._came:  # or it had come on other ranks only
                self.offload()
                self._check_gone()
                self._came = False
            if self._locks is not None:
                self._locks.release()

    def _rlix_part(
        self, method: str, inputs: Sequence[Sequence[Bounds]], turn: int = 0, *given: Any
    ) -> tuple[Items, tuple[int, Sums]]:
        """Call the method with a list of items: of one input as they are, of several as tuples with one of each.

        Inputs are bounds of what is `given`, in that order.

        A call that comes to be made only when its turn is over is not made: nobody waits for what it makes, and what it
        learnt from these items would be learnt in another turn.
        """
        self._turn = max(self._turn, turn)
        left = iter(given)
        lists = [[item for bounds in pieces for item in next(left).cut(*bounds)] for pieces in inputs]
        items = lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))
        call: Callable[[list[Any]], Any] = getattr(self, method)
        with self._busy or contextlib.nullcontext():
            if turn < self._turn:
                raise RuntimeError(f"{method}() came too late: its turn is over")
            self._logged = None
            try:
                made = call(items)
                if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
                    raise TypeError(
                        f"{method}() returned {type(made).__name__}: a part returns a list, one item for each it got "
                        "(the last part: of any length)"
                    )
                made = list(made)  # of a generator, this is the work
            except SystemExit as error:  # Ray would end the process, and with it what it has learnt
                raise RuntimeError(f"{method}() was left by {error!r}") from error
        return Items(made), (len(made), self._logged or {})


def apart(inputs: Sequence[Sequence[Piece]]) -> tuple[list[list[Bounds]], list["ray.ObjectRef[Any]"]]:
    """What a call of a part says of its inputs, and the references: as arguments of their own, which Ray sends along
    where they are small. Whoever gets them within others must ask the one who has them."""
    bounds = [[(start, stop) for _, start, stop in pieces] for pieces in inputs]
    return bounds, [ref for pieces in inputs for ref, _, _ in pieces]


def fetch(pieces: Sequence[Piece], timeout_s: float | None = None) -> list[Any]:
    """The items. Raises Ray's GetTimeoutError."""
    found = ray.get([ref for ref, _, _ in pieces], timeout=timeout_s)
    return [item for (_, start, stop), items in zip(pieces, found, strict=True) for item in items.cut(start, stop)]
