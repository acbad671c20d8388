"""How engines follow leases to other devices, with engines that are not there."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlix.engine.declared import AS_IT_IS, DeclaredSpeed
from rlix.engine.life_cycle import Residency
from rlix.node.process import this_process
from rlix.pipeline.base import Pipeline
from rlix.pipeline.jobs.hosts import nodes_of
from rlix.pipeline.jobs.register import register
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.places import Places
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import WorkerError
from rlix.protocol.messages import Cluster, Device, DeviceKind, Fence, Lease, Registration
from rlix.protocol.types import Phase

DEVICES = {number: Device(number, f"node{number // 2}", "", number % 2, DeviceKind.CPU) for number in range(6)}
MOVES, STAYS = Cluster("actor_train", 1, (0, 1), ((2, 3), (4, 5))), Cluster("critic", 1, (0, 1))
REGISTRATION = Registration("ft_1", "ns", (MOVES, STAYS))


def at(*numbers: int) -> tuple[Device, ...]:
    return tuple(DEVICES[number] for number in numbers)


class Engine:
    """It cannot go to the devices of `broken`, and after `lost` has nothing left."""

    def __init__(self, *broken: int, lost: bool = False) -> None:
        self.devices, self.residency = at(0, 1), Residency.HOST
        self.broken, self.lost, self.done = at(*broken), lost, list[Any]()

    def acquire(self, lease: Fence | int, devices: tuple[Device, ...] | None = None) -> None:
        if devices is not None and devices == self.broken:
            self.residency = Residency.META if self.lost else Residency.HOST
            raise WorkerError("rank 1 died")
        self.devices = devices or self.devices
        self.done.append(tuple(device.id for device in self.devices))

    def release(self, epoch: int) -> None:
        self.done.append("released")


def places(speed: DeclaredSpeed = AS_IT_IS) -> Places:
    return Places("job", REGISTRATION, speed)


def test_it_is_asked_for_where_its_state_lies_with_what_the_last_moves_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 10.0, 12.0])
    monkeypatch.setattr("rlix.pipeline.places.time.monotonic", lambda: next(clock))
    engine, there = Engine(), places()
    assert there.asking("actor_train", None) == there.asking("critic", engine) == {}
    assert there.asking("actor_train", engine) == {"home": (0, 1), "move_s": 0.0}
    fence = Fence("pool", 1)
    assert there.bring("actor_train", engine, fence, at(2, 3))
    assert there.asking("actor_train", engine) == {"home": (2, 3), "move_s": 4.0}
    assert there.bring("actor_train", engine, fence, at(2, 3))  # it is there
    assert there.bring("actor_train", engine, fence, at(4, 5))
    assert there.asking("actor_train", engine) == {"home": (4, 5), "move_s": 3.0}
    assert there.bring("critic", engine, fence, at(0, 1))  # which has only these, wherever its engine says it is
    assert engine.done == [(2, 3), (2, 3), (4, 5), (4, 5)]


def test_what_could_not_move_stays_and_what_lost_its_state_says_so() -> None:
    engine, there = Engine(2, 3), places()
    assert not there.bring("actor_train", engine, Fence("pool", 1), at(2, 3))
    assert there.asking("actor_train", engine) == {"devices": (0, 1)}
    with pytest.raises(WorkerError, match="died"):
        places().bring("actor_train", Engine(2, 3, lost=True), Fence("pool", 1), at(2, 3))


class OnePhase(Pipeline):
    def setup(self) -> None: ...

    def step(self, step: int) -> dict[str, float]:
        with self.phase("actor_train", Phase.ACTOR_TRAINING, self.engine) as lease:  # type: ignore[attr-defined]
            return {"reward": float(lease.devices[0])}


def test_a_phase_whose_move_fails_is_done_where_the_state_is(tmp_path: Path) -> None:
    """The lease of the devices that it could not get to is given back, and it asks for its own."""
    asked: list[dict[str, Any]] = []
    ended: list[tuple[int, ...]] = []

    @contextmanager
    def granted(cluster: str, phase: Phase, **how: Any) -> Any:
        asked.append(how)
        devices = how.get("devices") or (2, 3)
        yield Lease(len(asked), "ft_1", cluster, phase, devices)
        ended.append(devices)

    client: Any = MagicMock()
    client.phase.side_effect = granted
    client.registration.return_value = REGISTRATION
    client.devices.return_value = DEVICES
    job = OnePhase("ft_1", JobConfig(load_job("copy_digits").model_copy(update={"steps": 2}), tmp_path / "job"), client)
    job.engine = engine = Engine(2, 3)  # type: ignore[attr-defined]
    assert job.run().state == "finished"
    where = [(how.get("home"), how.get("devices")) for how in asked]
    assert where == [((0, 1), None), (None, (0, 1)), (None, (0, 1))]
    assert ended == [(2, 3), (0, 1), (0, 1)]
    assert engine.done == [(0, 1), "released"] * 2


def job_with(**cluster: Any) -> JobSpec:
    data = load_job("copy_digits").model_dump(mode="json", exclude_none=True)
    data["clusters"]["actor_train"] = {"gpus": 2, **cluster}
    return JobSpec.model_validate(data)


def test_a_job_says_whether_its_gangs_may_go_elsewhere() -> None:
    def declared(spec: JobSpec) -> Any:
        orchestrator = MagicMock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlix.pipeline.jobs.register.get", lambda *_, **__: "ft_1")
            patch.setattr("rlix.pipeline.jobs.register.ray", MagicMock())
            register(spec, orchestrator)
        launcher = orchestrator.register_pipeline.remote.call_args.kwargs["launcher"]
        assert launcher == this_process(launcher.node_id)
        return orchestrator.register_pipeline.remote.call_args.kwargs["cluster_device_alternatives"]

    assert declared(job_with()) == {"actor_train": []}  # an empty list: it stays
    assert declared(job_with(moves=True)) == {}
    assert "moves: true" in job_with(moves=True).to_yaml()
    assert nodes_of(REGISTRATION, DEVICES) == {"node0", "node1", "node2"}


@pytest.mark.parametrize(
    ("example", "clusters", "message"),
    [
        (
            "copy_digits",
            {"actor_train": {"devices": [0, 1], "moves": True}},
            "write 'gpus: 2' in place of 'devices'",
        ),
        ("multi_lora", {"actor_train": {"gpus": 2, "moves": True}}, "replicas would load the model anew"),
    ],
)
def test_what_cannot_move_is_refused(example: str, clusters: dict[str, Any], message: str) -> None:
    data = load_job(example).model_dump(mode="json", exclude_none=True)
    with pytest.raises(ValueError, match=message):
        JobSpec.model_validate(data | {"clusters": clusters})
