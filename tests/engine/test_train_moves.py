"""A training engine that its leases take to other devices and back: what it learns, and what fails on the way."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from rlix.engine.life_cycle import Residency
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train import lifecycle
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights import publication
from rlix.node.device_lock import DeviceLocks, holder
from rlix.protocol.errors import StaleEpochError, WorkerError
from rlix.protocol.messages import Device, Fence
from rlix.workers.group import WorkerGroup
from tests.engine.training_models import Swapping, batch, policy

pytestmark = [pytest.mark.ray]

Places = tuple[tuple[Device, ...], ...]


Lease = Callable[[int], Fence]


def train(engine: TrainEngine, step: int) -> float:
    loss: float = engine.train_step(NeedParallel(batch(step)))["loss"]
    return loss


def locked(devices: tuple[Device, ...]) -> list[int]:
    """The epochs under which they are, if they are locked."""
    return [record.fence.epoch for device in devices if (record := holder(device.key)) is not None]


@pytest.fixture(scope="module")
def places(ray_session: Any) -> Places:
    devices = pool_devices()
    return devices[0:2], devices[2:4], devices[4:6]


@pytest.fixture
def lease(request: pytest.FixtureRequest) -> Lease:
    """By epoch, of a pool of each test's own: devices remember the newest."""
    return lambda epoch: Fence(request.node.name, epoch, "job", "actor training")


@pytest.fixture
def engine(places: Places, lease: Lease) -> Iterator[TrainEngine]:
    """It waits in host memory, after the lease 1."""
    with TrainEngine(policy(), Swapping).build(shard=2, devices=places[0], seed=11, lease=lease(1)) as built:
        built.release(1)
        yield built


@pytest.fixture(scope="module")
def unbroken(places: Places) -> list[float]:
    with TrainEngine(policy(), Swapping).build(shard=2, devices=places[2], seed=11) as built:
        return [train(built, step) for step in range(6)]


def test_it_learns_to_the_bit_what_it_learns_in_one_place(
    engine: TrainEngine, places: Places, lease: Lease, unbroken: list[float]
) -> None:
    first, epoch, losses = engine.processes, 1, []
    published, before = engine.publish(), engine.state_dict()
    for step, there in enumerate([0, 1, 1, 2, 0, 1]):
        epoch += 1
        engine.acquire(lease(epoch), places[there])
        assert [locked(place) for place in places] == [[epoch, epoch] if n == there else [] for n in range(3)]
        pulled = {entry.name: tensor for entry, tensor in publication.stream(published)}  # of workers that were left
        assert all(torch.equal(tensor, before[name]) for name, tensor in pulled.items())
        if step == 4:
            assert engine.processes == first, "the workers that it comes back to"
        losses.append(train(engine, step))
        published, before = engine.publish(), engine.state_dict()
        engine.release(epoch)
        assert engine.residency is Residency.HOST and not any(map(locked, places))
    assert losses == unbroken


def test_leases_that_have_ended_are_refused_there_too(engine: TrainEngine, places: Places, lease: Lease) -> None:
    published = engine.publish()
    engine.acquire(lease(5), places[1])
    engine.release(5)
    for place in (places[2], places[0]):  # where it never was, and where nobody has used the device since
        with pytest.raises(StaleEpochError, match="epoch 4 refused"):
            engine.acquire(lease(4), place)
    assert (engine.devices, engine.residency) == (places[1], Residency.HOST)
    assert not any(map(locked, places))
    later = DeviceLocks([places[0][1].key])
    later.acquire(lease(9), 1.0)
    later.release()
    with pytest.raises(StaleEpochError):  # for one rank only; the other one has its device by then
        engine.acquire(lease(6), places[0])
    assert not any(map(locked, places))
    assert list(publication.stream(published)), "of the workers that were refused"


def test_who_dies_while_it_takes_the_state_takes_nothing_else_with_it(
    places: Places, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrainEngine(policy(), Swapping).build(devices=places[0][:1], seed=11, lease=lease(1)) as engine:
        published = engine.publish()
        engine.release(1)
        engine.acquire(lease(2), places[1][:1])
        loss = train(engine, 0)
        engine.release(2)
        call = WorkerGroup.call

        def dies(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> Any:
            if "take_over" in args[2:3]:
                ray.kill(group.handles[0])
            return call(group, method, *args, **kwargs)

        monkeypatch.setattr(WorkerGroup, "call", dies)
        with pytest.raises(WorkerError, match="died") as failed:
            engine.acquire(lease(3), places[2][:1])
        monkeypatch.undo()
        assert "lost" not in str(failed.value)
        assert (engine.devices, engine.residency) == (places[1][:1], Residency.HOST)
        assert list(publication.stream(published)), "of workers that had nothing to do with it"
        engine.acquire(lease(4), places[1][:1])
        assert train(engine, 1) != loss


def test_whoever_dies_on_the_way_the_state_is_where_it_was(
    engine: TrainEngine, places: Places, lease: Lease, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.acquire(lease(2))
    assert train(engine, 0) == unbroken[0]
    engine.release(2)
    run = WorkerGroup.run

    def dies(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "setup":
            ray.kill(group.handles[1])
        return run(group, method, *args, **kwargs)

    monkeypatch.setattr(WorkerGroup, "run", dies)
    with pytest.raises(WorkerError, match="died"):
        engine.acquire(lease(3), places[1])
    monkeypatch.undo()
    assert (engine.devices, engine.residency, locked(places[1])) == (places[0], Residency.HOST, [])
    engine.acquire(lease(4), places[1])
    assert train(engine, 1) == unbroken[1]
    engine.release(4)
    for process, _ in engine._spares.values():
        ray.kill(process.handles[0])  # it comes back to workers one of which is not there any more
    engine.acquire(lease(5), places[0])
    assert train(engine, 2) == unbroken[2]


def test_only_so_many_places_are_kept(
    engine: TrainEngine, places: Places, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "SPARE_GROUPS", 1)
    engine.acquire(lease(2), places[1])
    published = engine.publish()
    for epoch, there in ((3, 2), (4, 0), (5, 2)):
        engine.release(epoch - 1)
        engine.acquire(lease(epoch), places[there])
        assert len(engine._spares) <= 1 + (epoch > 3), "besides the one that has what was published"
    assert places[1] in engine._spares
    assert next(iter(publication.stream(published)))
    engine.close()
    assert not engine._spares
