from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlix.engine.life_cycle import Phase, Residency
from rlix.engine.movers import HostBuffer, Mover, SwapMover, VirtualMover, mover_for
from rlix.engine.residency import ResidentSet, local_tensor, module_tensors
from rlix.node.pinned_memory import PinnedMemory
from rlix.protocol.errors import NotResidentError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


class Clock:
    """Advances by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def resident(tensors: list[torch.Tensor], mover: Mover) -> ResidentSet:
    return ResidentSet("a model", lambda: tensors, CPU, mover=mover, clock=Clock())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6),
    st.integers(0, 2**31),
    st.lists(st.booleans(), max_size=6),
)
def test_any_moves_keep_every_bit_and_every_alias(
    shapes: list[tuple[torch.dtype, list[int]]], seed: int, moves: list[bool]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype).squeeze(-1)
        if dtype is not torch.bool
        else torch.randint(0, 2, shape, generator=generator).bool()
        for dtype, shape in shapes
    ]
    tensors.append(tensors[0])  # tied
    views = [tensor.reshape(-1) for tensor in tensors]
    before = [bits(tensor) for tensor in tensors]
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    subject = resident(tensors, SwapMover(CPU))
    for to_host in moves:
        report = subject.to_host() if to_host else subject.to_device()
        assert report.bytes in (0, size)
        assert subject.device_bytes + subject.host_bytes == size
        if to_host:
            assert subject.device_bytes == 0
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    subject.to_device()
    assert [bits(tensor) for tensor in tensors] == before
    assert [bits(view) for view in views] == before


def test_reports_bytes_and_seconds() -> None:
    subject = resident([torch.zeros(10), torch.zeros(3, dtype=torch.float64)], SwapMover(CPU))
    report = subject.to_host()
    assert (report.bytes, report.seconds, report.bytes_per_second) == (64, 1.0, 64.0)
    assert subject.to_host().bytes == 0  # already there


def test_a_virtual_gpu_counts_and_does_not_move() -> None:
    tensor = torch.ones(10)
    subject = resident([tensor], VirtualMover())
    address = tensor.data_ptr()
    assert subject.to_host().bytes == 40
    assert (subject.device_bytes, subject.host_bytes, subject.state) == (0, 40, Residency.HOST)
    assert subject.to_device().bytes == 40
    assert tensor.data_ptr() == address


@pytest.mark.parametrize("mover", [SwapMover(CPU), VirtualMover()])
def test_use_while_away_is_an_error(mover: Mover) -> None:
    subject = resident([torch.ones(4)], mover)
    subject.check()
    subject.to_host()
    with pytest.raises(NotResidentError, match=r"a model was used while its bytes are on host.*cuda\(\)"):
        subject.check()
    subject.to_meta()
    with pytest.raises(NotResidentError, match="on meta"):
        subject.to_device()
    with pytest.raises(NotResidentError, match="on meta"):
        subject.to_host()


@pytest.mark.parametrize("mover", [SwapMover(CPU), VirtualMover()])
@pytest.mark.parametrize("from_host", [False, True])
def test_meta_drops_the_bytes_and_filling_brings_the_set_back(mover: Mover, from_host: bool) -> None:
    tensor = torch.ones(4)
    subject = resident([tensor], mover)
    with pytest.raises(NotResidentError, match="only a set on meta"), subject.filling():
        pass
    if from_host:
        subject.to_host()
    assert subject.to_meta().bytes == 16
    assert (subject.device_bytes, subject.host_bytes, tensor.untyped_storage().nbytes()) == (0, 0, 0)
    with pytest.raises(RuntimeError, match="no such file"), subject.filling():
        assert subject.life.phase is Phase.RESIDENT
        raise RuntimeError("no such file")
    assert (subject.state, tensor.untyped_storage().nbytes()) == (Residency.META, 0)
    with subject.filling() as report:
        tensor.fill_(7)
    assert report.bytes == 16
    assert (subject.device_bytes, tensor.tolist(), subject.life.phase) == (16, [7.0] * 4, Phase.SERVING)


class Broken(SwapMover):
    """Breaks off at the nth of its copies."""

    def __init__(self, at: int) -> None:
        super().__init__(CPU)
        self.at = at

    def _settle(self) -> None:
        self.at -= 1
        if self.at == 0:
            raise MemoryError("no room")


def test_a_move_that_fails_has_changed_nothing_and_the_next_one_works() -> None:
    tensors = [torch.arange(4.0), torch.arange(9)]
    before = [bits(tensor) for tensor in tensors]
    away = Broken(at=1)
    subject = resident(tensors, away)
    with pytest.raises(MemoryError):
        subject.to_host()
    assert (subject.state, [bits(tensor) for tensor in tensors]) == (Residency.DEVICE, before)
    subject.to_host()
    away.at = 1
    with pytest.raises(MemoryError):
        subject.to_device()
    assert subject.state is Residency.HOST
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)  # the half that had come is free again
    subject.to_device()
    assert [bits(tensor) for tensor in tensors] == before


class Crowded(SwapMover):
    """Breaks off when some have left, of which none comes back where others have `taken` the room."""

    def __init__(self, taken: bool) -> None:
        super().__init__(CPU)
        self.taken, self.calls = taken, 0

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        self.calls += 1
        if self.calls == 2 or (size and self.taken):
            raise MemoryError("no room")
        super()._resize(storage, size)


def test_what_has_left_when_a_move_breaks_off_comes_back_or_is_lost_aloud() -> None:
    tensors = [torch.arange(4.0), torch.arange(9)]
    before = [bits(tensor) for tensor in tensors]
    subject = resident(tensors, Crowded(taken=False))
    with pytest.raises(MemoryError):
        subject.to_host()
    assert (subject.state, [bits(tensor) for tensor in tensors]) == (Residency.DEVICE, before)
    lost = resident(tensors, Crowded(taken=True))
    with pytest.raises(MemoryError):
        lost.to_host()
    assert (lost.state, lost.life.phase) == (Residency.META, Phase.FAILED)
    assert lost.life.failure == "its bytes were lost on the way to host memory: no room"
    with pytest.raises(NotResidentError, match="load weights first"):
        lost.to_device()


def test_host_memory_is_of_exact_size_kept_for_the_next_move_and_pinned_up_to_a_bound(tmp_path: Path) -> None:
    pinned: dict[int, int] = {}

    def pin(address: int, size: int) -> bool:
        pinned[address] = size
        return True

    buffer = HostBuffer(pin, lambda address: pinned.pop(address) and None, PinnedMemory(3000, tmp_path))
    first, second = buffer.lend([700, 9])
    assert (first.numel(), second.numel(), second.data_ptr() - first.data_ptr()) == (700, 9, 1024)
    assert (list(pinned.values()), buffer.pinned_bytes) == ([1536], 1536)  # not 2048, as torch would take
    (again,) = buffer.lend([1200])
    assert (again.data_ptr(), len(pinned)) == (first.data_ptr(), 1)
    buffer.lend([4000])
    assert (pinned, buffer.pinned_bytes, buffer.nbytes) == ({}, 0, 4096)  # beyond the bound: ordinary memory
    buffer.lend([100])
    buffer.free()
    buffer.lend([2000])
    other = HostBuffer(pin, lambda address: pinned.pop(address) and None, PinnedMemory(3000, tmp_path))
    other.lend([2000])
    assert (buffer.pinned_bytes, other.pinned_bytes) == (2048, 0)  # one bound for all of a node
    buffer.free()
    other.free()
    other.lend([2000])
    assert (list(pinned.values()), other.pinned_bytes) == ([2048], 2048)
    other.free()
    assert buffer.nbytes == 0


def test_pinned_memory_is_let_go_before_it_is_freed_by_whoever_forgets_it(tmp_path: Path) -> None:
    """CUDA would fail whatever is at its addresses next."""
    unpinned: list[int] = []
    budget = PinnedMemory(3000, tmp_path)
    buffer = HostBuffer(lambda address, size: True, unpinned.append, budget)
    (piece,) = buffer.lend([2000])
    address = piece.data_ptr()
    del piece, buffer
    assert unpinned == [address]
    assert budget.take(3000)
    budget.give_back()


def test_borrowed_memory_can_move(tmp_path: Path) -> None:
    """Memory-mapped weights cannot be freed where they lie."""
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=4)
    mapped.fill_(3)
    subject = resident([mapped], SwapMover(CPU))
    subject.to_host()
    assert subject.device_bytes == 0
    subject.to_device()
    assert mapped.tolist() == [3.0] * 4


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(away_between_steps: bool) -> list[bytes]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    subject = ResidentSet("m", lambda: module_tensors(model, optimizer), CPU, mover=SwapMover(CPU))
    for step in range(3):
        model(torch.full((4, 6), float(step)) + torch.arange(4.0)[:, None]).square().sum().backward()
        if away_between_steps:  # gradients move as well
            held = subject.device_bytes
            subject.to_host()
            assert subject.device_bytes == 0
            assert subject.host_bytes == held
            subject.to_device()
        optimizer.step()
        optimizer.zero_grad()
    return [bits(local_tensor(tensor)) for tensor in module_tensors(model, optimizer)]


@pytest.mark.usefixtures("one_rank")
def test_training_goes_on_to_the_bit_after_moves_of_sharded_weights_gradients_and_moments() -> None:
    assert train(away_between_steps=True) == train(away_between_steps=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_its_memory_back_and_gets_every_bit_again() -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.randn(2**20, device=device), torch.randn(333, 7, device=device).bfloat16()]
    before = [bits(tensor.cpu()) for tensor in tensors]
    subject = ResidentSet("a model", lambda: tensors, device, mover=mover_for(device))
    held = torch.cuda.memory_allocated(device)
    report = subject.to_host()
    assert held - torch.cuda.memory_allocated(device) >= report.bytes == sum(t.numel() * t.itemsize for t in tensors)
    subject.to_device()
    assert [bits(tensor.cpu()) for tensor in tensors] == before


def test_what_waits_in_host_memory_can_be_read_there_and_is_as_it_was_afterwards() -> None:
    module = torch.nn.Linear(3, 2)
    module.weight.grad = torch.ones(2, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    subject = ResidentSet("a model", lambda: module_tensors(module, optimizer), CPU, mover=SwapMover(CPU))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    moments = optimizer.state[module.weight]["exp_avg"].clone()
    subject.to_host()
    assert module.weight.untyped_storage().nbytes() == 0
    with subject.readable():
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert torch.equal(optimizer.state[module.weight]["exp_avg"], moments)
    assert module.weight.untyped_storage().nbytes() == 0
    subject.to_device()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    subject.to_meta()
    with pytest.raises(NotResidentError, match="on meta"), subject.readable():
        raise AssertionError("there is nothing to read")


def test_what_is_dropped_goes_back_to_the_system() -> None:
    """Not only to the C library, which keeps what lies below something that is still used."""
    process = psutil.Process()
    before = process.memory_full_info().uss
    tensors = [torch.ones(16_000) for _ in range(3_000)]  # 192 MB in pieces that do not get pages of their own
    above = torch.ones(16_000)
    resident = ResidentSet("pieces", lambda: tensors, CPU)
    assert process.memory_full_info().uss - before > 150e6
    resident.to_meta()
    assert process.memory_full_info().uss - before < 50e6, f"kept below {above.data_ptr():#x}"


def test_who_shares_borrowed_bytes_shares_them_still() -> None:
    """As views, tied weights and a `state_dict` of a model that was read from a file do."""
    whole = torch.from_numpy(np.arange(12, dtype=np.float32))
    weight, other = torch.nn.Parameter(whole[2:10].view(2, 4)), whole[10:]
    tied, row, transposed = weight.data.view(8), weight.data[1], weight.data.t()
    moved = resident([weight, other, tied], SwapMover(CPU))
    moved.to_host()
    assert {each.untyped_storage().nbytes() for each in (weight, other, tied, row, transposed)} == {0}
    moved.to_device()
    assert moved.device_bytes == 10 * 4
    with torch.no_grad():
        weight += 1
    assert [tied.tolist(), row.tolist(), other.tolist()] == [[*range(3, 11)], [*range(7, 11)], [10, 11]]
    assert torch.equal(transposed, weight.t())
