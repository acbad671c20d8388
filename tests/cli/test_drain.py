from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from rlix.cli import hosts
from rlix.cli.hosts import host_lines
from rlix.cli.main import app
from rlix.cli.pool import Pool
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import NodeState, NodeStatus
from tests.cli.test_free import Remote

READY = NodeStatus("ab", "node1", "10.0.0.1", NodeState.READY)
DRAINING = NodeStatus("cd", "node2", "10.0.0.2", NodeState.DRAINING, "its devices leave the pool as they become free")


class FakeOrchestrator:
    def __init__(self) -> None:
        self.cordon = Remote((DRAINING,))


@pytest.fixture
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> FakeOrchestrator:
    made = FakeOrchestrator()

    @contextmanager
    def running_pool(_settings: object) -> Iterator[Pool]:
        yield Pool(made, "")

    def get(answer: object, **_: object) -> object:
        if made.cordon.calls[-1][0] == "node9":  # as the resource manager says it
            raise SpecError("node9: no such host; there are: node1 (10.0.0.1, node ab), node2 (10.0.0.2, node cd)")
        return answer

    monkeypatch.setattr(hosts, "running_pool", running_pool)
    monkeypatch.setattr(hosts, "get", get)
    return made


def test_a_host_is_drained_and_brought_back_and_what_it_is_then_is_said(orchestrator: FakeOrchestrator) -> None:
    done = CliRunner().invoke(app, ["drain", "node2"])
    assert done.exit_code == 0
    assert done.output == f"{DRAINING}\n"
    assert CliRunner().invoke(app, ["uncordon", "node2"]).exit_code == 0
    assert orchestrator.cordon.calls == [("node2", True), ("node2", False)]


def test_an_unknown_host_is_a_mistake_of_one_sentence(orchestrator: FakeOrchestrator) -> None:
    done = CliRunner().invoke(app, ["drain", "node9"])
    assert done.exit_code == 2
    assert "node9: no such host; there are: node1 (10.0.0.1, node ab), node2" in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_status_counts_hosts_where_there_are_several_and_names_those_that_are_not_ready() -> None:
    assert host_lines([READY]) == ()
    assert host_lines([DRAINING]) == (str(DRAINING),)
    assert host_lines([READY, DRAINING, READY]) == ("hosts: 2 ready, 1 draining", str(DRAINING))
