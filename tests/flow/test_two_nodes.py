"""Messages, a channel and a flow over two raylets of this machine, each with a store of objects of its own."""

from pathlib import Path

import pytest

from tests.control.test_lifecycle import LOCAL, run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TWO_NODES = """
import json, ray, rlix
from rlix.engine.placement import pool_devices
from rlix.flow import Channel, Running, launch
from rlix.protocol.errors import WorkerError
from tests.flow.messages.test_messages import Talker
from tests.flow.workers import EchoWorker
from tests.flow.programs.test_running import FLOW, profile
from tests.raylets import two_raylets

def error(call):
    try:
        call.wait(timeout_s=60)
    except WorkerError as error:
        return str(error)

got = {}
with two_raylets(2) as address:
    rlix.init(address=address, log_level="ERROR")
    devices = pool_devices()
    got["first node"] = [device.node_id == devices[0].node_id for device in devices]
    with launch(Talker, "0-3", devices, name="team") as team:
        both = team.on(0).exchange("team:2", 2), team.on(2).exchange("team:0", 2)
        got["exchanged"] = [call.wait()[0] for call in both]
        team.on(0).tell(["team:1", "team:2", "team:3"]).wait()
        got["told"] = team.on(1, 2, 3).hear("team:0").wait()
        for rank, rows in enumerate([[0, 1, 2, 3], [], [4, 5], [6]]):
            team.on(rank).give(team.addresses, rows)
        got["batch"] = [rows for rows, texts in team.get(team.addresses).wait()]
        team.on(3).tell(["team:1"]).wait()
        team.workers.kill(3)
        got["sent before"] = team.on(1).hear("team:3").wait()
        got["errors"] = [error(team.on(1).hear("team:3")), error(team.on(0).tell(["team:3"]))]
    with launch(EchoWorker, "1-2", devices, name="streams") as streams:
        channel = Channel(4)
        producers = [channel.producer() for _ in range(2)]
        made = [streams.on(rank).produce(producer, 5) for rank, producer in enumerate(producers)]
        got["taken"] = sum(streams.consume(channel).wait(), [])
    with Running(FLOW, devices[1:3], plan="disaggregated", profile=profile(40.0, 0.1)) as running:
        got["stages"] = len(running.plan.segments[0].stages)
        got["step"] = running.step(list(range(12)))
    rlix.shutdown()
    print(json.dumps(got))
"""


def test_two_nodes(tmp_path: Path) -> None:
    got = run(TWO_NODES, tmp_path, timeout_s=280.0, **LOCAL, RLIX_LOCK_DIR=str(tmp_path / "locks"))
    for error in got.pop("errors"):
        assert "team:3, at the other end of a message, has died" in error
    assert sorted(got.pop("taken")) == [[rank, number] for rank in range(2) for number in range(5)]
    total = sum(range(100_000))
    assert got == {
        "first node": [True, True, False, False],
        "exchanged": [["beside", [other, 0, 1], [other, 1, 1]] for other in (2, 0)],
        "told": [total] * 3,
        "batch": [[0, 1], [2, 3], [4, 5], [6]],
        "sent before": [total],
        "stages": 2,
        "step": [number + 11 for number in range(12)],
    }
