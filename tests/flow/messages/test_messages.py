"""Messages between the ranks of two groups, on real Ray."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlix.flow.messages.mailbox import Home
from rlix.flow.messages.routes import Place
from rlix.flow.workers.group import WorkerGroup
from rlix.flow.workers.worker import Worker
from rlix.protocol.errors import WorkerError
from rlix.protocol.messages import DeviceKind
from tests.flow.test_worker_group import devices

pytestmark = pytest.mark.ray

TIMEOUT_S = 60.0
ELEMENTS = 100_000


class Talker(Worker):
    def elsewhere(self) -> None:
        """As if on a node of its own: nobody writes into its shared memory."""
        self._rlix_mail().home = Home(Place("elsewhere", DeviceKind.CPU), "/nowhere")

    def exchange(self, other: str, count: int) -> list[Any]:
        """Everybody sends first, then reads."""
        for i in range(count):
            self.send({"from": self.ctx.rank, "nested": [(i, torch.full((ELEMENTS,), i))]}, other)
        self.send("beside", other, tag="other")
        beside = self.recv(other, tag="other")
        came = [self.recv(other) for _ in range(count)]
        came[0]["nested"][0][1].add_(1)  # it is this worker's own
        return [beside, *((m["from"], m["nested"][0][0], int(m["nested"][0][1].sum()) // ELEMENTS) for m in came)]

    def tell(self, to: list[str]) -> int:
        self.broadcast(torch.arange(ELEMENTS), to)
        return os.getpid()

    def hear(self, sender: str, timeout_s: float = TIMEOUT_S) -> int:
        return int(self.recv(sender, timeout_s=timeout_s).sum())

    def give(self, to: list[str], rows: list[int]) -> None:
        self.send_batch({"row": torch.tensor(rows, dtype=torch.int64), "text": [str(n) for n in rows]}, to)

    def get(self, senders: list[str]) -> list[Any]:
        batch = self.recv_batch(senders)
        return [batch["row"].tolist(), batch["text"]]

    def left(self) -> list[str]:
        return [path.name for path in Path(self._rlix_mail().home.folder).iterdir() if path.name != ".owner"]


@pytest.fixture(scope="module")
def groups(ray_session: Any) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    with (
        WorkerGroup(Talker, name="makers", placements=devices(3), max_concurrency=1, namespace="job") as makers,
        WorkerGroup(Talker, name="readers", placements=devices(2), namespace="job") as readers,
    ):
        readers.run("elsewhere", ranks=[1], timeout_s=TIMEOUT_S)
        homes = [ray.get(handle._rlix_home.remote()).folder for handle in (*makers.handles, *readers.handles)]
        yield makers, readers
    assert not any(Path(home).exists() for home in homes), "nothing of it stays in shared memory"


def test_messages_between_groups(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    makers, readers = groups
    both = [*makers.call("exchange", "readers:0", 3, ranks=[0]), *readers.call("exchange", "makers:0", 3, ranks=[0])]
    for sent in makers.results("exchange", both, timeout_s=TIMEOUT_S, ranks=[0, 1]):
        assert sent == ["beside", (0, 0, 1), (0, 1, 1), (0, 2, 2)]
    assert readers.run("left", ranks=[0], timeout_s=TIMEOUT_S) == [[]]

    told = [*readers.addresses, "makers:2"]
    makers.run("tell", told, ranks=[0], timeout_s=TIMEOUT_S)
    heard = readers.run("hear", "makers:0", timeout_s=TIMEOUT_S)
    heard += makers.run("hear", "makers:0", ranks=[2], timeout_s=TIMEOUT_S)
    assert heard == [sum(range(ELEMENTS))] * 3

    for rank, rows in enumerate([[0, 1, 2, 3], [], [4, 5, 6]]):  # three ranks with uneven shares to two
        given = makers.call("give", readers.addresses, rows, ranks=[rank])
    got = readers.run("get", makers.addresses, timeout_s=TIMEOUT_S)
    makers.results("give", given, timeout_s=TIMEOUT_S, ranks=[2])
    assert got == [[[0, 1, 2, 3], ["0", "1", "2", "3"]], [[4, 5, 6], ["4", "5", "6"]]]


def test_nobody_waits_for_who_is_gone(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    makers, readers = groups
    with pytest.raises(WorkerError, match=r"readers:0 waited 0\.1 s for a message of makers:1"):
        readers.run("hear", "makers:1", 0.1, ranks=[0], timeout_s=TIMEOUT_S)
    makers.run("tell", ["readers:0"], ranks=[1], timeout_s=TIMEOUT_S)
    makers.kill(1)
    assert readers.run("hear", "makers:1", ranks=[0], timeout_s=TIMEOUT_S) == [sum(range(ELEMENTS))]  # sent before
    with pytest.raises(WorkerError, match="makers:1, at the other end of a message, has died"):
        readers.run("hear", "makers:1", ranks=[0], timeout_s=TIMEOUT_S)
    with pytest.raises(WorkerError, match="readers:1, at the other end of a message, has died"):
        readers.kill(1)
        makers.run("tell", ["readers:1"], ranks=[0], timeout_s=TIMEOUT_S)
    readers.restart(0)  # whom makers:0 has written to before
    makers.run("tell", ["readers:0"], ranks=[0], timeout_s=TIMEOUT_S)
    assert readers.run("hear", "makers:0", ranks=[0], timeout_s=TIMEOUT_S) == [sum(range(ELEMENTS))]
