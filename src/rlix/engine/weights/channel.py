"""The ends of a channel: the processes of two engines between which weights go from shard to shard.

A channel is opened once, ahead of the first transfer, and stays. Its members meet at the process that asked for it,
connect the two sides with each other, and map the memory that they share. A transfer begins when every member has said
there that it is ready, receivers after they have checked what will come: whoever refuses stops all before the first
byte. From then on every wait is for a message from the other side, so that a member that
leaves is noticed at once.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from rlix.engine.life_cycle import WeightsId
from rlix.engine.weights.buckets import ALIGNMENT, HOST, Contents
from rlix.engine.weights.group import open_nccl
from rlix.engine.weights.links import Links, Listener, connect
from rlix.engine.weights.rendezvous import Entrance
from rlix.engine.weights.schedule import Load, Way
from rlix.flow.memory import GpuMemory, HostMemory, opened_gpu, opened_host, synchronize
from rlix.flow.workers.store import GroupStore
from rlix.protocol.errors import RlixError, WaitTimeoutError, WeightSyncError

SLOTS = 2
"""Rounds whose buckets exist at a time: one is written while another is read."""


class TransferError(RlixError):
    """A transfer broke off in the middle: some tensors of a receiver may be new and some old."""


class RefusedError(WeightSyncError):
    """Another member could not take part in a transfer, which therefore did not begin; its own error says why."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one member needs in order to take part in a channel.

    Attributes:
        channel: its name, "A to B#1": the same for all members and for no other channel.
        host, port: where the members meet.
        members: what errors call them; sources come first.
        loads: the buckets that this member writes or reads, in order.
        nccl_port: of the store on `host` by which NCCL connects the members; 0: they do without NCCL.
        timeout_s: longest that one side waits for another.
    """

    channel: str
    host: str
    port: int
    members: tuple[str, ...]
    sources: int
    member: int
    loads: tuple[Load, ...]
    nccl_port: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """One transfer through an open channel, in the hands of `member`.

    Attributes:
        names: the tensors that move; None: all.
        firsts: of each replica: which member its first worker is.
        base: with `names`: the weights that receivers must have, of which the other tensors stay.
    """

    channel: str
    number: int
    names: frozenset[str] | None
    firsts: tuple[int, ...]
    base: WeightsId | None = None
    member: int = -1

    def sent_by(self, rank: int) -> "Delivery":
        return replace(self, member=rank)

    def received_by(self, replica: int | None, worker: int | None) -> "Delivery":
        """In the hands of a replica (its first worker), or of one of the replica's other workers."""
        first = self.member if replica is None else self.firsts[replica]
        return replace(self, member=first + (worker or 0))


OPENING = 0
"""In place of a transfer's number, which begin at 1: while a channel is being opened."""


def reason(error: BaseException) -> str:
    """What members are told of an error of one of them."""
    return str(error) or type(error).__name__


class Member:
    """One end of a channel, in the process that holds the weights. Made by `join`."""

    def __init__(self, ticket: Ticket, device: torch.device) -> None:
        self.ticket, self.device = ticket, device
        self._deadline = time.monotonic() + ticket.timeout_s
        self._entrance: Entrance | None = None
        self._links = Links({})
        self._nccl: Any = None
        self._store: GroupStore | None = None  # of NCCL's, which does not keep it
        self._own: dict[Way, HostMemory | GpuMemory] = {}
        self._mapped: dict[tuple[int, Way], torch.Tensor] = {}
        self._slot: dict[tuple[int, Way], int] = {}
        self._message = torch.empty(0, dtype=torch.uint8)  # as large as the largest; one at a time is sent or received
        self._chosen: tuple[frozenset[str] | None, tuple[Load, ...]] = None, ticket.loads
        self.read: dict[Load, Contents] = {}  # what a target keeps of the loads that were chosen last

    @property
    def name(self) -> str:
        return self.ticket.members[self.ticket.member]

    # ---- opening and closing -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Meet all other members, open the group and map what is shared.

        Raises:
            WaitTimeoutError: somebody did not come within the ticket's time; names whom.
            WeightSyncError: the group or the memory could not be opened.
        """
        try:
            self._open()
        except BaseException as error:  # re-raised
            if not isinstance(error, WaitTimeoutError):  # which all who wait come to by themselves, and name it
                self.refuse(OPENING, error)
            self.close()
            raise

    def _open(self) -> None:
        ticket, everyone = self.ticket, range(len(self.ticket.members))
        with self._named("reach the process that asked for the channel"):
            address = ticket.host, ticket.port
            self._entrance = Entrance(ticket.channel, ticket.member, address, ticket.timeout_s)
        said: dict[str, str] = {}
        self._slot = self._slots()
        for (source, way), slot in self._slot.items():
            if source == ticket.member:
                size = slot * SLOTS
                self._own[way] = HostMemory(size) if way == "shm" else GpuMemory(size, self.device)
                said[f"memory/{source}/{way}"] = self._own[way].handle
        listener = None
        if ticket.member < ticket.sources:
            listener = Listener(ticket.channel, address)
            said[f"address/{ticket.member}"] = listener.address
        found = self._meet("come", OPENING, said)
        with self._named("connect to the other side"):
            if listener is not None:
                self._links = listener.accept(everyone[ticket.sources :], self._deadline)
            else:
                addresses = {source: found[f"address/{source}"] for source in range(ticket.sources)}
                self._links = connect(ticket.channel, ticket.member, addresses, self._deadline)
            if ticket.nccl_port:
                self._nccl = self._within(self._open_nccl)
        for source, way in self._slot:
            self._mapped[source, way] = self._map(source, way, found[f"memory/{source}/{way}"])
        self._meet("open", OPENING)

    def _open_nccl(self) -> Any:
        ticket = self.ticket
        address = ticket.host, ticket.nccl_port
        self._store = GroupStore(address, ticket.channel, ticket.timeout_s, ticket.timeout_s)
        return open_nccl(self._store, ticket.member, len(ticket.members), ticket.timeout_s, self.device)

    def _slots(self) -> dict[tuple[int, Way], int]:
        """Bytes of one bucket at most, by source and way, of what is shared."""
        sizes: defaultdict[tuple[int, Way], int] = defaultdict(int)
        for load in self.ticket.loads:
            if load.way != "p2p":
                size = load.start + load.nbytes + -load.nbytes % ALIGNMENT
                sizes[load.source, load.way] = max(sizes[load.source, load.way], size)
        if self.ticket.member >= self.ticket.sources:  # a reader may see less of a bucket than there is in it
            return dict.fromkeys(sizes, 0)
        return dict(sizes)

    def _map(self, source: int, way: Way, handle: str) -> torch.Tensor:
        if way in self._own and source == self.ticket.member:
            return self._own[way].data
        with self._named(f"map the memory of {self.ticket.members[source]}"):
            data = opened_host(handle) if way == "shm" else opened_gpu(handle, self.device)
        self._slot[source, way] = data.numel() // SLOTS
        return data

    def close(self) -> None:
        """Leave. Who still waits for this member learns of it at once."""
        self._links.close()
        if self._entrance is not None:
            self._entrance.close()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()
        for memory in self._own.values():
            memory.close()
        self._own, self._mapped, self.read = {}, {}, {}

    # ---- one transfer ------------------------------------------------------------------------------------------

    @contextmanager
    def transfer(self, delivery: Delivery) -> Iterator[tuple[Load, ...]]:
        """Begin when all are ready; gives the loads to write or read. If the block fails, the member leaves.

        Raises:
            WeightSyncError: somebody refused, and nothing was changed anywhere.
            WaitTimeoutError: somebody did not get ready in time; names whom.
        """
        try:
            try:
                self._deadline = time.monotonic() + self.ticket.timeout_s
                self._meet("ready", delivery.number)
            except RuntimeError as error:
                if isinstance(error, RlixError) and not isinstance(error, TransferError):
                    raise  # it says itself who did not come
                raise RefusedError(f"weights were not sent, and nothing was changed: {error}") from error
            yield self.loads(delivery)
        except BaseException as error:  # re-raised
            self.refuse(delivery.number, error)
            leave(self.ticket.channel, self.ticket.member)
            raise

    def loads(self, delivery: Delivery) -> tuple[Load, ...]:
        """What this member writes or reads of a transfer; the same object for one that moves the same tensors again."""
        if delivery.names != self._chosen[0]:
            found = (load.only(delivery.names) for load in self.ticket.loads)
            self._chosen, self.read = (delivery.names, tuple(load for load in found if load is not None)), {}
        return self._chosen[1]

    def refuse(self, number: int, error: BaseException) -> None:
        """Have everybody know that a transfer cannot be; the first reason counts."""
        if self._entrance is not None:
            with suppress(OSError):  # the process that asked for all this has gone
                self._entrance.refuse(number, reason(error))

    def bucket(self, load: Load) -> torch.Tensor:
        """The memory of a bucket: shared, or for messages this member's own."""
        if load.way == "p2p":
            if not self._message.numel():
                size = max(each.nbytes for each in self.ticket.loads if each.way == "p2p")
                self._message = torch.empty(size, dtype=torch.uint8, device=HOST if self._nccl is None else self.device)
            return self._message[: load.nbytes]
        slot = self._slot[load.source, load.way]
        start = load.round % SLOTS * slot + load.start
        return self._mapped[load.source, load.way][start : start + load.nbytes]

    def send(self, load: Load, data: torch.Tensor) -> None:
        """Tell the targets that a bucket is full; in messages its bytes follow."""
        for target in load.targets:
            with self._named(f"send bucket {load.round} to {self.ticket.members[target]}"):
                self._links.say(target, load.round, self.ticket.timeout_s)
                if load.way == "p2p" and self._nccl is not None:
                    self._nccl.send([data], target, 0).wait(timedelta(seconds=self.ticket.timeout_s))
                    synchronize(self.device)
                elif load.way == "p2p":
                    self._links.send(target, data.numpy().data, self.ticket.timeout_s)

    def receive(self, load: Load) -> torch.Tensor:
        with self._named(f"receive bucket {load.round} from {self.ticket.members[load.source]}"):
            data = self.bucket(load)
            self._links.hear(load.source, load.round, self.ticket.timeout_s)
            if load.way == "p2p" and self._nccl is not None:
                self._nccl.recv([data], load.source, 0).wait(timedelta(seconds=self.ticket.timeout_s))
                synchronize(self.device)
            elif load.way == "p2p":
                self._links.receive(load.source, data.numpy().data, self.ticket.timeout_s)
        return data

    def taken(self, load: Load) -> None:
        """Tell the source that a bucket's memory may be written to again."""
        synchronize(self.device)
        with self._named(f"acknowledge bucket {load.round} to {self.ticket.members[load.source]}"):
            self._links.say(load.source, load.round, self.ticket.timeout_s)

    def await_taken(self, load: Load) -> None:
        for target in load.targets:
            with self._named(f"learn that {self.ticket.members[target]} has taken bucket {load.round}"):
                self._links.hear(target, load.round, self.ticket.timeout_s)

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _within(self, action: Callable[[], Any]) -> Any:
        """What may block for ever in C++, in a thread that is left behind when the time is over."""
        result: list[Any] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                result.append(action())
            except BaseException as error:  # noqa: BLE001 - raised below
                raised.append(error)

        thread = threading.Thread(target=run, name="weights", daemon=True)
        thread.start()
        thread.join(self._left())
        if raised:
            raise raised[0]
        if not result:
            raise RuntimeError("the other members did not connect in time")
        return result[0]

    def _meet(self, what: str, number: int, said: Mapping[str, str] | None = None) -> dict[str, str]:
        """Say that this member is so far, and wait until all are, unless somebody refuses transfer `number`.

        Returns what all said.
        """
        assert self._entrance is not None
        with self._named(f"wait for {what!r}"):
            answer = self._entrance.meet(what, number, said or {}, self._left())
        if late := answer.get("late"):
            raise WaitTimeoutError(
                f"{self.name} waited {self.ticket.timeout_s:g} s for {'; '.join(late)} to say {what!r}"
            )
        if "refused" in answer:
            raise TransferError(answer["refused"])
        found: dict[str, str] = answer["said"]
        return found

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:  # what torch.distributed raises, whatever happened
            if isinstance(error, RlixError):
                raise
            limit = f"(timeout {self.ticket.timeout_s:g} s)"
            raise TransferError(f"{self.name} could not {what} {limit}: {error}") from error


# ---- the members of this process -------------------------------------------------------------------------------------

_members: dict[tuple[str, int], Member] = {}


def join(ticket: Ticket, device: torch.device) -> None:
    """Open this process's end of a channel, in place of an earlier one between the same two engines.

    Raises:
        As `Member.open`.
    """
    for channel in {key[0] for key in _members}:
        if channel.rpartition("#")[0] == ticket.channel.rpartition("#")[0] != "" and channel != ticket.channel:
            leave(channel)
    member = Member(ticket, device)
    member.open()
    _members[ticket.channel, ticket.member] = member


def joined(delivery: Delivery) -> Member:
    """Raises WeightSyncError when the channel is not, or no longer, open here."""
    member = _members.get((delivery.channel, delivery.member))
    if member is None:
        raise WeightSyncError(
            f"channel {delivery.channel} is not open here: it was left after a failure, or never joined"
        )
    return member


def leave(channel: str, number: int | None = None) -> None:
    """Close this process's ends of a channel (or one of them), if there are any."""
    for key in [key for key in _members if key[0] == channel and number in (None, key[1])]:
        _members.pop(key).close()


@contextmanager
def answering(delivery: Delivery) -> Iterator[None]:
    """While the block checks whether this process can take part; if it cannot, everybody is told why."""
    try:
        yield
    except BaseException as error:  # re-raised
        joined(delivery).refuse(delivery.number, error)
        leave(delivery.channel, delivery.member)
        raise
