"""TRL scripts in processes of their own, on a real pool: two ranks, plain and attached, and the row in the report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

import rlix
from rlix.monitor.records import load_run
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.model import TinyModel
from tests.control.test_pipelines import ask
from tests.waiting import PROGRAM_S

SCRIPT = Path(__file__).parent / "trl_script.py"


@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_train_the_same_as_a_job_and_are_in_the_report(ray_session: Any, tmp_path: Path) -> None:
    model = write_tiny_model(TinyModel(hidden_size=32), tmp_path / "model", seed=0)
    environment = os.environ | {
        "PYTHONPATH": str(Path(rlix.__file__).parent.parent),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RLIX_RUNS_DIR": str(tmp_path / "runs"),
        "RLIX_JOB": "digits",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run([*command, str(SCRIPT), str(model), str(tmp_path)], env=environment, check=True, timeout=PROGRAM_S)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2
    assert result["attached"] == result["plain"]
    for file in ("model.safetensors", "first/model.safetensors", "other.pt"):
        plain, attached = ((tmp_path / kind / file).read_bytes() for kind in ("plain", "attached"))
        assert plain == attached, file
    record = load_run(tmp_path / "runs" / "digits")
    assert (record.name, record.state, len(record.metrics)) == ("digits", "finished", 2)
    assert {lease.phase for lease in record.leases} >= {"initialization", "value_compute", "actor_training"}
    assert {len(lease.devices) for lease in record.leases} == {2}
    assert "digits" not in [p.name for p in ask(ray_session.status.remote()).pipelines if not p.ending]
