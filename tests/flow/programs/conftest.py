"""What tests of flows without Ray start with."""

from collections.abc import Sequence

import pytest
import ray

from rlix.flow.profiler import measure as measure_module
from rlix.flow.programs import running as running_module
from rlix.flow.programs.wiring import Part
from rlix.protocol.messages import Device
from tests.flow.programs.pretended import Group


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(part: Part, ranks: int, _: Sequence[Device], first: int = 0, name: str = "", **__: float) -> Group:
        return Group(part, ranks, first, name)

    for module in (running_module, measure_module):
        monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
