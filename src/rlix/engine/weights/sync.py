"""A trainer's weights into an inference engine: which way they go, and the channel between, seen from outside."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from ray.exceptions import RayError

from rlix.engine import placement
from rlix.engine.life_cycle import WeightsId
from rlix.engine.weights.buckets import Manifest
from rlix.engine.weights.channel import OPENING, Delivery, RefusedError, Ticket, reason
from rlix.engine.weights.known_answer import KnownAnswer
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.plan import plan
from rlix.engine.weights.publication import PublishedWeights, joined
from rlix.engine.weights.rendezvous import Rendezvous
from rlix.engine.weights.schedule import Way, schedule
from rlix.engine.weights.shards import described, shares
from rlix.flow.workers.group import PerRank
from rlix.flow.workers.store import StoreServer
from rlix.protocol.errors import RlixError, WeightSyncError
from rlix.protocol.messages import Device, DeviceKind, Process

logger = logging.getLogger(__name__)

Transport = Literal["auto", "host", "direct", "p2p"]

CHANNEL_BUCKET_BYTES = 16 * 2**20
"""A source has two buckets of this size for what it shares; a receiver of messages has one."""

_numbers = itertools.count(1)


class WeightReceiver(Protocol):
    """What a sync needs of an inference engine. Members, tickets and layouts are in the order of `receivers`."""

    name: str

    @property
    def receivers(self) -> tuple[tuple[Device, ...], ...]: ...

    @property
    def processes(self) -> dict[int, Process]: ...

    def weight_layouts(self, offered: PublishedWeights) -> Sequence[Sequence[Layout]]:
        """What each worker of each replica needs. Raises WeightSyncError: names, shapes or dtypes do not fit."""
        ...

    def join_channel(self, tickets: Sequence[Sequence[Ticket]]) -> Any: ...

    def leave_channel(self, channel: str) -> Any: ...

    def update_weights(self, published: PublishedWeights) -> Any: ...


class Trainer:
    """A trainer's ranks, seen as senders. `run` calls a method of all of them and gives their answers."""

    def __init__(self, name: str, devices: Sequence[Device], run: Callable[..., list[Any]]) -> None:
        self.name, self.devices, self._run = name, devices, run

    def layouts(self, *, as_trained: bool = False) -> tuple[list[Layout], Manifest]:
        """What each rank holds now, and the whole tensors that these are parts of."""
        rows = self._run("weight_layout", as_trained)
        layouts = [layout for layout, _ in rows]
        return layouts, described(layouts, {name: more for _, aliases in rows for name, more in aliases.items()})

    def publish(
        self, version: int, bucket_bytes: int, epoch: int | None, *, as_trained: bool = False
    ) -> PublishedWeights:
        """Every rank stores a share of what it holds."""
        rows = shares(*self.layouts(as_trained=as_trained))
        return joined(self._run("publish", version, bucket_bytes, PerRank(rows), epoch, as_trained))

    def join_channel(self, tickets: Sequence[Ticket]) -> None:
        self._run("join_channel", PerRank(tickets))

    def leave_channel(self, channel: str) -> None:
        self._run("leave_channel", channel)

    def send_weights(self, delivery: Delivery, epoch: int | None) -> None:
        self._run("send_weights", delivery, epoch)


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """What a sync moved, and how. `nbytes` reached receivers; `seconds` are those of the whole call."""

    version: int
    manifest: Manifest
    transports: tuple[str, ...]
    nbytes: int
    seconds: float


def choose(
    transport: Transport, sources: Sequence[Device], receivers: Sequence[Sequence[Device]]
) -> Callable[[int, int], Way] | None:
    """How bytes go from a training rank to a receiver, by their places in the two lists; None: through host buckets.

    "auto" takes "direct" on virtual GPUs, and "host" on GPUs, where nothing else has been measured yet.

    Raises:
        ValueError: the transport asked for cannot reach all receivers; says why.
    """
    if transport not in ("auto", "host", "direct", "p2p"):
        raise ValueError(f'unknown transport {transport!r}; known: "auto", "host", "direct", "p2p"')
    targets = [device for replica in receivers for device in replica]
    kinds = {device.kind for device in (*sources, *targets)}
    if transport == "host" or (transport == "auto" and (kinds != {DeviceKind.CPU} or not targets)):
        return None
    if len(kinds) > 1:
        raise ValueError(f'transport {transport!r} does not reach from GPUs to virtual ones: use "host"')
    cuda = kinds == {DeviceKind.CUDA}

    def way(source: int, target: int) -> Way:
        here, there = sources[source], targets[target]
        if transport == "p2p" or here.node_id != there.node_id:
            return "p2p"
        return "ipc" if cuda and here == there else "shm"

    members = [*sources, *targets]
    if transport == "p2p" and cuda and len(set(members)) < len(members):
        raise ValueError(
            'transport "p2p" needs a GPU of its own for each training rank and each receiver, which are on devices '
            f'{[device.id for device in members]}: use "direct"'
        )
    return way


class Channel:
    """A channel between two engines, as the process sees it that asks for transfers, at which the members meet.

    Args:
        way: as `choose` gives it.
        timeout_s: for all members to come, and later for each wait of one side for the other.

    Raises:
        WeightSyncError: the two do not fit; nothing was changed.
        WaitTimeoutError: a member did not come; names whom.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: WeightReceiver,
        way: Callable[[int, int], Way],
        timeout_s: float,
        bucket_bytes: int,
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self.name = f"{trainer.name} to {engine.name}#{next(_numbers)}"
        self._processes = engine.processes
        self._transfers = itertools.count(1)
        self.synced: WeightsId | None = None  # the weights that receivers have whole
        layouts, self.manifest = trainer.layouts()
        held = [_on(layout, device) for layout, device in zip(layouts, trainer.devices, strict=True)]
        needed = [
            [_on(layout, device) for layout, device in zip(row, devices, strict=True)]
            for row, devices in zip(
                engine.weight_layouts(PublishedWeights(0, self.manifest)), engine.receivers, strict=True
            )
        ]
        sizes = [len(row) for row in needed]
        self._firsts = tuple(len(held) + sum(sizes[:index]) for index in range(len(sizes)))
        made = plan(held, [layout for row in needed for layout in row]).transfers
        self.ways = tuple(sorted({way(transfer.source, transfer.target) for transfer in made}))
        self._bytes = Counter[str]()
        for transfer in made:
            self._bytes[transfer.name] += transfer.nbytes
        members = (*(f"{trainer.name}, rank {rank}" for rank in range(len(held))), *_called(engine.name, sizes))
        places = [*trainer.devices, *(device for replica in engine.receivers for device in replica)]
        host = placement.common_address(places)
        nccl = "p2p" in self.ways and places[0].kind is DeviceKind.CUDA and len(set(places)) == len(places)
        self._nccl_store = StoreServer(host, self.name) if nccl else None
        nccl_port = 0 if self._nccl_store is None else self._nccl_store.port
        shapes = {entry.name: entry.shape for entry in self.manifest.entries}
        loads = schedule(made, shapes, way, bucket_bytes, len(held))
        self._rendezvous = Rendezvous(self.name, host, members)
        base = Ticket(self.name, host, self._rendezvous.port, members, len(held), 0, (), nccl_port, timeout_s)
        tickets = [
            replace(base, member=member, loads=tuple(load for load in loads if member in (load.source, *load.targets)))
            for member in range(len(members))
        ]
        theirs = [tickets[first : first + size] for first, size in zip(self._firsts, sizes, strict=True)]
        try:
            self._both(OPENING, lambda: trainer.join_channel(tickets[: len(held)]), lambda: engine.join_channel(theirs))
        except BaseException:  # re-raised
            self._rendezvous.close()
            raise

    def leads_to(self, engine: WeightReceiver) -> bool:
        """Whether these are still the processes that it was opened to."""
        return engine.processes == self._processes

    def transfer(
        self, version: int, only: Collection[str] | None, epoch: int | None, known: KnownAnswer | None = None
    ) -> int:
        """Have the trainer send, and the engine's update receive; returns the bytes that receivers got.

        With `only`, tensors of these names move. After an error the channel is of no use any more.

        Raises:
            WeightSyncError: unknown names, or receivers do not have the rest from this trainer; nothing was changed.
            Whatever the side that failed first raised; members that were still waiting are told why.
        """
        names = None if only is None else self.known(only)
        if names is not None and self.synced is None:
            raise WeightSyncError(
                f"{self._engine.name} has no weights of {self._trainer.name} yet, or lost them: sync all names first"
            )
        delivery = Delivery(self.name, next(self._transfers), names, self._firsts, self.synced if names else None)
        coming = PublishedWeights(version, self.manifest, delivery=delivery, known=known)
        self.synced = None
        self._both(
            delivery.number,
            lambda: self._trainer.send_weights(delivery, epoch),
            lambda: self._engine.update_weights(coming),
        )
        self.synced = coming.id
        return sum(self._bytes.values()) if names is None else sum(self._bytes[name] for name in names)

    def known(self, only: Collection[str]) -> frozenset[str]:
        """The first names of these tensors. Raises WeightSyncError for unknown ones."""
        first = {name: entry.name for entry in self.manifest.entries for name in entry.names}
        if unknown := sorted(name for name in only if name not in first):
            raise WeightSyncError(f"{self._trainer.name} has no weights of these names: {', '.join(unknown)}")
        return frozenset(first[name] for name in only)

    def close(self) -> None:
        """Have all members leave that still can."""
        self._rendezvous.close()
        if self._nccl_store is not None:
            self._nccl_store.close()
        for side in (self._trainer, self._engine):
            try:
                side.leave_channel(self.name)
            except (RlixError, RayError) as error:
                logger.debug("%s: %s did not leave: %s", self.name, side.name, error)

    def _both(self, number: int, sending: Callable[[], object], receiving: Callable[[], object]) -> None:
        """Both sides at the same time, until both have ended."""
        failed: list[BaseException] = []

        def side(action: Callable[[], object]) -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised below, once the other side knows; Ctrl-C too
                failed.append(error)
                self._rendezvous.refuse(number, reason(error))

        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            sent = pool.submit(side, sending)
            side(receiving)
            sent.result()
        if failed:
            raise min(failed, key=lambda error: isinstance(error, RefusedError))  # the reason, not who was told of it


def _on(layout: Layout, device: Device) -> Layout:
    return replace(layout, node=device.node_id)


def _called(name: str, sizes: Sequence[int]) -> list[str]:
    """What errors call the receivers of replicas with so many workers."""
    return [
        f"{name}, replica {replica}" + (f", worker {worker}" if size > 1 else "")
        for replica, size in enumerate(sizes)
        for worker in range(size)
    ]


class Channels:
    """The channels of one trainer, one for each inference engine that it sends to, kept between transfers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._open: dict[str, tuple[tuple[Transport, float], Channel]] = {}

    def transfer(
        self,
        engine: WeightReceiver,
        version: int,
        *,
        way: Callable[[int, int], Way],
        transport: Transport,
        only: Collection[str] | None,
        timeout_s: float,
        epoch: int | None,
        known: KnownAnswer | None = None,
    ) -> tuple[Channel, int]:
        """Send through the engine's channel, which is opened where there is none; the bytes that receivers got.

        Raises:
            As `Channel` and `Channel.transfer`.
        """
        settings = transport, timeout_s
        opened_as, channel = self._open.get(engine.name, (None, None))
        if channel is None or opened_as != settings or not channel.leads_to(engine):
            synced = channel.synced if channel is not None and channel.leads_to(engine) else None
            self._drop(engine.name)
            channel = Channel(self._trainer, engine, way, timeout_s, CHANNEL_BUCKET_BYTES)
            channel.synced = synced
            self._open[engine.name] = settings, channel
        if only is not None:
            channel.known(only)  # a wrong name costs no channel
        try:
            return channel, channel.transfer(version, only, epoch, known)
        except BaseException:  # re-raised; members have left
            self._drop(engine.name)
            raise

    def close(self) -> None:
        for name in list(self._open):
            self._drop(name)

    def _drop(self, name: str) -> None:
        _, channel = self._open.pop(name, (None, None))
        if channel is not None:
            channel.close()
