"""What tests of flows without Ray start with."""

from collections.abc import Sequence
from typing import Any

import pytest
import ray

from rlix.flow.parts.local import LocalWorker
from rlix.flow.profiler import measure as measure_module
from rlix.flow.programs import running as running_module
from rlix.flow.programs.wiring import Part
from rlix.protocol.messages import Device
from tests.flow.programs.pretended import Group


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = measure_module.start

    def start(part: Part, ranks: int, pool: Sequence[Device], first: int = 0, name: str = "", **limit: float) -> Any:
        if issubclass(part.worker, LocalWorker):
            return begin(part, ranks, pool, first, name, **limit)
        return Group(part, ranks, first, name)

    for module in (running_module, measure_module):
        monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
