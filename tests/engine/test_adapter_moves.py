"""Which adapters an executor puts and takes off when it is told what to serve."""

from types import SimpleNamespace
from typing import Any

from rlix.engine.executors.moves import MovingExecutor
from rlix.engine.lora import AdapterConfig


class Holding:
    """Only what `_serve` needs of an executor."""

    _serve, _forget_adapter = MovingExecutor._serve, MovingExecutor._forget_adapter

    def __init__(self) -> None:
        self._adapters: dict[str, Any] = {}
        self._adapter_configs: dict[str, Any] = {}
        self.moves: list[str] = []

    def _put_adapter(self, adapter: Any) -> int:
        self.moves.append(f"put {adapter.name} of rank {adapter.config.rank}")
        return 1

    def _remove_adapter(self, name: str) -> None:
        self.moves.append(f"remove {name}")


def test_another_adapter_of_the_same_name_takes_the_place_of_the_first() -> None:
    def adapter(name: str, rank: int, version: int) -> Any:
        return SimpleNamespace(name=name, config=AdapterConfig(rank, 1.0), weights=SimpleNamespace(id=version))

    held: Any = Holding()
    for wanted in (
        [adapter("a", 2, 1), adapter("b", 4, 1)],
        [adapter("a", 2, 2), adapter("b", 4, 1)],  # a step of a's
        [adapter("a", 8, 3), adapter("b", 4, 1)],  # a was dropped and another one added, told at once
        [adapter("a", 8, 3)],
    ):
        held._serve(wanted)
    assert held.moves == [
        "put a of rank 2",
        "put b of rank 4",
        "put a of rank 2",
        "remove a",
        "put a of rank 8",
        "remove b",
    ]
