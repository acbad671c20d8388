"""Channels whose members are threads of this process; on a GPU also processes of their own."""

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from rlix.engine import placement
from rlix.engine.weights import channel, links, streams
from rlix.engine.weights.buckets import views
from rlix.engine.weights.channel import Delivery, Ticket, TransferError
from rlix.engine.weights.layout import Cut, Layout, Part, shard
from rlix.engine.weights.plan import least_bytes
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.rendezvous import Entrance, Rendezvous
from rlix.engine.weights.schedule import Way
from rlix.engine.weights.sync import Channel, Trainer
from rlix.protocol.errors import WaitTimeoutError, WeightSyncError
from rlix.protocol.messages import Device, DeviceKind, Process

CPU = torch.device("cpu")
WAIT_S = 30.0
TENSORS = {
    "rows": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "columns": torch.arange(4 * 6, dtype=torch.float32).view(4, 6) + 100,
    "large": torch.arange(30 * 20, dtype=torch.float32).view(30, 20) + 1000,
    "scale": torch.tensor(0.5),
    "count": torch.arange(5),
}
COLUMNS = ("columns",)


def device(number: int, node: str = "node") -> Device:
    return Device(number, node, "203.0.113.9", number, DeviceKind.CPU)


def layouts(mesh: Sequence[int], cuts: Callable[[str], Sequence[Cut | None]], dtype: str | None = None) -> list[Layout]:
    made = []
    for place in itertools.product(*map(range, mesh)):
        parts = {}
        for name, tensor in TENSORS.items():
            mine = dtype if dtype and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
            parts[name] = Part(mine, tuple(tensor.shape), shard(tensor.shape, mesh, cuts(name), place, name))
        made.append(Layout(parts))
    return made


def fsdp(ranks: int) -> list[Layout]:
    return layouts((ranks,), lambda name: [Cut(0) if TENSORS[name].dim() else None])


def tensor_parallel(ranks: int, dtype: str | None = None) -> list[Layout]:
    return layouts((ranks,), lambda name: [Cut(name in COLUMNS) if TENSORS[name].dim() else None], dtype)


def each(actions: Sequence[Callable[[], Any]], *, patient: bool = True) -> list[Any]:
    """All at once; the first error is raised, as soon as it is there or else when all have ended."""
    pool = ThreadPoolExecutor(len(actions))
    futures = [pool.submit(action) for action in actions]
    pool.shutdown(wait=False)
    wait(futures, WAIT_S, FIRST_EXCEPTION)
    failed = next((future.exception() for future in futures if future.done() and future.exception()), None)
    if failed is not None:
        wait(futures, WAIT_S if patient else 0)
        raise failed
    return [future.result(0) for future in futures]


class Ranks:
    """A trainer's ranks as threads, each with the shards that its layout says."""

    def __init__(self, held: Sequence[Layout], nodes: Sequence[str] = ("node",)) -> None:
        self.held = held
        self.devices = tuple(device(rank, nodes[rank % len(nodes)]) for rank in range(len(held)))
        self.fail_at: str | None = None

    def __call__(self, method: str, *args: Any) -> list[Any]:
        return each([partial(getattr(self, method), rank, *args) for rank in range(len(self.held))])

    def weight_layout(self, rank: int, as_trained: bool) -> tuple[Layout, dict[str, tuple[str, ...]]]:
        return self.held[rank], {}

    def join_channel(self, rank: int, tickets: Any) -> None:
        channel.join(tickets.values[rank], CPU)

    def leave_channel(self, rank: int, name: str) -> None:
        channel.leave(name)

    def send_weights(self, rank: int, delivery: Delivery, epoch: int | None) -> None:
        streams.send(delivery.sent_by(rank), [(name, partial(self.pieces, rank, name)) for name in TENSORS])

    def pieces(self, rank: int, name: str) -> streams.Held:
        if name == self.fail_at:
            raise KeyError("out of memory")
        found = []
        for piece in self.held[rank].parts[name].pieces:
            part = TENSORS[name][tuple(slice(*side) for side in piece.box)].contiguous()
            found.append((type(piece)(piece.box, name, (0,) * part.dim()), part))
        return found


class Replicas:
    """An inference engine whose workers are threads, each with an empty tensor for each that it needs a part of."""

    name = "infer"
    processes: dict[int, Process] = {}  # noqa: RUF012

    def __init__(self, needed: Sequence[Sequence[Layout]], nodes: Sequence[str] = ("node",)) -> None:
        self.needed = needed
        count = itertools.count(100)
        self.receivers = tuple(tuple(device(next(count), nodes[0]) for _ in row) for row in needed)
        self.places = [(r, w) for r, row in enumerate(needed) for w in range(len(row))]
        self.values: dict[tuple[int, int], dict[str, torch.Tensor]] = {
            (r, w): {
                name: torch.full(part.shape, -1, dtype=getattr(torch, part.dtype))
                for name, part in needed[r][w].parts.items()
            }
            for r, w in self.places
        }
        self.absent: set[tuple[int, int]] = set()
        self.refuse: tuple[int, int] | None = None
        self.leave_after: int | None = None

    def weight_layouts(self, offered: PublishedWeights) -> Sequence[Sequence[Layout]]:
        return self.needed

    def join_channel(self, tickets: Sequence[Sequence[Ticket]]) -> None:
        each([partial(channel.join, tickets[r][w], CPU) for r, w in self.places if (r, w) not in self.absent])

    def leave_channel(self, name: str) -> None:
        channel.leave(name)

    def update_weights(self, published: PublishedWeights) -> None:
        each([partial(self._update, published, *place) for place in self.places], patient=self.refuse is None)

    def _update(self, published: PublishedWeights, replica: int, worker: int) -> None:
        if (replica, worker) == self.refuse:
            raise WeightSyncError("replica 1 refused")
        mine = published.received_by(replica=replica).received_by(worker=worker)
        assert mine.delivery is not None
        with closing(streams.receive(mine.delivery)) as buckets:
            for number, bucket in enumerate(buckets):
                if number == self.leave_after and (replica, worker) == (0, 0):
                    raise KeyError("out of memory")
                for entry, view in views(bucket.flat, bucket.entries):
                    place = self.values[replica, worker][entry.name]
                    place[tuple(slice(*side) for side in entry.box or ())] = view

    def check(self, version: float = 0.0, names: Sequence[str] = tuple(TENSORS)) -> None:
        """Every worker has what it needs, equal to the bit, and nothing else was written."""
        for replica, worker in self.places:
            for name, part in self.needed[replica][worker].parts.items():
                expected = torch.full(part.shape, -1, dtype=getattr(torch, part.dtype))
                for piece in part.pieces if name in names else ():
                    box = tuple(slice(*side) for side in piece.box)
                    expected[box] = TENSORS[name][box].to(expected.dtype)
                assert torch.equal(self.values[replica, worker][name], expected), (replica, worker, name)


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And without torch's store, which asks the name server who has connected and waits 5 s for a lost answer."""
    monkeypatch.setattr(placement, "common_address", lambda _: "127.0.0.1")
    monkeypatch.delattr("torch.distributed.TCPStore")
    yield
    for name in {key[0] for key in channel._members}:
        channel.leave(name)


def opened(
    ranks: Ranks, replicas: Replicas, way: Way = "shm", timeout_s: float = WAIT_S, bucket_bytes: int = 256
) -> Channel:
    return Channel(Trainer("train", ranks.devices, ranks), replicas, lambda *_: way, timeout_s, bucket_bytes)


@pytest.fixture
def bytes_for_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of GPU memory, host memory: everything around it is as on a GPU."""
    monkeypatch.setattr(channel, "GpuMemory", lambda size, _: channel.HostMemory(size))
    monkeypatch.setattr(channel, "opened_gpu", lambda handle, _: channel.opened_host(handle))


@pytest.mark.usefixtures("bytes_for_handles")
@pytest.mark.parametrize("way", ["shm", "p2p", "ipc"])
def test_every_worker_gets_its_part_of_every_tensor(way: Any) -> None:
    ranks, replicas = Ranks(fsdp(4)), Replicas([tensor_parallel(2, "bfloat16")] * 2)
    made = opened(ranks, replicas, way)
    needed = [layout for row in replicas.needed for layout in row]
    assert made.transfer(1, None, None) == least_bytes(ranks.held, needed)
    replicas.check()
    TENSORS["rows"].mul_(2)  # the channel stays open, and the next version goes through the same buckets
    made.transfer(2, None, None)
    TENSORS["rows"].div_(2)
    assert replicas.values[0, 0]["rows"][1, 1] == 2 * TENSORS["rows"][1, 1]


def test_one_way_to_some_and_another_to_others() -> None:
    ranks, replicas = Ranks(fsdp(2)), Replicas([tensor_parallel(1), tensor_parallel(1)])
    ways: dict[int, Way] = {0: "shm", 1: "p2p"}
    trainer = Trainer("train", ranks.devices, ranks)
    made = Channel(trainer, replicas, lambda _, target: ways[target], WAIT_S, 256)
    made.transfer(1, None, None)
    replicas.check()
    assert made.ways == ("p2p", "shm")


def test_only_what_changed_moves_and_only_onto_what_it_changed() -> None:
    ranks, replicas = Ranks(fsdp(3)), Replicas([tensor_parallel(2)])
    made = opened(ranks, replicas)
    with pytest.raises(WeightSyncError, match="sync all names first"):
        made.transfer(1, {"rows"}, None)
    made.transfer(1, None, None)
    for tensor in replicas.values[0, 0], replicas.values[0, 1]:
        for part in tensor.values():
            part.fill_(-1)
    moved = made.transfer(2, {"large", "count"}, None)
    replicas.check(names=("large", "count"))
    assert moved == 30 * 20 * 4 + 5 * 8  # each worker has half of both
    with pytest.raises(WeightSyncError, match="no weights of these names: other"):
        made.transfer(3, {"large", "other"}, None)


def test_nobody_begins_before_all_are_there_and_everyone_learns_who_failed() -> None:
    ranks, replicas = Ranks(fsdp(2)), Replicas([tensor_parallel(1)] * 2)
    made = opened(ranks, replicas)
    replicas.refuse = (1, 0)
    with pytest.raises(WeightSyncError, match="replica 1 refused"):
        made.transfer(1, None, None)
    replicas.check(names=())


def test_a_member_that_does_not_come_is_named_in_time() -> None:
    replicas = Replicas([tensor_parallel(1), tensor_parallel(2)])
    replicas.absent = {(0, 0), (1, 1)}
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"waited 5 s for infer, replica 0; infer, replica 1, worker 1 to say"):
        opened(Ranks(fsdp(2)), replicas, timeout_s=5.0)
    assert time.monotonic() - start < WAIT_S


def test_a_rendezvous_answers_members_alone_and_they_notice_when_its_process_has_gone() -> None:
    place = Rendezvous("A to B#1", "127.0.0.1", ["A", "B"])
    address = "127.0.0.1", place.port
    for said in (b"GET / HTTP/1.1\r\n", b"7\n", b'["A to C#1", "refuse", 1, "no"]\n'):
        with socket.create_connection(address, WAIT_S) as stranger:
            stranger.sendall(said)
            assert stranger.recv(1) == b""
    first, second = (Entrance("A to B#1", member, address, WAIT_S) for member in (0, 1))
    met = each([lambda: first.meet("come", 1, {"a": "x"}, WAIT_S), lambda: second.meet("come", 1, {"b": "y"}, WAIT_S)])
    assert met == [{"said": {"a": "x", "b": "y"}}] * 2
    assert second.meet("come", 2, {}, 0.0) == {"late": ["A"]}
    first.refuse(3, "no room")
    place.refuse(3, "later")
    assert second.meet("come", 3, {}, WAIT_S) == {"refused": "no room"}
    assert second.meet("ready", 4, {}, 0.0) == {"late": ["A"]}
    assert first.meet("ready", 4, {}, WAIT_S) == {"refused": "others had given up waiting by then"}
    second.refuse(4, "A was late")
    assert first.meet("ready", 4, {}, WAIT_S) == {"refused": "A was late"}
    second.close()
    place.close()
    with pytest.raises(OSError):
        Entrance("A to B#1", 1, address, WAIT_S)


def test_strangers_who_say_nothing_keep_nobody_from_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_HELLO_S", 0.1)
    listener = links.Listener("A to B#1", ("127.0.0.1", 1))
    host, _, port = listener.address.rpartition(":")
    socket.create_connection((host, int(port)), WAIT_S).close()
    with socket.create_connection((host, int(port)), WAIT_S):
        target = links.connect("A to B#1", 1, {0: listener.address}, time.monotonic() + WAIT_S)
        source = listener.accept([1], time.monotonic() + WAIT_S)
    target.say(0, 7, WAIT_S)
    source.hear(1, 7, WAIT_S)
    source.close()
    target.close()


@pytest.mark.parametrize("way", ["shm", "p2p"])
def test_a_receiver_that_leaves_in_the_middle_is_an_error_for_all(way: Any) -> None:
    replicas = Replicas([tensor_parallel(1)] * 2)
    made = opened(Ranks(fsdp(2)), replicas, way)
    replicas.leave_after = 1
    with pytest.raises((TransferError, KeyError)):
        made.transfer(1, None, None)
    assert not [key for key in channel._members if key[0] == made.name]  # everyone has left


def test_a_sender_that_fails_in_the_middle_is_an_error_for_all() -> None:
    ranks, replicas = Ranks(fsdp(2)), Replicas([tensor_parallel(1)] * 2)
    made = opened(ranks, replicas)
    ranks.fail_at = "large"
    with pytest.raises((TransferError, KeyError)):
        made.transfer(1, None, None)
    assert not [key for key in channel._members if key[0] == made.name]
    with pytest.raises(WeightSyncError, match="not open here"):
        streams.send(Delivery(made.name, 2, None, (2, 3)).sent_by(0), [])
