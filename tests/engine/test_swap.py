"""One engine comes while another leaves: never more on the device than it has room for, and every bit is kept."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from rlix.engine.base import Engine
from rlix.engine.life_cycle import Life, Part, Phase, Residency, WeightsId
from rlix.engine.movers import ROOM_TIMEOUT_S, Room, SwapMover
from rlix.engine.residency import MoveReport, ResidentSet
from rlix.engine.swap import swap
from rlix.protocol.errors import NotResidentError, RlixError

CPU = torch.device("cpu")
WAIT_S = 120.0
SERVING = Life().brought(*Part).filled(WeightsId(1))
HOST = SERVING.released(keep_host=True)


class Gpu:
    """Memory of so many bytes that several movers share."""

    def __init__(self, size: int, used: int = 0) -> None:
        self.size, self.used, self.most = size, used, used
        self.changed = threading.Condition()

    def free(self) -> int:
        return self.size - self.used

    def change(self, size: int) -> None:
        with self.changed:
            if self.used + size > self.size:
                raise torch.OutOfMemoryError
            self.used += size
            self.most = max(self.most, self.used)
            self.changed.notify_all()

    def wait(self, _: float) -> None:
        """Until something changes, or for a moment: it may have changed already."""
        with self.changed:
            self.changed.wait(0.01)


class OnGpu(SwapMover):
    """Storages of host memory, which count as the GPU's. `leaves` is called before a part is given back."""

    def __init__(
        self,
        gpu: Gpu,
        part_bytes: int,
        leaves: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(CPU, room=Room(gpu.free, part_bytes, clock=clock, sleep=gpu.wait))
        self.gpu, self.leaves, self.came = gpu, leaves, threading.Event()

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        self.gpu.change(size - storage.nbytes())
        super()._resize(storage, size)
        if size:
            self.came.set()

    def _let_go(self, part: Any, arrived: Any) -> None:
        self.leaves()
        super()._let_go(part, arrived)


def tensors(seed: int, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]


def test_what_comes_begins_before_all_that_leaves_has_left_and_never_takes_more_than_there_is() -> None:
    gpu = Gpu(110, used=100)
    new = tensors(2, [30, 20, 25, 25])
    expected = [tensor.clone() for tensor in new]
    comes = OnGpu(gpu, 25)
    arriving = ResidentSet("new", lambda: new, CPU, mover=comes)
    arriving.to_host()
    comes.came.clear()
    gpu.change(100)
    parts_left = itertools.count(1)

    def leaves() -> None:
        """The last of four parts does not leave before something has come."""
        if next(parts_left) == 4:
            assert comes.came.wait(WAIT_S), "nothing came while the other was leaving"

    leaving = ResidentSet("old", partial(list, tensors(1, [25] * 4)), CPU, mover=OnGpu(gpu, 25, leaves))
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(leaving.to_host)
        arriving.to_device()
        left.result(WAIT_S)
    assert (leaving.state, arriving.state) == (Residency.HOST, Residency.DEVICE)
    assert (gpu.used, gpu.most <= 110) == (100, True)
    assert all(torch.equal(tensor, before) for tensor, before in zip(new, expected, strict=True))


def test_a_wait_for_room_is_bounded_by_when_more_came_last() -> None:
    gpu, now = Gpu(100, used=90), [0.0]

    def sleep(_: float) -> None:
        now[0] += ROOM_TIMEOUT_S / 2
        gpu.used = max(gpu.used - 10, 60)  # somebody leaves, until 40 are free

    room = Room(gpu.free, clock=lambda: now[0], sleep=sleep)
    room.take(lambda: gpu.change(30), 30)
    assert (gpu.used, now[0]) == (100, ROOM_TIMEOUT_S)
    with pytest.raises(RlixError, match=r"no room on the device for 50 bytes: 40 are free, and for 30 s nobody"):
        room.take(lambda: gpu.change(50), 50)


class Fails:
    """Somebody who takes `taken` bytes at the third part to leave, which then breaks off, as do `more` after it."""

    def __init__(self, gpu: Gpu, taken: int = 0, more: int = 0) -> None:
        self.gpu, self.taken, self.last, self.parts = gpu, taken, 3 + more, itertools.count(1)

    def __call__(self) -> None:
        part = next(self.parts)
        if part == 3:
            self.gpu.change(self.taken)
        if 3 <= part <= self.last:
            raise MemoryError(f"part {part} broke off")


@pytest.mark.parametrize("when", ["before it has left", "when it has left"])
def test_a_move_part_by_part_that_fails_in_the_middle_has_changed_nothing(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(100, used=100)
    fails = Fails(gpu)
    mover = OnGpu(gpu, 20, fails) if when == "before it has left" else OnGpu(gpu, 20)
    if when == "when it has left":
        monkeypatch.setattr(mover, "trim", fails)
    held = tensors(3, [20] * 5)
    before = [tensor.clone() for tensor in held]
    subject = ResidentSet("a model", lambda: held, CPU, mover=mover)
    with pytest.raises(MemoryError):
        subject.to_host()
    assert (subject.state, gpu.used) == (Residency.DEVICE, 100)
    assert all(torch.equal(tensor, whole) for tensor, whole in zip(held, before, strict=True))


def waiting_in_vain() -> Callable[[], float]:
    """A clock by which no more room comes in time."""
    return itertools.count(0.0, ROOM_TIMEOUT_S).__next__


def test_where_others_have_taken_the_room_to_come_back_to_the_rest_leaves_as_well() -> None:
    gpu = Gpu(100, used=100)
    held = tensors(3, [20] * 5)
    before = [tensor.clone() for tensor in held]
    mover = OnGpu(gpu, 20, Fails(gpu, taken=30), waiting_in_vain())
    subject = ResidentSet("a model", lambda: held, CPU, mover=mover)
    assert subject.to_host().bytes == 100
    assert (subject.state, subject.host_bytes, gpu.used) == (Residency.HOST, 100, 30)
    gpu.change(-30)
    subject.to_device()
    assert all(torch.equal(tensor, whole) for tensor, whole in zip(held, before, strict=True))


def test_bytes_that_can_neither_come_back_nor_leave_are_lost_aloud() -> None:
    gpu = Gpu(100, used=100)
    held = tensors(3, [20] * 5)
    mover = OnGpu(gpu, 20, Fails(gpu, taken=30, more=1), waiting_in_vain())
    subject = ResidentSet("a model", lambda: held, CPU, mover=mover)
    with pytest.raises(MemoryError, match="part 4"):
        subject.to_host()
    assert (subject.state, subject.life.phase) == (Residency.META, Phase.FAILED)
    assert subject.life.failure == "its bytes were lost on the way to host memory: part 4 broke off"
    with pytest.raises(NotResidentError, match="load weights first"):
        subject.to_device()
    with subject.filling() as report:
        assert report.bytes == 100
    assert subject.life.phase is Phase.SERVING


class Fake(Engine):
    """Moves as it is told, and notes in which order."""

    gradual_moves = True

    def __init__(self, log: list[str], life: Life, together: threading.Barrier | None = None) -> None:
        super().__init__("fake")
        self._life, self._log, self._together = life, log, together

    def _ask_workers(self) -> Life:
        return self._life

    def _move(self, name: str) -> MoveReport:
        self._log.append(name)
        if self._together is not None:
            self._together.wait(WAIT_S)
            self._together = None
        return MoveReport(10, 1.0, 0.1, 0.2)

    def cuda(self, what: str | None = None) -> MoveReport:
        return self._move(f"cuda {what}")

    def cpu(self) -> MoveReport:
        return self._move("cpu")

    def meta(self) -> MoveReport:
        raise AssertionError


def test_two_engines_move_at_the_same_time_and_the_cache_comes_last() -> None:
    log: list[str] = []
    together = threading.Barrier(2)
    report = swap(Fake(log, SERVING, together), Fake(log, HOST, together))
    assert (sorted(log[:2]), log[2:]) == (["cpu", "cuda weights"], ["cuda None"])
    assert report.overlapped
    assert (report.left.bytes, report.came) == (10, MoveReport(20, 2.0, 0.1, 0.2))


@pytest.mark.parametrize("why", ["built otherwise", "under a lease", "nothing waits in host memory"])
def test_otherwise_one_comes_when_the_other_has_left(why: str) -> None:
    log: list[str] = []
    leaving, arriving = Fake(log, SERVING), Fake(log, HOST)
    if why == "built otherwise":
        arriving.gradual_moves = False
    elif why == "under a lease":
        leaving._life = SERVING.enter(3)
    else:
        arriving._life = Life()
    assert not swap(leaving, arriving).overlapped
    assert log == ["cpu", "cuda None"]


class Waiting(Fake):
    """There is no room for its weights alone, which is to say while the other leaves."""

    def cuda(self, what: str | None = None) -> MoveReport:
        report = super().cuda(what)
        if what is not None:
            raise RlixError("no room")
        return report


def test_what_waited_in_vain_while_the_other_left_comes_when_that_has_left() -> None:
    log: list[str] = []
    report = swap(Fake(log, SERVING), Waiting(log, HOST))
    assert (sorted(log[:2]), log[2:]) == (["cpu", "cuda weights"], ["cuda None"])
    assert (report.overlapped, report.left.bytes, report.came) == (False, 10, MoveReport(10, 1.0, 0.1, 0.2))


def test_the_error_of_the_one_that_leaves_comes_first_and_the_others_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(Fake):
        def cpu(self) -> MoveReport:
            raise NotResidentError("it is stuck")

    log: list[str] = []
    with pytest.raises(NotResidentError, match="stuck"):
        swap(Stuck(log, SERVING), Waiting(log, HOST))
    assert log == ["cuda weights"]
    assert "was leaving: no room" in caplog.text
