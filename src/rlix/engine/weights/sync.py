"""A trainer's weights into an inference engine: which way they go, and both sides of a transfer between devices."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from rlix.engine import placement
from rlix.engine.weights.buckets import Manifest
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.transfer import FAILED, DeviceTransport, Rendezvous, open_store
from rlix.protocol.messages import Device, DeviceKind

Transport = Literal["auto", "host", "ipc", "broadcast"]

DEVICE_BUCKET_BYTES = 128 * 2**20
"""Rank 0 needs about four times as much beside what it trains, a receiver twice as much."""


class WeightReceiver(Protocol):
    """What a sync needs of an inference engine."""

    name: str

    @property
    def receivers(self) -> tuple[tuple[Device, ...], ...]: ...

    def update_weights(self, published: PublishedWeights) -> Any: ...


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """What a sync moved, and how. `seconds` are those of the whole call."""

    version: int
    manifest: Manifest
    transports: tuple[str, ...]
    seconds: float


def choose(
    transport: Transport, source: Device, receivers: Sequence[Sequence[Device]]
) -> tuple[tuple[DeviceTransport, ...], ...] | None:
    """How the bytes go from training rank 0 on `source` to each receiver of each replica; None: through host memory.

    "auto" takes CUDA IPC where a receiver is on `source` itself, NCCL for all others, and host memory on virtual GPUs
    and for layouts that NCCL refuses: several receivers on one GPU.

    Raises:
        ValueError: the transport asked for cannot reach all receivers; says why.
    """
    if transport not in ("auto", "host", "ipc", "broadcast"):
        raise ValueError(f'unknown transport {transport!r}; known: "auto", "host", "ipc", "broadcast"')
    places = [device for replica in receivers for device in replica]
    kinds = {device.kind for device in (source, *places)}
    if transport == "host" or (transport == "auto" and (kinds != {DeviceKind.CUDA} or not places)):
        return None
    if len(kinds) > 1:
        raise ValueError(f'transport {transport!r} does not reach from GPUs to virtual ones: use "host"')
    cuda = kinds == {DeviceKind.CUDA}
    if transport == "ipc":
        if not cuda:
            raise ValueError('transport "ipc" is for CUDA; on virtual GPUs use "host" (shared memory) or "broadcast"')
        if away := sorted({device.id for device in places if device != source}):
            raise ValueError(f'transport "ipc" stays on device {source.id}, but receivers are on {away}: use "auto"')

    def way(device: Device) -> DeviceTransport:
        return "ipc" if transport == "ipc" or (transport == "auto" and device == source) else "broadcast"

    chosen = tuple(tuple(way(device) for device in replica) for replica in receivers)
    members = [source, *(device for device in places if way(device) == "broadcast")]
    if cuda and len(set(members)) < len(members):
        if transport == "auto":
            return None
        raise ValueError(
            f'transport "broadcast" needs a GPU of its own for training rank 0 and for each receiver, which are on '
            f'devices {[device.id for device in members]}: use "auto"'
        )
    return chosen


def transfer(
    offered: PublishedWeights,
    source: Device,
    engine: WeightReceiver,
    transports: tuple[tuple[DeviceTransport, ...], ...],
    timeout_s: float,
    send: Callable[[Rendezvous], object],
) -> None:
    """Have `send` and the engine's update meet, and wait for both to end.

    Raises:
        Whatever the side that failed first raised; members that were still waiting are told why.
    """
    host = placement.common_address([source, *(device for replica in engine.receivers for device in replica)])
    store = open_store(host, 0, timeout_s, server=True)
    meeting = Rendezvous(engine.name, host, store.port, transports, timeout_s)
    failed: list[BaseException] = []

    def side(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised below, once the other side knows; Ctrl-C too
            failed.append(error)
            store.set(FAILED, str(error))

    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        sending = pool.submit(side, lambda: send(meeting))
        side(lambda: engine.update_weights(replace(offered, rendezvous=meeting)))
        sending.result()
    if failed:
        raise failed[0]
