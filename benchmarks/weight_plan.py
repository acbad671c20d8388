"""Weights from 4 training ranks to 2 replicas of 2 workers each: bytes and seconds, shard to shard and by a funnel.

    python -m benchmarks.weight_plan [--json]

All eight are processes of this machine. The trainer has FSDP shards in float32; each worker needs half of each tensor
in bfloat16, as tensor parallelism cuts it. Three ways, in turns, best of several runs each:

- direct: `rlix.engine.weights.sync.Channel` over memory that the processes share
- p2p: the same in messages over sockets, as between nodes
- funnel: rank 0 gathers every tensor whole, in float32, over gloo and broadcasts all to each worker, which keeps its
  part; as this project did before, and without opening its process group each time, which it did then

Bytes are those that reach workers, against the least possible: each element that a worker needs once, in its dtype.
"""

import argparse
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rlix.engine import placement
from rlix.engine.weights import channel, streams, sync
from rlix.engine.weights.buckets import ALIGNMENT, WeightEntry
from rlix.engine.weights.channel import Delivery, Ticket
from rlix.engine.weights.layout import Cut, Layout, Part, shard, whole
from rlix.engine.weights.plan import least_bytes
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.sync import Channel, Trainer
from rlix.protocol.messages import Device, DeviceKind, Process

RANKS, REPLICAS, WORKERS = 4, 2, 2
MODELS = {"few large tensors": (8, (2500, 2500)), "many small tensors": (2000, (64, 32))}  # count, shape
FUNNEL_BUCKET_BYTES = 128 * 2**20
WAIT_S = 120.0
CPU = torch.device("cpu")


def cut(shape: tuple[int, int], ranks: int, rank: int, name: str, dtype: str) -> Part:
    return Part(dtype, shape, shard(shape, (ranks,), [Cut(0)], (rank,), name))


class Member:
    """A process with its part of the model. `place` is its number in the funnel's group: workers come last."""

    def __init__(self, place: int, count: int, shape: tuple[int, int], folder: str) -> None:
        torch.set_num_threads(1)
        self.trains = place < RANKS
        self.part, self.parts = (place, RANKS) if self.trains else ((place - RANKS) % WORKERS, WORKERS)
        self.shape, self.names = shape, [f"t{i}" for i in range(count)]
        dtype = "float32" if self.trains else "bfloat16"
        self.layout = Layout({name: cut(shape, self.parts, self.part, name, dtype) for name in self.names})
        rows = shape[0] // self.parts
        values = torch.arange(self.part * rows, (self.part + 1) * rows, dtype=torch.float32)[:, None] % 128
        self.tensors = {
            name: (values.expand(rows, shape[1]) if self.trains else torch.zeros(rows, shape[1])).to(
                getattr(torch, dtype), copy=True, memory_format=torch.contiguous_format
            )
            for name in self.names
        }
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/all", RANKS + REPLICAS * WORKERS),  # type: ignore[attr-defined]
            rank=place,
            world_size=RANKS + REPLICAS * WORKERS,
            timeout=timedelta(seconds=WAIT_S),
        )
        self.trainers = dist.new_group(list(range(RANKS)))
        self.funnel_members = dist.new_group([0, *range(RANKS, RANKS + REPLICAS * WORKERS)])

    def join(self, ticket: Ticket) -> None:
        channel.join(ticket, CPU)

    def send(self, delivery: Delivery) -> None:
        weights = [(name, partial(self._held, name)) for name in self.names]
        streams.send(delivery.sent_by(self.part), weights)

    def _held(self, name: str) -> streams.Held:
        return [(piece, self.tensors[name]) for piece in self.layout.parts[name].pieces]

    def receive(self, published: PublishedWeights) -> None:
        assert published.delivery is not None
        for bucket in streams.receive(published.delivery):
            bucket.copy_to(self.tensors, lambda tensor, entry: tensor[self._rows(entry)])

    def _rows(self, entry: WeightEntry) -> slice:
        (start, stop), _ = entry.box or whole(entry.shape)
        first = self.part * (self.shape[0] // self.parts)
        return slice(start - first, stop - first)

    def funnel(self) -> None:
        """Gather in buckets to rank 0, broadcast them to the workers, keep what is mine."""
        per_bucket = max(1, FUNNEL_BUCKET_BYTES // (4 * math.prod(self.shape)))
        for first in range(0, len(self.names), per_bucket):
            names = self.names[first : first + per_bucket]
            whole: list[torch.Tensor] = []
            if self.trains:
                flat = torch.cat([self.tensors[name].reshape(-1) for name in names])
                pieces = [torch.empty_like(flat) for _ in range(RANKS)] if self.part == 0 else None
                dist.gather(flat, pieces, group=self.trainers, group_dst=0)
                if pieces is None:
                    continue
                size = flat.numel() // len(names)
                whole = [torch.cat([p[i * size : (i + 1) * size] for p in pieces]) for i in range(len(names))]
            bucket = torch.cat(whole) if whole else torch.empty(len(names) * math.prod(self.shape))
            dist.broadcast(bucket, 0, group=self.funnel_members)
            if not self.trains:
                rows = self.shape[0] // WORKERS
                tensors = bucket.view(len(names), *self.shape)
                places = [self.tensors[name] for name in names]
                torch._foreach_copy_(places, [t[self.part * rows : (self.part + 1) * rows] for t in tensors])

    def check(self) -> None:
        """Every value is right; then none is, for the next run."""
        rows = self.shape[0] // self.parts
        expected = (torch.arange(self.part * rows, (self.part + 1) * rows, dtype=torch.float32) % 128)[:, None]
        for tensor in self.tensors.values() if not self.trains else ():
            assert torch.equal(tensor.float(), expected.expand_as(tensor))
            tensor.zero_()


def serve(connection: Connection, *args: Any) -> None:
    member = Member(*args)
    connection.send(member.layout)
    while True:
        method, given = connection.recv()
        getattr(member, method)(*given)
        connection.send(None)


def ask(connections: Sequence[Connection], method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
    for connection, one in zip(connections, given, strict=True):
        connection.send((method, one))
    for connection in connections:
        if not connection.poll(WAIT_S):
            raise TimeoutError(f"a process did not end {method}() within {WAIT_S:g} s")
    return [connection.recv() for connection in connections]


class TrainSide:
    """What `Trainer` calls, passed on to the processes."""

    def __init__(self, connections: Sequence[Connection], layouts: Sequence[Layout]) -> None:
        self.connections, self.layouts = connections, layouts

    def __call__(self, method: str, *args: Any) -> list[Any]:
        if method == "weight_layout":
            return [(layout, {}) for layout in self.layouts]
        if method == "join_channel":
            return ask(self.connections, "join", [(ticket,) for ticket in args[0].values])
        return ask(self.connections, "send", [(args[0],)] * len(self.connections))


class Replicas:
    name = "infer"
    processes: dict[int, Process] = {}  # noqa: RUF012

    def __init__(self, connections: Sequence[Connection], layouts: Sequence[Layout]) -> None:
        self.connections = connections
        self.layouts = [layouts[i : i + WORKERS] for i in range(0, len(layouts), WORKERS)]
        self.receivers = tuple(tuple(device(9) for _ in row) for row in self.layouts)

    def weight_layouts(self, offered: PublishedWeights) -> Sequence[Sequence[Layout]]:
        return self.layouts

    def join_channel(self, tickets: Sequence[Sequence[Ticket]]) -> None:
        ask(self.connections, "join", [(ticket,) for row in tickets for ticket in row])

    def leave_channel(self, channel_name: str) -> None: ...

    def update_weights(self, published: PublishedWeights) -> None:
        mine = [
            (published.received_by(replica=replica).received_by(worker=worker),)
            for replica in range(REPLICAS)
            for worker in range(WORKERS)
        ]
        ask(self.connections, "receive", mine)


def device(number: int) -> Device:
    return Device(number, "node", "127.0.0.1", number, DeviceKind.CPU)


def measure(name: str, count: int, shape: tuple[int, int], repeat: int) -> dict[str, Any]:
    context, members = get_context("fork"), RANKS + REPLICAS * WORKERS  # nothing has threads yet that a fork would lose
    with tempfile.TemporaryDirectory() as folder:
        connections, processes = [], []
        for place in range(members):
            here, there = context.Pipe()
            arguments = (there, place, count, shape, folder)
            processes.append(context.Process(target=serve, args=arguments, daemon=True))
            processes[-1].start()
            connections.append(here)
        try:
            layouts = [connection.recv() for connection in connections]
            run = TrainSide(connections[:RANKS], layouts[:RANKS])
            replicas = Replicas(connections[RANKS:], layouts[RANKS:])
            ways: dict[str, Callable[[], Any]] = {}
            sent: dict[str, int] = {}
            opening: dict[str, float] = {}
            for transport, way in (("direct", "shm"), ("p2p", "p2p")):
                trainer = Trainer(f"train {transport}", [device(rank) for rank in range(RANKS)], run)
                start = time.perf_counter()
                made = Channel(trainer, replicas, lambda *_, w=way: w, WAIT_S, sync.CHANNEL_BUCKET_BYTES)
                opening[transport] = time.perf_counter() - start
                ways[transport] = partial(transferred, made, sent, transport)
            ways["funnel"] = lambda: ask(connections, "funnel", [()] * members)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(repeat):
                for way, action in ways.items():
                    start = time.perf_counter()
                    action()
                    seconds[way].append(time.perf_counter() - start)
                    ask(connections, "check", [()] * members)
        finally:
            for process in processes:
                process.kill()
                process.join(WAIT_S)
    least = least_bytes(layouts[:RANKS], layouts[RANKS:])
    whole = count * math.prod(shape) * 4
    best = {way: min(values) for way, values in seconds.items()}
    return {
        "model": name,
        "bytes_of_the_model": whole,
        "least_bytes": least,
        "bytes": {**sent, "funnel": whole * REPLICAS * WORKERS},
        "opening_s": opening,
        "seconds": best,
        "times_faster_than_funnel": {way: best["funnel"] / best[way] for way in ("direct", "p2p")},
    }


def transferred(made: Channel, sent: dict[str, int], transport: str) -> None:
    sent[transport] = made.transfer(1, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=sync.CHANNEL_BUCKET_BYTES // 2**20)
    options = parser.parse_args()
    sync.CHANNEL_BUCKET_BYTES = options.bucket_mb * 2**20 // ALIGNMENT * ALIGNMENT
    placement.common_address = lambda devices: "127.0.0.1"
    torch.set_num_threads(1)
    results = [measure(name, count, shape, options.repeat) for name, (count, shape) in MODELS.items()]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if options.json:
        print(json.dumps({"machine": machine, "results": results}, indent=2))
        return
    print(machine)
    print(f"{'model':<20}{'way':>8}{'MB':>8}{'/ least':>9}{'seconds':>9}{'faster':>9}{'opening':>9}")
    for r in results:
        for way, seconds in r["seconds"].items():
            faster = r["seconds"]["funnel"] / seconds
            opening = f"{r['opening_s'][way]:.2f} s" if way in r["opening_s"] else ""
            ratio = r["bytes"][way] / r["least_bytes"]
            print(
                f"{r['model']:<20}{way:>8}{r['bytes'][way] / 1e6:>8.0f}{ratio:>9.2f}{seconds:>9.3f}{faster:>7.1f} x"
                f"{opening:>9}"
            )


if __name__ == "__main__":
    main()
