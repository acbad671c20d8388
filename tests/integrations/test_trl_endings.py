"""TRL scripts end in many ways: what they leave, exit codes and tracebacks are those of the script without RLix."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import rlix
from rlix.monitor.records import load_run
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.model import TinyModel
from tests.control.test_pipelines import ask
from tests.waiting import until

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")

SCRIPT = Path(__file__).parent / "trl_endings.py"
CODES = {
    "raises_before": 1, "raises_after": 1, "raises_in_a_callback": 1, "exits": 3, "is_interrupted": 130,
    "is_terminated": -signal.SIGTERM, "leaves_at_once": 4,
}  # fmt: skip
STATES = {
    "raises_before": "failed", "raises_after": "failed", "raises_in_a_callback": "failed", "exits": "failed",
    "is_interrupted": "stopped", "is_terminated": "stopped", "leaves_at_once": "unfinished",
}  # fmt: skip


def last_line(folder: Path) -> str:
    """Of the traceback, if there is one."""
    found: list[str] = re.findall(
        r"^(?:\w+Error: .*|KeyboardInterrupt)$", (folder / "stderr").read_text(), re.MULTILINE
    )
    return found[-1] if found else ""


def same(a: Path, b: Path) -> bool:
    if a.suffix not in (".pt", ".bin", ".pkl"):
        return a.read_bytes() == b.read_bytes()
    left, right = (torch.load(each, weights_only=False) for each in (a, b))
    return a.stat().st_size == b.stat().st_size and str(left) == str(right)


@pytest.mark.ray
@pytest.mark.slow
def test_a_script_ends_as_without_rlix(ray_session: Any, tmp_path: Path) -> None:
    model = write_tiny_model(TinyModel(hidden_size=32), tmp_path / "model", seed=0)
    environment = os.environ | {
        "PYTHONPATH": str(Path(rlix.__file__).parent.parent),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RLIX_RUNS_DIR": str(tmp_path / "runs"),
        "OMP_NUM_THREADS": "1",
    }
    plain, pool = tmp_path / "plain", tmp_path / "pool"
    for kind in (plain, pool):
        command = [sys.executable, str(SCRIPT), str(model), str(tmp_path), kind.name]
        subprocess.run(command, env=environment, check=True)
    codes = json.loads((pool / "ends.json").read_text())
    said = {name: (pool / name / "stderr").read_text() for name in codes}
    assert codes == {name: CODES.get(name, 0) for name in codes}, said
    expected = json.loads((plain / "ends.json").read_text()) | {"is_interrupted": 130}  # a shell says so of SIGINT
    assert codes == expected
    for name in codes:
        assert last_line(pool / name) == last_line(plain / name)
        assert "SIGTERM" not in said[name]
        assert load_run(tmp_path / "runs" / name).state == STATES.get(name, "finished")
    files = sorted(path.relative_to(plain) for path in plain.glob("*/**/*") if path.is_file() and path.name != "stderr")
    assert len(files) == 15
    for file in files:
        assert same(pool / file, plain / file), file

    def left() -> list[str]:
        return [p.name for p in ask(ray_session.status.remote()).pipelines if p.name in codes and not p.ending]

    until(lambda: not left(), lambda: f"{left()} have ended, and are in the pool")
    endings = {ending.job for ending in ask(ray_session.status.remote()).endings}
    assert endings & codes.keys() <= {"leaves_at_once", "is_terminated"}
