"""A flow over two raylets of this machine, each with a store of objects of its own."""

from pathlib import Path

import pytest

from tests.control.test_lifecycle import LOCAL, run

pytestmark = [pytest.mark.ray]

TWO_NODES = """
import json, ray, rlix, time
from rlix.engine.placement import pool_devices
from rlix.flow import Running
from tests.flow.programs.test_running import FLOW, profile
from tests.raylets import two_raylets

got = {}
with two_raylets(2) as address:
    rlix.init(address=address, log_level="ERROR")
    while len(devices := pool_devices()) < 4:  # on busy cores the second node's come late
        time.sleep(0.05)
    got["first node"] = [device.node_id == devices[0].node_id for device in devices]
    with Running(FLOW, devices[1:3], plan="disaggregated", profile=profile(40.0, 0.1)) as running:
        got["stages"] = len(running.plan.segments[0].stages)
        got["step"] = running.step(list(range(12)))
    rlix.shutdown()
    print(json.dumps(got))
"""


def test_two_nodes(tmp_path: Path) -> None:
    got = run(TWO_NODES, tmp_path, **LOCAL, RLIX_LOCK_DIR=str(tmp_path / "locks"))
    assert got == {
        "first node": [True, True, False, False],
        "stages": 2,
        "step": [number + 11 for number in range(12)],
    }
