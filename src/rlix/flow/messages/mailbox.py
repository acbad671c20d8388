"""A worker's mailbox: what has come for it and was not read yet, and how it reaches those of others.

A message is put straight into its reader's process: its tensors' bytes as a file in shared memory of the reader's, or
from another node through Ray's object store. It is sent when it is there, whether it is read or not, so two that send
to each other first do not wait for each other.
"""

import contextlib
import os
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from rlix.flow.channels.codec import Parcel, pack, unpack
from rlix.flow.memory import GpuMemory
from rlix.flow.messages.gpus import landed, shared
from rlix.flow.messages.routes import Carrier, Place, Route, route
from rlix.flow.scratch import Scratch, shared_memory
from rlix.protocol.errors import WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, DeviceKind

_LOOK_S = 1.0  # how often who waits for a message looks whether its sender is alive
_ANSWER_S = 10.0  # for a sender to say that it is
making = threading.Lock()
"""Held while a process makes its mailbox. Not beside `Peer`, whose globals go to workers by value."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a mailbox is, and the folder for what is written into it."""

    place: Place
    folder: str


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    handle: "ActorHandle[Any]"
    home: Home
    sending: threading.Lock = field(default_factory=threading.Lock)  # until it is there, or the order would be open


class Member(Protocol):
    """What a mailbox needs to know of a worker's place in its group (`rlix.flow.workers.worker.WorkerContext`)."""

    @property
    def group(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def kind(self) -> DeviceKind: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...


class Mailbox:
    """`me`: the worker's name, `group:rank`, in this namespace of Ray's (None: the program's). Thread-safe.

    `cuda_ipc`: what it sends may stay on a GPU that its reader sees too.
    """

    def __init__(self, me: str, place: Place, namespace: str | None = None, *, cuda_ipc: bool = False) -> None:
        self.me = me
        self._namespace, self._cuda_ipc = namespace, cuda_ipc
        self._scratch = Scratch("mail", shared_memory())
        self.home = Home(place, self._scratch.name)
        self._came: dict[tuple[str, str], deque[Parcel]] = defaultdict(deque)
        self.batches: Counter[str] = Counter()  # sent, by whom they are for
        self._peers: dict[str, _Peer] = {}
        self._met: set[str] = set()
        self._changed = threading.Condition()

    @classmethod
    def of(cls, ctx: Member, *, cuda_ipc: bool) -> "Mailbox":
        """This process's worker's own."""
        gpus = tuple(device.key or str(device.index) for device in ctx.devices if device.kind is DeviceKind.CUDA)
        place = Place(ray.get_runtime_context().get_node_id(), ctx.kind, gpus)
        return cls(f"{ctx.group}:{ctx.rank}", place, ctx.namespace, cuda_ipc=cuda_ipc)

    def deliver(self, sender: str, tag: str, parcel: Parcel) -> None:
        if any(layout.shared for layout in parcel.layouts):
            parcel = landed(parcel, self.home.place)
        with self._changed:
            self._met.add(sender)
            self._came[sender, tag].append(parcel)
            self._changed.notify_all()

    def send(self, value: object, to: Sequence[str], tag: str, timeout_s: float) -> None:
        """Into the mailbox of each of `to`; what lies in shared memory is written once for all of a node.

        Raises:
            WorkerError: one of them has died.
            WaitTimeoutError: one of them is not there, did not take it within `timeout_s`, or cannot be reached for the
                moment; it is not known then whether it has it, or still will.
        """
        deadline = time.monotonic() + timeout_s
        died = self._send(value, [self._peer(name, deadline) for name in sorted(set(to))], tag, deadline)
        dead = []
        for name in died:  # it may be another process's name by now
            self._peers.pop(name, None)
            peer = self._find(name, deadline)
            if peer is None or self._send(value, [peer], tag, deadline):
                dead.append(name)
        if dead:
            raise self._dead(dead[0])

    def _send(self, value: object, peers: Sequence[_Peer], tag: str, deadline: float) -> list[str]:
        """Returns those that have died. What went wrong first is raised when it is known of all of them."""
        taken, errors = set(), list[WaitTimeoutError | WorkerError]()
        with self._in_order(peers, deadline):
            held: dict[str, list[GpuMemory]] = defaultdict(list)  # what readers copy on a GPU, until they have
            sent = [
                (peer, parcel, peer.handle._rlix_deliver.remote(self.me, tag, parcel))
                for peer, parcel in self._packed(value, peers, held)
            ]
            for peer, parcel, answer in sent:
                try:
                    took = self._took(peer.name, answer, deadline)
                except WaitTimeoutError as error:  # it may still take it
                    errors.append(error)
                    continue
                except WorkerError as error:
                    errors.append(error)
                    took = False
                if took:
                    taken.add(peer.name)
                else:
                    _remove(parcel, held[peer.name])
        if errors:
            raise errors[0]
        return [peer.name for peer in peers if peer.name not in taken]

    def _took(self, name: str, answer: Any, deadline: float) -> bool:
        """False: it has died. Raises WorkerError: it could not; WaitTimeoutError: it may have, or still will."""
        try:
            ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise WaitTimeoutError(f"{self.me}: {name} did not take a message in time") from error
        except ActorUnavailableError as error:
            raise WaitTimeoutError(f"{self.me}: {name} cannot be reached; it may have the message, or not") from error
        except RayTaskError as error:
            raise WorkerError(f"{self.me}: {name} could not take a message: {error.cause}") from error
        except RayActorError:
            return False
        return True

    def receive(self, sender: str, tag: str, timeout_s: float) -> Any:
        """The oldest message of this sender and tag.

        Raises:
            WorkerError: the sender died, and what it had sent has been read.
            WaitTimeoutError: none came within `timeout_s`.
        """
        _check_name(sender)
        deadline, gone = time.monotonic() + timeout_s, False
        while (parcel := self._next(sender, tag, 0.0 if gone else min(_LOOK_S, deadline - time.monotonic()))) is None:
            if gone:
                raise self._dead(sender)
            if time.monotonic() >= deadline:
                unknown = "" if sender in self._met else ", of whom nothing was heard yet"
                raise WaitTimeoutError(f"{self.me} waited {timeout_s:g} s for a message of {sender}{unknown}")
            gone = self._gone(sender, deadline - time.monotonic())
        try:
            return unpack(parcel, "cuda" if self.home.place.kind is DeviceKind.CUDA else "cpu")
        finally:
            _remove(parcel)  # what is mapped stays

    def _next(self, sender: str, tag: str, limit: float) -> Parcel | None:
        with self._changed:
            came = self._came[sender, tag]
            return came.popleft() if self._changed.wait_for(lambda: bool(came), max(0.0, limit)) else None

    def _gone(self, sender: str, limit: float) -> bool:
        """Whether it was there and is not any more. One that was started again under the same name is there."""
        try:
            ray.get(ray.get_actor(sender, self._namespace)._rlix_home.remote(), timeout=max(0.0, min(_ANSWER_S, limit)))
        except (GetTimeoutError, ActorUnavailableError):  # busy, stopped, or out of reach for the moment
            return False
        except ValueError:  # nobody has this name, yet or any more
            return sender in self._met
        except RayActorError:
            return True
        self._met.add(sender)
        return False

    def _peer(self, name: str, deadline: float) -> _Peer:
        """Waits for it to be started."""
        _check_name(name)
        while (peer := self._peers.get(name) or self._find(name, deadline)) is None:
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{self.me}: there is no worker {name} to send to: names are `group:rank`, of groups that the "
                    "same program started in the same namespace"
                )
            time.sleep(0.05)
        return peer

    def _find(self, name: str, deadline: float) -> _Peer | None:
        """None: nobody has this name, or who has it cannot be reached for the moment."""
        try:
            handle = ray.get_actor(name, self._namespace)
            home = ray.get(handle._rlix_home.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except (ValueError, ActorUnavailableError):
            return None
        except GetTimeoutError as error:
            raise WaitTimeoutError(f"{self.me}: {name} did not answer in time to be sent a message") from error
        except RayActorError as error:
            raise self._dead(name) from error
        self._met.add(name)
        return self._peers.setdefault(name, _Peer(name, handle, home))

    def _dead(self, name: str) -> WorkerError:
        self._peers.pop(name, None)
        return WorkerError(f"{self.me}: {name}, at the other end of a message, has died")

    @contextlib.contextmanager
    def _in_order(self, peers: Sequence[_Peer], deadline: float) -> Iterator[None]:
        """`peers` by name: two threads that send to several never hold what the other waits for."""
        with contextlib.ExitStack() as held:
            for peer in peers:
                if not peer.sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    raise WaitTimeoutError(f"{self.me}: an earlier message to {peer.name} is still under way")
                held.callback(peer.sending.release)
            yield

    def _packed(
        self, value: object, peers: Sequence[_Peer], held: dict[str, list[GpuMemory]]
    ) -> list[tuple[_Peer, Any]]:
        """For each that lives, by its route: a parcel whose file is its own, or a reference to one without a file."""
        packed: dict[Route, Any] = {}
        found: list[tuple[_Peer, Any]] = []
        try:
            for peer in peers:
                way = route(self.home.place, peer.home.place, cuda_ipc=self._cuda_ipc)
                share = partial(shared, place=self.home.place, way=way, held=held[peer.name])
                name = uuid.uuid4().hex
                try:
                    if way in packed and not way.ipc:
                        parcel = _linked(packed[way], Path(peer.home.folder) / name)
                    elif way.carrier is Carrier.SHARED_MEMORY:
                        parcel = pack(value, Path(peer.home.folder), name, onto=way.onto, share=share)
                    else:
                        parcel = ray.put(pack(value, onto=way.onto))
                except FileNotFoundError:  # its folder went with it
                    _remove(None, held[peer.name])
                    continue
                packed[way] = parcel
                found.append((peer, parcel))
        except BaseException:  # raised again; nobody is sent these
            for _, parcel in found:
                _remove(parcel)
            for memories in held.values():
                _remove(None, memories)
            raise
        return found


def _check_name(name: object) -> None:
    if not isinstance(name, str) or ":" not in name:
        such = f"{name if isinstance(name, str) else 'critic'}:0"
        raise ValueError(f"{name!r} names no worker: names are text, `group:rank`, such as {such}")


def _remove(parcel: Any, memories: Sequence[GpuMemory] = ()) -> None:
    """`memories`: of a message that nobody will read, its bytes on GPUs."""
    if isinstance(parcel, Parcel) and parcel.path:
        Path(parcel.path).unlink(missing_ok=True)
    for memory in memories:
        memory.withdraw()


def _linked(packed: Any, path: Path) -> Any:
    """The same bytes under another reader's name, who removes them without taking them from anybody."""
    if not isinstance(packed, Parcel) or not packed.path:
        return packed
    os.link(packed.path, path)
    return replace(packed, path=str(path))
