"""Starting and ending the control plane, each in a process of its own: a process has one Ray at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlix.control.daemon import Idle
from rlix.control.ray_processes import is_ray
from tests.waiting import PROGRAM_S

pytestmark = pytest.mark.ray


def run(program: str, home: Path, timeout_s: float = PROGRAM_S, **variables: str) -> Any:
    """Runs a Python program with an isolated home; returns what its last line holds, as JSON."""
    environment = {"RLIX_HOME": str(home), "PYTHONPATH": ":".join(p for p in sys.path if p), **variables}
    path = home / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOCAL = {"RAY_ADDRESS": "local"}

START_AND_STOP = """
import json, os, psutil, ray, rlix
from ray._private.node import Node
from rlix.node.device_lock import DeviceLocks, lock_directory, lock_path
from rlix.protocol.types import Phase

directory = lock_directory()
directory.mkdir(parents=True, exist_ok=True)
forgotten = lock_path(directory, "virtual-abandoned-0")
forgotten.touch()
os.utime(forgotten, (0, 0))
starts, late = Node.start_ray_processes, []
def first_is_late(node):
    starts(node)
    if not late:
        late.extend(psutil.Process().children(recursive=True))
        raise Exception("The current node timed out during startup.")
Node.start_ray_processes = first_is_late
orchestrator = rlix.init(virtual_gpus=3, log_level="ERROR")
assert late and not any(process.is_running() for process in late)
assert rlix.init(log_level="ERROR")._actor_id == orchestrator._actor_id
job = ray.get(orchestrator.allocate_pipeline_id.remote("ft"))
ray.get(orchestrator.register_pipeline.remote(
    pipeline_id=job, ray_namespace="n", cluster_tp_configs={"critic": 1}, cluster_device_mappings={"critic": [2]}))
ray.get(orchestrator.admit_pipeline.remote(pipeline_id=job))
client = rlix.JobClient(job)
lease = client.acquire("critic", Phase.CRITIC_TRAINING, 300)
locks = DeviceLocks([client.devices()[2].key])
locks.acquire(client.fence(lease), 300)
locks.release()
used = [path.name for path in directory.glob("virtual-*.lock")]
children = psutil.Process().children(recursive=True)
listening = sorted({c.laddr.ip for p in children for c in p.net_connections() if c.status == psutil.CONN_LISTEN})
devices = len(ray.get(orchestrator.devices.remote()))
control = [ray.get(ray.get_actor(name, "rlix").process.remote()).pid for name in (
    "rlix:scheduler", "rlix:orchestrator", "rlix:resource_manager")]
scores = [int(open(f"/proc/{pid}/oom_score_adj").read()) for pid in control]
rlix.shutdown()
rlix.shutdown()
print(json.dumps({
    "scores": scores, "devices": devices, "listening": listening, "pids": [p.pid for p in children],
    "left": [p.pid for p in psutil.Process().children(recursive=True)], "used": used,
    "locks": [path.name for path in directory.glob("virtual-*.lock")],
}))
"""


def test_ray_is_started_on_loopback_and_ended_without_a_trace(tmp_path: Path) -> None:
    # By Ray's rules a machine whose memory is that full first loses what Ray can start again: the control plane.
    full = {"RAY_memory_usage_threshold": "0.001"}
    got = run(START_AND_STOP, tmp_path, **LOCAL, **full, RLIX_LOCK_DIR=str(tmp_path / "locks"))
    assert got["scores"] == [0, 0, 0]
    assert got["devices"] == 3
    assert {address.removeprefix("::ffff:") for address in got["listening"]} == {"127.0.0.1"}
    assert got["left"] == []
    assert len(got["pids"]) > 5
    assert not any(psutil.pid_exists(pid) for pid in got["pids"])
    assert len(list(tmp_path.glob("journal-*.db"))) == 1
    assert len(got["used"]) == 1
    assert got["locks"] == []


TWO_NODES = """
import json, ray, rlix
from ray.cluster_utils import Cluster
from rlix.protocol.types import Phase
from tests.raylets import started
from tests.waiting import until

virtual = {"rlix_virtual": 1}
small = {"include_dashboard": False, "object_store_memory": 100_000_000}
head = {"num_cpus": 8, "num_gpus": 2, "resources": virtual, **small}
cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
try:
    add = lambda gpus: cluster.add_node(
        num_cpus=1, num_gpus=gpus, resources=virtual, object_store_memory=100_000_000)
    other = started(lambda: add(3))
    cluster.wait_for_nodes(timeout=300)
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
    ray.get(orchestrator.register_pipeline.remote(
        pipeline_id=job, ray_namespace="n", cluster_tp_configs={"left": 1, "right": 1},
        cluster_device_mappings={"left": [0], "right": [4]}))
    ray.get(orchestrator.admit_pipeline.remote(job))
    client = rlix.JobClient(job)
    stays, goes = (client.acquire(name, Phase.ACTOR_TRAINING, 300) for name in ("left", "right"))
    cluster.remove_node(other)
    ids = lambda: [d.id for d in ray.get(orchestrator.devices.remote())]
    until(lambda: ids() == [0, 1], "the node never left")
    until(lambda: [s.lease.epoch for s in client.leases()] == [stays.epoch], "the lease there never ended")
    lost = str(client.lease_log()[-1].reason)
    started(lambda: add(2))
    until(lambda: ids() == [0, 1, 5, 6], "the new node never came")
    client.release(stays)
    rlix.shutdown()
    alive = ray.is_initialized() and sum(node["Alive"] for node in ray.nodes())
    print(json.dumps({
        "devices": [[d.id, d.index, d.kind, d.node_id == head] for d in devices], "spread": spread, "alive": alive,
        "missing": missing, "lost": lost, "actors": ray.util.list_named_actors(all_namespaces=True),
    }))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_nodes_differ_come_and_go_and_an_attached_ray_outlives_the_control_plane(tmp_path: Path) -> None:
    got = run(TWO_NODES, tmp_path, **LOCAL)
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
    assert got["lost"] == "node lost"
    assert got["actors"] == []


DAEMON = """
import json, os, pathlib, signal, psutil, ray, rlix
from rlix.control.announcement import await_end, find_or_start_daemon, is_claimed, read_announcement
from rlix.control.daemon import other_programs
from rlix.control.init import check_size, detach

home = pathlib.Path(os.environ["RLIX_HOME"])
first, started = find_or_start_daemon(home, 3)
again, started_again = find_or_start_daemon(home, 5)
assert (first, started, started_again) == (again, True, False)
process = psutil.Process(first.pid)
agents = "ray::DashboardAgent", "ray::RuntimeEnvAgent"  # take a minute to notice that they lost a raylet to SIGKILL
tree = [p for p in [process, *process.children(recursive=True)] if p.cmdline()[:1][0] not in agents]
orchestrator = rlix.init(log_level="ERROR")
devices = len(ray.get(orchestrator.devices.remote()))
attached = other_programs()
try:
    check_size(first, 4, "virtual_gpus")
except rlix.protocol.errors.SpecError as error:
    refused = str(error)
detach()
os.kill(first.pid, signal.SIGKILL)
await_end(home, 300)
_, alive = psutil.wait_procs(tree, timeout=300)
print(json.dumps({
    "devices": devices, "attached": attached == [first.pid], "refused": refused, "session": os.getsid(0) == first.pid,
    "alive": [p.pid for p in alive if p.status() != "zombie"], "found": read_announcement(home) is not None,
    "files": sorted(path.name for path in home.glob("daemon.*")),
}))
"""


@pytest.mark.slow
def test_a_daemon_is_found_by_its_home_and_a_killed_one_leaves_no_process(tmp_path: Path) -> None:
    """What one leaves that was told to end, or had nothing to do, is in `tests/cli/test_shared.py`."""
    got = run(DAEMON, tmp_path, RLIX_IDLE_S="60")
    assert got["devices"] == 3
    assert got["attached"]
    assert not got["session"]
    assert "and has 3 virtual GPUs; leave that out" in got["refused"]
    assert got["alive"] == []
    assert not got["found"]  # what a killed one has left deceives nobody
    assert got["files"] == ["daemon.json", "daemon.lock", "daemon.token"]


def test_a_daemon_waits_longer_for_its_first_visitor_than_between_visits() -> None:
    idle = Idle(idle_s=5.0, now=100.0)
    assert not idle.over(busy=False, visited=False, now=159.0)
    assert idle.over(busy=False, visited=False, now=160.0)
    assert not idle.over(busy=True, visited=True, now=161.0)
    assert not idle.over(busy=False, visited=True, now=165.9)
    assert idle.over(busy=False, visited=True, now=166.0)


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    program = (
        "import json, os, pathlib\n"
        "from rlix.control.announcement import find_or_start_daemon\n"
        "from rlix.protocol.errors import RlixError\n"
        "home = pathlib.Path(os.environ['RLIX_HOME'])\n"
        "try: find_or_start_daemon(home, 1)\n"
        "except RlixError as error: print(json.dumps(str(error)))"
    )
    message = run(program, tmp_path, RLIX_POLICY="fair")
    assert "the control plane did not start" in message
    assert "RLIX_POLICY='fair' must be one of" in message


def test_the_control_plane_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import json, sys, rlix, rlix.control.init, rlix.control.client\n"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    assert run(program, tmp_path) == []


def test_a_child_of_the_program_is_none_of_rays_though_its_command_line_names_a_folder_of_that_name() -> None:
    command = [sys.executable, "-c", "input()", "/data/ray/files"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            assert not is_ray(psutil.Process(child.pid))
        finally:
            child.kill()
