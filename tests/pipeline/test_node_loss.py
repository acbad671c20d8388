"""What becomes of a launched job when a node leaves, on two raylets of this machine."""

from pathlib import Path

import pytest

from tests.control.test_lifecycle import LOCAL, run

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NODE_LEAVES = """
import json, pathlib, ray, rlix
from ray.cluster_utils import Cluster
from rlix.pipeline.jobs.launch import launch
from tests.pipeline.training_jobs import small
from tests.raylets import started
from tests.waiting import until

runs = pathlib.Path(__file__).parent / "runs"
virtual = {"rlix_virtual": 1}
store = {"object_store_memory": 100_000_000}
fast = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
head = {"num_cpus": 8, "num_gpus": 2, "resources": virtual, "include_dashboard": False, "_system_config": fast, **store}
cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
try:
    orchestrator = rlix.init(address=cluster.address, log_level="ERROR")
    neighbour = ray.get(orchestrator.allocate_pipeline_id.remote("ft"))
    ray.get(orchestrator.register_pipeline.remote(  # so that a job by size is placed on the other node
        pipeline_id=neighbour, ray_namespace="n", cluster_tp_configs={"critic": 1},
        cluster_device_mappings={"critic": [0, 1]}))
    other = started(lambda: cluster.add_node(num_cpus=8, num_gpus=2, resources=virtual, **store))
    until(lambda: len(ray.get(orchestrator.devices.remote())) == 4, "the other node never came")
    spec = small(
        pipeline="tests.pipeline.stepping_pipeline:SteppingPipeline", name="steps", checkpoint={"every": 1},
        clusters={"actor_train": {"gpus": 2}, "actor_infer": {"devices": [0, 1]}})
    job = launch([spec], runs)[0]
    first = job.pipeline_id
    until((runs / "where_2").exists, "the third step never began")
    cluster.remove_node(other)
    until(lambda: len(ray.get(orchestrator.devices.remote())) == 2, "the other node never left")
    (runs / "go").touch()
    status = job.wait(300)
    jobs = [json.loads(line) for line in (runs / "steps" / "events.jsonl").read_text().splitlines()]
    print(json.dumps({
        "state": status.state, "error": status.error, "resumes": status.resumes, "renamed": job.pipeline_id != first,
        "log": [[e["event"], e["detail"]] for e in jobs if e["type"] == "job"], "lost": other.node_id,
        "where": [path.read_text() == other.node_id for path in sorted(runs.glob("where_*"))],
        "steps": [json.loads(line)["step"] for line in (runs / "steps" / "metrics.jsonl").read_text().splitlines()],
    }))
    rlix.shutdown()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_a_job_whose_node_leaves_goes_on_from_its_checkpoint_elsewhere(tmp_path: Path) -> None:
    got = run(NODE_LEAVES, tmp_path, **LOCAL)
    assert got["state"] == "finished", got["error"]
    assert got["resumes"] == 1
    assert got["renamed"]
    assert got["where"] == [True, True, False, False]
    assert got["steps"] == [0, 1, 2, 3]
    again = ["started", f"node {got['lost']} left"]
    # Whether it could say that it failed depends on where its own process was.
    said = [event for event in got["log"] if event[0] != "failed"]
    assert said == [["started", None], ["first_step", None], again, ["first_step", None], ["finished", None]]
