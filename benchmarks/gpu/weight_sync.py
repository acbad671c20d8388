"""GB/s of a weight sync, through host memory and between two processes on one GPU.

Through host memory (pack into host buckets, apply to a replica), all in one process, against a plain copy and a
per-parameter loop: the buckets are copied once as Ray's object store would copy them, and read from there. CUDA IPC, to
a replica in a process of its own, against the way through host memory; `--device cpu` takes shared memory in its
place, to try the code. NCCL needs two GPUs and is not measured here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.common import Row, seconds
from rlix.engine import placement
from rlix.engine.weights import channel, publication, streams
from rlix.engine.weights.channel import Ticket
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.shards import everything, pieces_of, whole_layout
from rlix.engine.weights.sync import CHANNEL_BUCKET_BYTES, Channel, Trainer, choose
from rlix.protocol.messages import Device, DeviceKind, Process

WAIT_S = 60.0


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    shapes = {
        "large tensors": (32, 2**24) if cuda else (4, 2**16),
        "small tensors": (20_000, 4096) if cuda else (500, 512),
    }
    return [row for name, (count, size) in shapes.items() for row in _compare(name, count, size, device)]


def _compare(name: str, count: int, size: int, device: torch.device) -> list[Row]:
    trainer = _model(count, size, 1.0, device)
    replica = _model(count, size, 0.0, device)
    nbytes = 4 * count * size

    def sync() -> None:
        named = publication.named_weights(trainer)
        published = publication.publish(named.items(), 0, put=lambda bucket: bucket.copy())
        publication.apply(replica, published)

    @torch.no_grad()
    def loop() -> None:
        """Each parameter to the host, into shared memory, and to the replica."""
        for source, target in zip(trainer, replica, strict=True):
            target.copy_(torch.from_numpy(source.detach().cpu().numpy().copy()))

    copy = _copy_seconds(count * size, device)
    ours = nbytes / seconds(sync, device, repeat=3) / 1e9
    assert all(bool((tensor == 1.0).all()) for tensor in (replica[0], replica[-1]))
    each = nbytes / seconds(loop, device, repeat=3) / 1e9
    with _other_process(count, size, device) as connection:
        made = _channel(trainer, connection, device)
        direct = nbytes / seconds(lambda: made.transfer(1, None, None), device, repeat=3) / 1e9
    way = "CUDA IPC" if device.type == "cuda" else "shared memory"
    return [
        Row(f"{count:,} {name}, {way}", direct, "GB/s", "through host memory", ours, "> 1"),
        Row(f"{count:,} {name}", ours, "GB/s", "plain copy", nbytes / copy / 1e9),
        Row(f"{count:,} {name}", ours, "GB/s", "loop", each, ">= 10" if "small" in name else ""),
    ]


def _copy_seconds(size: int, device: torch.device) -> float:
    """As many bytes in one tensor, through the host."""
    source, target = torch.ones(size, device=device), torch.zeros(size, device=device)
    return seconds(lambda: target.copy_(source.cpu()), device, repeat=3)


def _model(count: int, size: int, value: float, device: torch.device) -> nn.ParameterList:
    return nn.ParameterList(torch.full((size,), value, device=device) for _ in range(count))


class _Sender:
    """What `Trainer` calls: this process is the only rank."""

    def __init__(self, model: nn.ParameterList, device: torch.device) -> None:
        self._named = {name: tensor.detach() for name, tensor in publication.named_weights(model).items()}
        self._device = device

    def __call__(self, method: str, *args: Any) -> list[Any]:
        if method == "weight_layout":
            return [(whole_layout(self._named), {})]
        if method == "join_channel":
            channel.join(args[0].values[0], self._device)
        else:
            streams.send(args[0].sent_by(0), [(name, partial(self._held, name)) for name in self._named])
        return [None]

    def _held(self, name: str) -> streams.Held:
        return [(piece, self._named[name]) for piece in pieces_of(self._named[name], name)]


class _Replica:
    """The other process, as an inference engine."""

    name = "replica"
    processes: dict[int, Process] = {}  # noqa: RUF012

    def __init__(self, connection: Connection, place: Device) -> None:
        self._connection, self.receivers = connection, ((place,),)

    def weight_layouts(self, offered: PublishedWeights) -> list[list[Layout]]:
        return [[everything(offered.manifest)]]

    def join_channel(self, tickets: Sequence[Sequence[Ticket]]) -> None:
        self._ask(tickets[0][0])

    def leave_channel(self, channel_name: str) -> None: ...

    def update_weights(self, published: PublishedWeights) -> None:
        assert self._ask(published.received_by(replica=0)) == [1.0, 1.0]

    def _ask(self, what: Any) -> Any:
        self._connection.send(what)
        if not self._connection.poll(WAIT_S):
            raise TimeoutError(f"the other process did not answer within {WAIT_S:g} s")
        return self._connection.recv()


def _channel(trainer: nn.ParameterList, connection: Connection, device: torch.device) -> Channel:
    kind = DeviceKind.CUDA if device.type == "cuda" else DeviceKind.CPU
    place = Device(0, "node", "127.0.0.1", 0, kind)
    way = choose("direct", [place], [(place,)])
    assert way is not None
    placement.common_address = lambda devices: "127.0.0.1"
    sender = Trainer("trainer", [place], _Sender(trainer, device))
    return Channel(sender, _Replica(connection, place), way, WAIT_S, CHANNEL_BUCKET_BYTES)


@contextmanager
def _other_process(count: int, size: int, device: torch.device) -> Iterator[Connection]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, count, size, device), daemon=True)
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join(WAIT_S)


def _receive(connection: Connection, count: int, size: int, device: torch.device) -> None:
    replica = _model(count, size, 0.0, device).requires_grad_(False)
    while True:
        given = connection.recv()
        if isinstance(given, Ticket):
            channel.join(given, device)
            connection.send(None)
            continue
        publication.apply(replica, given)
        connection.send([float(replica[0][0]), float(replica[-1][-1])])
