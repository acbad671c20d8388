"""Who has bytes on a device holds its lock: engines of one program together, and nobody else beside them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlix import InferenceEngine, Phase, TrainEngine
from rlix.control.program import attach
from rlix.engine.placement import pool_devices
from rlix.node.device_lock import lock_directory
from rlix.node.node import Node
from rlix.protocol.errors import DeviceBusyError, StaleEpochError
from rlix.protocol.messages import Device, Fence
from rlix.workers.worker import program_fence
from tests.engine.models import folder
from tests.engine.training_models import policy
from tests.node.holders import Holder

pytestmark = [pytest.mark.ray]
WAIT_S = 300.0
THEIRS = Fence("another", 1, "another user's program", "rollout")


@pytest.fixture(scope="module")
def devices(ray_session: Any) -> tuple[Device, ...]:
    return pool_devices()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def trainer(devices: tuple[Device, ...]) -> Iterator[TrainEngine]:
    engine = TrainEngine(policy()).build(tensor_parallel_size=2, devices=devices[:2])
    yield engine
    engine.close()


@pytest.fixture
def rollout(devices: tuple[Device, ...], path: Path) -> Iterator[InferenceEngine]:
    engine = InferenceEngine(path).build(devices=devices[2:3], load=False)
    yield engine
    engine.close()


def holders(devices: Sequence[Device]) -> dict[int, Fence]:
    return {number: record.fence for number, record in Node("here").holders(devices).items()}


def there(keys: Sequence[Device]) -> Holder:
    """Another program of this machine, on these devices."""
    return Holder(lock_directory(), [device.key for device in keys])


def test_a_trainer_holds_its_devices_while_its_bytes_are_there(trainer: TrainEngine, tmp_path: Path) -> None:
    mine = dict.fromkeys([0, 1], program_fence())
    assert holders(trainer.devices) == mine
    trainer.save_state(tmp_path / "state")
    trainer.cpu()
    assert holders(trainer.devices) == {}
    trainer.cuda()
    assert holders(trainer.devices) == mine
    trainer.meta()
    assert holders(trainer.devices) == {}
    trainer.load_state(tmp_path / "state")
    assert holders(trainer.devices) == mine
    lease = Fence(__name__, 3, "a job", "actor training")
    trainer.acquire(lease)  # from the program's own account to a lease's, without letting go
    assert holders(trainer.devices) == dict.fromkeys([0, 1], lease)
    trainer.release(3)
    assert holders(trainer.devices) == {}
    trainer.cuda()


def test_a_trainer_is_built_under_a_lease(devices: tuple[Device, ...]) -> None:
    lease = Fence(__name__, 5, "a job", "initialization")
    with TrainEngine(policy()).build(devices=devices[3:4], lease=lease) as engine:
        assert holders(devices) | {3: lease} == holders(devices)
        engine.acquire(lease)
        assert engine.count([[1]]) == 1
        engine.release(5)
        assert 3 not in holders(devices)
    with pytest.raises(StaleEpochError, match="epoch 4"):  # another process, an older epoch than the device's
        TrainEngine(policy()).build(devices=devices[3:4], lease=Fence(__name__, 4))


def test_a_replica_holds_its_device_while_its_bytes_are_there(rollout: InferenceEngine) -> None:
    assert holders(rollout.devices) == {}
    rollout.cuda("weights")
    assert holders(rollout.devices) == {2: program_fence()}
    rollout.cuda("kv_cache")
    rollout.cpu()
    assert holders(rollout.devices) == {}
    first, second = (Fence(__name__, epoch, "a job", "rollout") for epoch in (8, 9))
    rollout.replicas.run("load", None, first, timeout_s=WAIT_S)
    rollout.replicas.run("load", None, second, timeout_s=WAIT_S)  # ready already: only the lease changes
    assert holders(rollout.devices) == {2: second}
    rollout.replicas.run("offload", second, timeout_s=WAIT_S)
    assert holders(rollout.devices) == {}


def test_engines_of_one_program_share_a_device_until_they_are_closed(trainer: TrainEngine, path: Path) -> None:
    with InferenceEngine(path).build(devices=trainer.devices[:1]) as beside:
        trainer.cpu()
        assert holders(trainer.devices) == {0: program_fence()}
        beside.close()
        assert holders(trainer.devices) == {}
    trainer.cuda()


def test_a_killed_worker_holds_nothing(rollout: InferenceEngine) -> None:
    rollout.cuda()
    rollout.replicas.kill(0)
    assert holders(rollout.devices) == {}


def test_an_engine_without_a_lease_keeps_off_the_devices_of_jobs_and_of_other_programs(
    devices: tuple[Device, ...], trainer: TrainEngine, path: Path
) -> None:
    mine = set(trainer.devices)
    free = [device for device in devices if device not in mine]
    job, theirs = free[-2:], free[:1]
    with (
        attach("a job", gangs={"train": [device.id for device in job]}) as program,
        there(theirs) as other,
        program.phase(Phase.ACTOR_TRAINING),
    ):
        assert other.acquire(THEIRS) is None
        left = set(free) - {*job, *theirs}
        with InferenceEngine(path).build(data_parallel_size=len(left), load=False) as engine:
            assert set(engine.devices) == left
            with pytest.raises(
                ValueError, match=rf"{len(devices) - 1} device.*{len(devices) - 2} under no job's lease"
            ):
                InferenceEngine(path).build(data_parallel_size=len(devices) - 1)
        # Where nothing else is left it would be the other program's, whose lock then says whose it is.
        with pytest.raises(DeviceBusyError, match=f"pid {other.pid} of job another user's program"):
            InferenceEngine(path).build(data_parallel_size=len(left) + 1, not_colocate_with=trainer)


def test_another_programs_device_is_refused_and_its_process_named(
    devices: tuple[Device, ...], trainer: TrainEngine, rollout: InferenceEngine
) -> None:
    trainer.cpu()
    with there(devices[1:4]) as other, ThreadPoolExecutor() as pool:
        assert other.acquire(THEIRS) is None
        builds = TrainEngine(policy())
        refused = [
            pool.submit(trainer.cuda),
            pool.submit(rollout.cuda),
            pool.submit(builds.build, devices=devices[3:4]),
        ]
        for future in refused:
            with pytest.raises(DeviceBusyError, match=f"pid {other.pid} of job another user's program"):
                future.result(timeout=WAIT_S)
        assert holders(devices[1:4]) == dict.fromkeys([1, 2, 3], THEIRS)
        other.ask("release")
        trainer.cuda()
        rollout.cuda()
        assert trainer.count([[1], [2]]) == 4
        assert len(rollout.generate([[3]], {"max_tokens": 2})) == 1
        for gone in (rollout.close, trainer.cpu):
            assert "DeviceBusyError" in other.acquire(THEIRS)
            gone()
        assert other.acquire(THEIRS) is None
    trainer.cuda()
