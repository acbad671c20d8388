"""GB/s of a weight sync, through host memory and between two processes on one GPU.

Through host memory (pack into host buckets, apply to a replica), all in one process, against a plain copy and a
per-parameter loop: the buckets are copied once as Ray's object store would copy them, and read from there. CUDA IPC, to
a replica in a process of its own, against the way through host memory; `--device cpu` broadcasts in its place, to try
the code. NCCL needs two GPUs and is not measured here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmarks.gpu.common import Row, seconds
from rlix.engine.weights import publication
from rlix.engine.weights.buckets import layout, pack_stream
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.sync import DEVICE_BUCKET_BYTES
from rlix.engine.weights.transfer import Rendezvous, Sender, open_store

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
        direct = nbytes / seconds(lambda: _send(trainer, connection, device), device, repeat=3) / 1e9
    way = "CUDA IPC" if device.type == "cuda" else "gloo"
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


def _send(trainer: nn.ParameterList, connection: Connection, device: torch.device) -> None:
    """One whole transfer, as training rank 0 makes it."""
    store = open_store("127.0.0.1", 0, WAIT_S, server=True)
    transport = "ipc" if device.type == "cuda" else "broadcast"
    meeting = Rendezvous("replica", "127.0.0.1", store.port, ((transport,),), WAIT_S)
    named = publication.named_weights(trainer)
    connection.send(PublishedWeights(0, layout(named.items(), DEVICE_BUCKET_BYTES), rendezvous=meeting))
    with Sender(meeting, device) as sender:
        for bucket in pack_stream(named.items(), DEVICE_BUCKET_BYTES, device):
            sender.send(bucket.data)
        sender.finish()
    assert connection.poll(WAIT_S)
    assert connection.recv() == [1.0, 1.0]


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
        publication.apply(replica, connection.recv())
        connection.send([float(replica[0][0]), float(replica[-1][-1])])
