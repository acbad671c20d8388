"""Starting and ending the control plane, each in a process of its own: a process has one Ray at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.ray


def run(program: str, home: Path) -> Any:
    """Runs a Python program with an isolated home; returns what its last line holds, as JSON."""
    environment = {"RLIX_HOME": str(home), "RAY_ADDRESS": "local", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    path = home / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


START_AND_STOP = """
import json, psutil, ray, rlix
from rlix.protocol.types import Phase

orchestrator = rlix.init(virtual_gpus=3, log_level="ERROR")
assert rlix.init(log_level="ERROR")._actor_id == orchestrator._actor_id
job = ray.get(orchestrator.allocate_pipeline_id.remote("ft"))
ray.get(orchestrator.register_pipeline.remote(
    pipeline_id=job, ray_namespace="n", cluster_tp_configs={"critic": 1}, cluster_device_mappings={"critic": [2]}))
ray.get(orchestrator.admit_pipeline.remote(pipeline_id=job))
rlix.JobClient(job).acquire("critic", Phase.CRITIC_TRAINING, 10)
children = psutil.Process().children(recursive=True)
listening = sorted({c.laddr.ip for p in children for c in p.net_connections() if c.status == psutil.CONN_LISTEN})
devices = len(ray.get(orchestrator.devices.remote()))
rlix.shutdown()
rlix.shutdown()
print(json.dumps({
    "devices": devices, "listening": listening, "pids": [p.pid for p in children],
    "left": [p.pid for p in psutil.Process().children(recursive=True)],
}))
"""


def test_ray_is_started_on_loopback_and_ended_without_a_trace(tmp_path: Path) -> None:
    got = run(START_AND_STOP, tmp_path)
    assert got["devices"] == 3
    assert {address.removeprefix("::ffff:") for address in got["listening"]} == {"127.0.0.1"}
    assert got["left"] == []
    assert len(got["pids"]) > 5
    assert not any(psutil.pid_exists(pid) for pid in got["pids"])
    assert len(list(tmp_path.glob("journal-*.db"))) == 1


TWO_NODES = """
import json, ray, rlix
from ray.cluster_utils import Cluster

virtual = {"rlix_virtual": 1}
small = {"include_dashboard": False, "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 2, "resources": virtual, **small})
cluster.add_node(num_cpus=1, num_gpus=3, resources=virtual, object_store_memory=100_000_000)
cluster.wait_for_nodes()
try:
    try:
        rlix.init(address=cluster.address, create_if_missing=False)
    except rlix.protocol.errors.RlixError as error:
        missing = str(error)
    orchestrator = rlix.init(address=cluster.address, log_level="ERROR")
    devices = ray.get(orchestrator.devices.remote())
    head = next(n["NodeID"] for n in ray.nodes() if "node:__internal_head__" in n["Resources"])
    job = ray.get(orchestrator.allocate_pipeline_id.remote("ft"))
    try:
        ray.get(orchestrator.register_pipeline.remote(
            pipeline_id=job, ray_namespace="n", cluster_tp_configs={"actor_infer": 2},
            cluster_device_mappings={"actor_infer": [1, 2]}))
    except rlix.protocol.errors.SpecError as error:
        spread = str(error)
    rlix.shutdown()
    alive = ray.is_initialized() and len(ray.nodes())
    print(json.dumps({
        "devices": [[d.id, d.index, d.kind, d.node_id == head] for d in devices], "spread": spread, "alive": alive,
        "missing": missing, "actors": ray.util.list_named_actors(all_namespaces=True),
    }))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_nodes_may_differ_and_an_attached_ray_outlives_the_control_plane(tmp_path: Path) -> None:
    got = run(TWO_NODES, tmp_path)
    assert got["devices"] == [
        [0, 0, "cpu", True],
        [1, 1, "cpu", True],
        [2, 0, "cpu", False],
        [3, 1, "cpu", False],
        [4, 2, "cpu", False],
    ]
    assert "spread over 2 nodes although 2 devices fit in one" in got["spread"]
    assert "no control plane in this Ray cluster" in got["missing"]
    assert got["alive"] == 2
    assert got["actors"] == []


def test_the_control_plane_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import json, sys, rlix, rlix.control.init, rlix.control.client\n"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    assert run(program, tmp_path) == []
