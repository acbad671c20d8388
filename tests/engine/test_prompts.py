"""What a handle does without its replicas: seeds, missing models, and calls that are left early."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rlix
from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.inference.prompts import PromptReader
from rlix.engine.life_cycle import Life, Part, WeightsId
from rlix.engine.model_source import ModelSource
from rlix.protocol.errors import WaitTimeoutError
from tests.engine.models import qwen

SERVING = Life().brought(*Part).filled(WeightsId(1))


def seeds(prompts: list[list[int]], params: Any) -> list[int]:
    return [request.seed for request in PromptReader(ModelSource.of(qwen()), None, 0).requests(prompts, params, None)]


def test_one_seed_for_all_prompts_is_a_stream_for_each() -> None:
    first, *others = seeds([[5, 6]] * 4, {"seed": 7})
    assert first == 7  # that of the prompt alone
    assert len({first, *others}) == 4
    assert [first, *others] == seeds([[5, 6]] * 4, {"seed": 7})
    assert seeds([[5, 6]], {"seed": 7}) == [7]
    assert seeds([[5, 6]] * 2, [{"seed": 7}, {"seed": 7}]) == [7, 7]  # said for each: meant for each


@pytest.mark.parametrize("source", [Path("nowhere"), "./nowhere", "/nowhere/at/all", "~/nowhere"])
def test_a_missing_folder_says_so(source: str | Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no model folder {source}"):
        InferenceEngine(source)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        ModelSource.of(tmp_path).load_config()


def test_what_rlix_raises_is_a_runtime_error_and_can_be_caught_by_name() -> None:
    assert issubclass(rlix.RlixError, RuntimeError)
    names = ["NotResidentError", "DeviceBusyError", "WeightSyncError", "WorkerError", "WaitTimeoutError", "TurnError"]
    for name in names:
        assert name in rlix.__all__
        assert issubclass(getattr(rlix, name), rlix.RlixError)


class Replicas:
    """Never answers, and notes what it is told to abort."""

    world_size = 1

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.asked = asyncio.Event()

    async def arun(self, *_: Any, **__: Any) -> list[Any]:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    def run(self, *_: Any, **__: Any) -> list[Any]:
        raise WaitTimeoutError("rank(s) 0 did not answer")

    def call(self, method: str, ids: list[str]) -> None:
        assert method == "abort"
        self.aborted += ids


@pytest.fixture
def engine() -> InferenceEngine:
    made = InferenceEngine(qwen())
    made._reader = PromptReader(made.source, None, 0)
    made._group, made._life = Replicas(), SERVING  # type: ignore[assignment]
    return made


def test_a_cancelled_call_leaves_nothing_decoding(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas

    async def leave() -> None:
        call = asyncio.create_task(engine.generate_async([[3], [4]], request_ids=["a", "b"]))
        await replicas.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(leave())
    assert replicas.aborted == ["a", "b"]


def test_so_does_one_that_was_not_answered_in_time(engine: InferenceEngine) -> None:
    with pytest.raises(WaitTimeoutError):
        engine.generate([[3]], request_ids=["late"])
    replicas: Any = engine.replicas
    assert replicas.aborted == ["late"]
