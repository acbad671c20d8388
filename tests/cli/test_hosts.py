"""Jobs over three hosts that share nothing but a network, and one folder where a test says so."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts import OWN, SHARED, Hosts, why_not
from tests.waiting import HANG_S, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
CUT_S = 20.0
ADDRESS = {"RAY_ADDRESS": "10.77.0.1:6379"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two virtual GPUs on each: 0 and 1 on the head, which is node1, 2 and 3 on node2, 4 and 5 on node3."""
    with Hosts(tmp_path_factory.mktemp("hosts"), 3, ADDRESS) as made:
        for number in (1, 2, 3):
            made.start_ray(number, gpus=2)
        yield made


def spec(hosts: Hosts, name: str, devices: list[int], **changes: Any) -> str:
    """A job's file on all hosts."""
    values = {
        "name": name,
        "steps": 2,
        "source": {"task": {"name": "sort_digits", "options": {"digits": 2}}},
        "model": {"kind": "tiny", "hidden_size": 16, "layers": 1, "heads": 2},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 3, "executor": "transformers"},
        "algorithm": {"name": "grpo"},
        "optimizer": {"learning_rate": 5e-4},
        "checkpoint": {"every": 1},
        "clusters": {"actor_train": {"devices": devices}, "actor_infer": {"devices": devices}},
        **changes,
    }
    (hosts.shared / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return str(SHARED / f"{name}.yaml")


def test_a_run_folder_that_a_host_does_not_see_is_refused_before_the_job_begins(hosts: Hosts) -> None:
    job = spec(hosts, "alone", [1, 3])
    code, said = hosts.attempt(1, "rlix", "run", job, "--runs-dir", str(OWN / "runs"), "--no-live")
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("rlix:")]
    assert f"rlix: alone: host node2 (10.77.0.2) does not see {OWN}/runs, where the run folder is on host node1" in line
    assert not (hosts[1].disk / "runs" / "alone").exists()
    code, said = hosts.attempt(1, "rlix", "doctor", "--runs-dir", str(OWN / "runs"))
    assert code == 1, said
    for host in (2, 3):
        assert f"! node{host} (10.77.0.{host}) does not see {OWN}/runs, which node1 sees" in said
    assert "does not reach" not in said


def test_a_job_over_two_hosts_has_all_parts_of_its_checkpoints_and_goes_on_from_them(hosts: Hosts) -> None:
    """Their own names are 127.0.1.1 for each, so ranks find each other by the addresses that Ray knows."""
    run = "rlix", "run", spec(hosts, "both", [1, 3]), "--runs-dir", str(SHARED / "runs"), "--no-live", "--json"
    (first,) = json.loads(hosts.run(1, *run))["jobs"]
    assert (first["state"], first["steps"]) == ("finished", 2)
    checkpoint = hosts.shared / "runs" / "both" / "checkpoints" / "step_2"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for rank in (0, 1):
        assert f"state/rng_{rank}.json" in files
        assert f"state/shard-0000{rank + 1}-model-00001-of-00001.safetensors" in files
    spec(hosts, "both", [1, 3], steps=3)
    (second,) = json.loads(hosts.run(1, *run, "--resume"))["jobs"]
    assert (second["state"], second["steps"]) == ("finished", 3)
    done = (hosts.shared / "runs" / "both" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in done] == [0, 1, 2]


def test_jobs_outlive_that_hosts_cannot_reach_each_other_for_a_while(hosts: Hosts, tmp_path: Path) -> None:
    """The head's, that of another job's process, and a third one's, each of which has a job of its own."""
    pipeline = {"pipeline": "tests.pipeline.stepping_pipeline:PatientPipeline", "steps": 3}
    devices = {"on1": 0, "on2": 2, "on3": 4}
    jobs = [spec(hosts, name, [device], **pipeline) for name, device in devices.items()]
    runs = hosts.shared / "runs"
    running = hosts.start(
        1, "rlix", "run", *jobs, "--runs-dir", str(SHARED / "runs"), "--no-live", output=tmp_path / "said"
    )
    try:
        until(lambda: all((runs / f"began_{name}_1").exists() for name in devices), "the second steps never began")
        assert [(runs / f"began_{name}_1").read_text() for name in devices] == ["node1", "node2", "node3"]
        for number in (1, 2):
            hosts.cut(number)
        time.sleep(CUT_S)  # what is tested is time: connections are reset after some
        for number in (1, 2):
            hosts.heal(number)
        (runs / "go").touch()
        assert running.wait(HANG_S) == 0, (tmp_path / "said").read_text()
    finally:
        if running.poll() is None:  # the pool is the other tests', too
            for number in (1, 2):
                hosts.heal(number)
            hosts.attempt(1, "rlix", "stop", *devices)
            running.kill()
    for name in devices:
        events = [json.loads(line) for line in (runs / name / "events.jsonl").read_text().splitlines()]
        said = [event["event"] for event in events if event["type"] == "job"]
        assert said == ["started", "first_step", "finished"], name


def test_what_a_host_that_ray_drains_has_free_leaves_the_pool(hosts: Hosts) -> None:
    node = hosts.run(1, "python", "-c", NODE_ID).split()[-1]
    drain = "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"
    hosts.run(1, "ray", "drain-node", "--node-id", node, *drain, "--deadline-remaining-seconds", "600")
    said = ""

    def gone() -> bool:
        nonlocal said
        said = hosts.run(1, "rlix", "status")
        return "host node3 (10.77.0.3) is cordoned" in said and "10.77.0.3   free" not in said

    until(gone, lambda: said)
    assert "4 devices" in said


NODE_ID = """
import ray
ray.init(address="10.77.0.1:6379", logging_level="ERROR")
print(next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == "10.77.0.3"))
"""
