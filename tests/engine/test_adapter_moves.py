"""Which adapters an executor puts and takes off when it is told what to serve."""

from types import SimpleNamespace
from typing import Any

from rlix.engine.executors.moves import MovingExecutor
from rlix.engine.lora import AdapterConfig
from rlix.protocol.errors import WeightSyncError


class Holding:
    """Only what `_serve` needs of an executor."""

    _serve, _forget_adapter = MovingExecutor._serve, MovingExecutor._forget_adapter
    _refused: dict[str, str]

    def __init__(self) -> None:
        self._adapters: dict[str, Any] = {}
        self._adapter_configs: dict[str, Any] = {}
        self.moves: list[str] = []

    def _put_adapter(self, adapter: Any) -> int:
        if adapter.config.rank > 8:
            raise WeightSyncError(f"no room for rank {adapter.config.rank}")
        self.moves.append(f"put {adapter.name} of rank {adapter.config.rank}")
        return 1

    def _remove_adapter(self, name: str) -> None:
        self.moves.append(f"remove {name}")


def adapter(name: str, rank: int, version: int) -> Any:
    return SimpleNamespace(name=name, config=AdapterConfig(rank, 1.0), weights=SimpleNamespace(id=version))


def test_an_adapter_that_does_not_fit_keeps_nobody_else_out() -> None:
    held: Any = Holding()
    assert held._serve([adapter("wide", 64, 1), adapter("a", 2, 1)]) == 1
    assert (list(held._adapters), held._refused) == (["a"], {"wide": "no room for rank 64"})
    held._serve([adapter("a", 64, 2)])  # not served by an older version either
    assert (list(held._adapters), list(held._refused)) == ([], ["a"])
    held._serve([adapter("a", 4, 3)])
    assert (list(held._adapters), held._refused) == (["a"], {})


def test_another_adapter_of_the_same_name_takes_the_place_of_the_first() -> None:
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
