"""A mailbox among others whose processes are pretended: what becomes of messages when readers end."""

import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from rlix.flow.channels.codec import Parcel
from rlix.flow.memory import HostMemory, opened_host
from rlix.flow.messages import gpus
from rlix.flow.messages import mailbox as mailbox_module
from rlix.flow.messages.mailbox import Home, Mailbox
from rlix.flow.messages.peer import Peer
from rlix.flow.messages.routes import Place
from rlix.protocol.errors import WaitTimeoutError, WorkerError
from rlix.protocol.messages import DeviceKind

TENSOR = torch.arange(100_000)


class Reader:
    """Its handle, too: a call is made when its answer is asked for."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.home = Home(Place("here", DeviceKind.CPU), str(folder))
        self.came: list[Parcel] = []
        self.raises: Exception | None = None
        self._rlix_home = SimpleNamespace(remote=lambda: lambda: self._answer() or self.home)
        self._rlix_deliver = SimpleNamespace(
            remote=lambda _, tag, parcel: lambda: self._answer() or self.came.append(parcel)
        )

    def _answer(self) -> None:
        if self.raises is not None:
            raise self.raises

    @property
    def files(self) -> int:
        return len(list(self.folder.iterdir())) if self.folder.exists() else 0


class Pretended:
    """What a mailbox asks of Ray."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.waits: list[float] = []

    def get_actor(self, name: str, namespace: str | None = None) -> Any:
        if namespace != "job" or name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def get(self, call: Any, timeout: float) -> Any:
        self.waits.append(timeout)
        return call()


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended()
    monkeypatch.setattr(mailbox_module, "ray", pretended)
    return pretended


@pytest.fixture
def mailbox(actors: Pretended) -> Iterator[Mailbox]:
    mailbox = Mailbox("me:0", Place("here", DeviceKind.CPU), "job")
    yield mailbox
    mailbox._scratch.cleanup()


def test_what_is_not_sent_to_all_leaves_no_files(
    actors: Pretended, mailbox: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, full = Reader(tmp_path / "a"), Reader(tmp_path / "b")
    actors.actors = {"a:0": live, "b:0": full}

    def link(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(mailbox_module.os, "link", link)
    with pytest.raises(OSError, match="no space left"):
        mailbox.send(TENSOR, ["a:0", "b:0"], "", 5.0)
    assert (live.files, live.came) == (0, [])


@pytest.mark.parametrize(
    ("fault", "said", "left"),
    [
        (RayTaskError("deliver", "", LookupError("odd")), "a:0 could not take a message: odd", 0),
        (GetTimeoutError(), "a:0 did not take a message in time", 1),  # it may still
    ],
)
def test_who_died_beside_one_that_fails_leaves_no_files(
    actors: Pretended, mailbox: Mailbox, tmp_path: Path, fault: Exception, said: str, left: int
) -> None:
    fails, dead = Reader(tmp_path / "a"), Reader(tmp_path / "b")
    actors.actors = {"a:0": fails, "b:0": dead}
    mailbox.send(TENSOR, ["a:0", "b:0"], "", 5.0)
    fails.raises, dead.raises = fault, ActorDiedError()
    with pytest.raises((WorkerError, WaitTimeoutError), match=said):
        mailbox.send(TENSOR, ["a:0", "b:0"], "", 5.0)
    assert (fails.files, dead.files) == (1 + left, 1)


def test_a_name_that_another_process_has_by_now_is_sent_to_again(
    actors: Pretended, mailbox: Mailbox, tmp_path: Path
) -> None:
    live, old, new = Reader(tmp_path / "a"), Reader(tmp_path / "b"), Reader(tmp_path / "c")
    actors.actors = {"a:0": live, "b:0": old}
    mailbox.send(TENSOR, ["a:0", "b:0"], "", 5.0)
    actors.actors["b:0"], old.raises = new, ActorDiedError()
    mailbox.send(TENSOR, ["a:0", "b:0"], "", 5.0)
    assert (len(live.came), len(old.came), len(new.came)) == (2, 1, 1)
    assert (live.files, old.files, new.files) == (2, 1, 1)
    shutil.rmtree(new.folder)  # as is done with those of the dead
    with pytest.raises(WorkerError, match="b:0, at the other end of a message, has died"):
        mailbox.send(TENSOR, ["a:0", "b:0"], "", 5.0)
    assert (len(live.came), live.files) == (3, 3)


def test_who_cannot_be_reached_keeps_what_it_may_have_taken(
    actors: Pretended, mailbox: Mailbox, tmp_path: Path
) -> None:
    reader = Reader(tmp_path / "a")
    actors.actors = {"a:0": reader}
    mailbox.send(TENSOR, ["a:0"], "", 5.0)
    reader.raises = ActorUnavailableError("for the moment", None)
    with pytest.raises(WaitTimeoutError, match="a:0 cannot be reached; it may have the message, or not"):
        mailbox.send(TENSOR, ["a:0"], "", 5.0)
    assert reader.files == 2
    reader.raises = None
    mailbox.send(TENSOR, ["a:0"], "", 5.0)


def test_who_waits_does_not_wait_longer_for_an_answer(
    actors: Pretended, mailbox: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "_LOOK_S", 0.0)
    sender = Reader(tmp_path / "a")
    sender.raises = GetTimeoutError()
    actors.actors = {"a:0": sender}
    with pytest.raises(WaitTimeoutError, match=r"me:0 waited 0\.05 s for a message of a:0"):
        mailbox.receive("a:0", "", 0.05)
    assert max(actors.waits) <= 0.05


def test_a_name_without_a_rank_is_refused_at_once(mailbox: Mailbox) -> None:
    for call in (lambda: mailbox.send(1, ["a"], "", 60.0), lambda: mailbox.receive("a", "", 60.0)):
        with pytest.raises(ValueError, match="names are text, `group:rank`, such as a:0"):
            call()
    with pytest.raises(ValueError, match="3 names no worker: names are text"):
        mailbox.send(1, [3], "", 60.0)  # type: ignore[list-item]


def test_what_is_on_a_gpu_that_both_see_does_not_leave_it(actors: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of GPU memory, host memory: everything around it is as on a GPU."""
    opened: list[torch.device] = []

    def open_memory(handle: str, device: torch.device) -> torch.Tensor:
        opened.append(device)
        return opened_host(handle)

    monkeypatch.setattr(gpus, "gpu_of", lambda tensor, _: "GPU-1" if tensor.is_floating_point() else "")
    withdrawn: list[str] = []

    class Memory(HostMemory):
        def __init__(self, size: int, _: torch.device) -> None:
            super().__init__(size)

        def withdraw(self) -> None:
            withdrawn.append(self.handle)

    monkeypatch.setattr(gpus, "GpuMemory", Memory)
    monkeypatch.setattr(gpus, "opened_gpu", open_memory)
    monkeypatch.setattr(gpus, "synchronize", lambda _: None)
    sender = Mailbox("me:0", Place("here", DeviceKind.CUDA, ("GPU-0", "GPU-1")), "job", cuda_ipc=True)
    readers = [Mailbox(f"r:{rank}", Place("here", DeviceKind.CUDA, ("GPU-1",)), "job") for rank in range(2)]
    for reader in readers:
        deliver = SimpleNamespace(remote=lambda *message, to=reader: lambda: to.deliver(*message))
        home = SimpleNamespace(remote=lambda to=reader: lambda: to.home)
        actors.actors[reader.me] = SimpleNamespace(_rlix_deliver=deliver, _rlix_home=home)
    large, small = torch.arange(60_000).bfloat16().reshape(200, 300).t(), torch.ones(2)
    value = {"large": large.clone(), "small": small, "host": TENSOR}
    sender.send(value, ["r:0", "r:1"], "", 5.0)
    value["large"].zero_()
    (first,) = readers[0]._came["me:0", ""]
    assert [layout.shared is not None for layout in first.layouts] == [True, False, False]
    assert first.nbytes < TENSOR.nbytes + 4096
    for reader in readers:
        got = reader.receive("me:0", "", 5.0)
        assert got["large"].equal(large)
        assert (got["small"].tolist(), got["host"].equal(TENSOR)) == ([1.0, 1.0], True)
        got["large"].zero_()  # each reader's own
    assert opened == [torch.device("cuda", 0)] * 2
    asked = []

    def dies(*message: Any) -> Any:
        asked.append(message[-1])
        return lambda: (_ for _ in ()).throw(ActorDiedError())

    assert withdrawn == []
    actors.actors["r:1"]._rlix_deliver.remote = dies
    with pytest.raises(WorkerError, match="r:1, at the other end of a message, has died"):
        sender.send(value, ["r:0", "r:1"], "", 5.0)
    assert withdrawn == [parcel.layouts[0].shared[1] for parcel in asked]  # and it is sent to once more
    assert len(asked) == 2
    shutil.rmtree(readers[0].home.folder)
    with pytest.raises(WorkerError, match="r:0, at the other end of a message, has died"):
        sender.send(value, ["r:0"], "", 5.0)
    assert len(withdrawn) == 2 + 2
    for mailbox in (sender, *readers):
        mailbox._scratch.cleanup()


class Rank(Peer):
    """Whose messages go straight into a dict."""

    def __init__(self, name: str, world_size: int, messages: dict[tuple[str, ...], deque[Any]]) -> None:
        self.name, self.messages, self.batches = name, messages, Counter[str]()
        group, _, rank = name.partition(":")
        self.ctx = cast(Any, SimpleNamespace(group=group, rank=int(rank), world_size=world_size))

    def _rlix_mail(self) -> Any:
        return self

    def send(self, value: object, to: str | Sequence[str], tag: str = "", timeout_s: float = 0.0) -> None:
        for reader in [to] if isinstance(to, str) else to:
            self.messages[self.name, reader, tag].append(value)

    broadcast = send

    def recv(self, sender: str, *, tag: str = "", timeout_s: float = 0.0) -> Any:
        if not self.messages[sender, self.name, tag]:
            raise WaitTimeoutError(sender)
        return self.messages[sender, self.name, tag].popleft()


def test_shares_of_different_batches_are_not_joined() -> None:
    messages: dict[tuple[str, ...], deque[Any]] = defaultdict(deque)
    first, late, reader = (Rank(name, 1, messages) for name in ("a:0", "b:0", "r:0"))
    first.send_batch([1], ["r:0"])
    with pytest.raises(WaitTimeoutError, match="b:0"):
        reader.recv_batch(["a:0", "b:0"])
    late.send_batch([2], ["r:0"])
    first.send_batch([3], ["r:0"])
    with pytest.raises(WorkerError, match=r"of different batches \(\{'a:0': 2, 'b:0': 1\}\)"):
        reader.recv_batch(["a:0", "b:0"])
    with pytest.raises(ValueError, match="`to` is empty"):
        first.send_batch([1], [])


def test_a_rank_that_was_started_again_counts_on() -> None:
    messages: dict[tuple[str, ...], deque[Any]] = defaultdict(deque)
    anew = Rank("a:0", 2, messages)
    messages["a:1", "a:0", "rows for r:0"].append((5, 1))
    anew.send_batch([1], ["r:0"])
    assert list(messages["a:0", "r:0", "batch"]) == [(5, [1])]
