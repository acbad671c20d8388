"""What `rlix doctor` finds wrong."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlix.cli.doctor import of_the_pool, problems
from rlix.cli.main import app
from rlix.node.host import Host, Software
from rlix.protocol.messages import Device, DeviceKind

SOFTWARE = Software({"RLix": "1 (aa)", "Python": "3.11.2", "the interpreter": "/usr/bin/python3"})
FIRST = Host("a", "10.0.0.1", "node1", ("127.0.1.1",), SOFTWARE, "/tmp/rlix-devices", (64 * 2**30, 60 * 2**30))
SECOND = replace(FIRST, node_id="b", address="10.0.0.2", name="node2")
TOKEN = "/runs/.rlix-1"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"unseen": (TOKEN, "/models/a")}, ["does not see /runs, which", "does not see /models/a"]),
        ({"unreached": ("10.0.0.1",)}, ["node2 (10.0.0.2) does not reach node1 (10.0.0.1)"]),
        ({"memory": (64 * 2**20, 2**20)}, ["node2 (10.0.0.2): /dev/shm has 0.1 GiB"]),
        ({"locks": "/locks"}, ["keeps device locks in /locks, node1 in /tmp/rlix-devices (RLIX_LOCK_DIR)"]),
    ],
)
def test_what_is_wrong_with_a_host(changes: dict[str, object], said: list[str]) -> None:
    second = replace(SECOND, **changes)  # type: ignore[arg-type]
    found = problems(second, (FIRST, second), {TOKEN: "/runs, which node1 sees"})
    assert len(found) == len(said)
    for line, part in zip(found, said, strict=True):
        assert part in line
    assert problems(FIRST, (FIRST, second), {}) == []


def test_a_pool_without_gpus_is_told_how_its_nodes_are_started() -> None:
    (said,) = of_the_pool(())
    assert said.startswith(
        "the pool has no GPUs: start its nodes with GPUs, or with virtual ones: ray start --num-gpus"
    )
    assert of_the_pool((Device(0, "a", "10.0.0.1", 0, DeviceKind.CPU),)) == []


def test_without_a_control_plane_it_is_about_this_host(tmp_path: Path, rlix_home: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--runs-dir", str(tmp_path / "runs")])
    assert "no control plane runs here" in done.output
    assert "on 1 host" in done.output
    assert f"torch {version('torch')}" in done.output
    assert "GiB free on the disk of" in done.output
    assert list((tmp_path / "runs").iterdir()) == []
    missing = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), "--runs-dir", str(tmp_path)])
    assert missing.exit_code == 1
