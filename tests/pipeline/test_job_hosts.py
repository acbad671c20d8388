"""Where a job's own process is, and which files of a spec its hosts must see."""

from pathlib import Path

from rlix.pipeline.jobs.hosts import _files, home, nodes_of
from rlix.protocol.messages import Cluster, Device, DeviceKind, Registration

DEVICES = {i: Device(i, f"node{i // 2}", f"10.0.0.{i // 2}", i % 2, DeviceKind.CPU) for i in range(6)}
ROLLOUT = Cluster("actor_infer", 1, (0, 1, 2, 3), elastic=True)


def registered(*clusters: Cluster) -> Registration:
    return Registration("ft_1", "ns", clusters)


def test_a_job_is_where_its_first_rank_is() -> None:
    gangs = Cluster("actor_train", 1, (2, 4)), Cluster("critic", 1, (5,))
    assert home(registered(ROLLOUT, *gangs), DEVICES) == "node1"
    assert home(registered(ROLLOUT), DEVICES) is None
    assert home(registered(Cluster("actor_train", 1, (9,))), DEVICES) is None  # whose host has left
    assert nodes_of(registered(ROLLOUT, *gangs), DEVICES) == {"node0", "node1", "node2"}


def test_files_that_a_spec_names(tmp_path: Path) -> None:
    data, code = tmp_path / "rows.jsonl", tmp_path / "own.py"
    data.touch()
    code.touch()
    spec = {
        "name": "job",
        "source": {"data": {"mix": [{"path": str(data)}, {"path": str(tmp_path / "not there")}]}},
        "rewards": (f"{code}:reward", "package.module:reward"),
        "steps": 3,
    }
    assert list(_files(spec)) == [str(data), str(code)]
