"""What a handle does without its replicas: seeds, missing models, and calls that are left early."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

import rlix
from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.inference.prompts import PromptReader
from rlix.engine.inference.replica import ReplicaReport
from rlix.engine.inference.requests import SamplingParams
from rlix.engine.life_cycle import Life, Part, Residency, WeightsId
from rlix.engine.model_source import ModelSource
from rlix.engine.weights.publication import publish
from rlix.protocol.errors import NotResidentError, RlixError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, DeviceKind
from rlix.workers.group import WorkerGroup
from rlix.workers.worker import Worker
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
    """Never answers a `generate`, notes what it is told to abort, and moves bytes as it is told to."""

    world_size = 2

    def close(self, **_: Any) -> None: ...

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.asked = asyncio.Event()
        self.lives: list[Life | WorkerError] = [SERVING, SERVING]

    async def arun(self, *_: Any, **__: Any) -> list[Any]:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    def run(self, method: str, *_: Any, ranks: Any = (0, 1), **__: Any) -> list[Any]:
        if method == "generate":
            raise WaitTimeoutError("rank(s) 0 did not answer")
        if method == "load":
            self.lives = [life.brought(*Part) for life in self.lives if isinstance(life, Life)]
        for rank in ranks:
            if isinstance(life := self.lives[rank], WorkerError):
                raise life
        return [ReplicaReport(self.lives[rank], 0, 0.0, 0) for rank in ranks]

    def call(self, method: str, ids: list[str]) -> None:
        assert method == "abort"
        self.aborted += ids


@pytest.fixture
def engine() -> InferenceEngine:
    made = InferenceEngine(qwen())
    made._reader = PromptReader(made.source, None, 0)
    made._group, made._life = Replicas(), SERVING  # type: ignore[assignment]
    return made


def test_a_move_that_failed_on_one_replica_does_not_block_the_next(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas
    away = SERVING.drain().released(keep_host=True)
    replicas.run = failing_once(replicas, "offload", lives=[away, SERVING.failed("no room on the host", Part.KV_CACHE)])
    with pytest.raises(NotResidentError, match="rank 1 failed"):
        engine.cpu()
    with pytest.raises(NotResidentError, match=r"is failed.*replica 1: no room on the host.*call cuda\(\)"):
        engine.generate([[3]])
    assert engine.residency is Residency.DEVICE  # some of it
    engine.cuda()
    assert engine.life == SERVING


def test_replicas_with_different_weights_do_not_answer_as_one(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas
    newer = SERVING.filled(WeightsId(2))
    replicas.run = failing_once(replicas, "update", lives=[newer, SERVING])
    with pytest.raises(NotResidentError):
        engine.update_weights(publish([], 2, put=lambda data: data))
    with pytest.raises(NotResidentError, match=r"replica 0 version 2, replica 1 version 1\); update all of them"):
        engine.generate([[3]])


def test_a_replica_that_has_died_is_named_until_the_engine_is_built_again(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas
    replicas.run = failing_once(replicas, "offload", lives=[SERVING, WorkerError("infer: rank 1 died")])
    with pytest.raises(NotResidentError):
        engine.meta()
    with pytest.raises(NotResidentError, match=r"replica 1: infer: rank 1 died; close\(\) the engine and build\(\)"):
        engine.generate([[3]])


def test_a_replica_that_died_while_it_generated_is_named_by_the_next_call(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas
    replicas.run = failing_once(replicas, "generate", lives=[SERVING, WorkerError("infer: rank 1 died")])
    with pytest.raises(WorkerError, match="rank 1 failed"):
        engine.generate([[3]])
    with pytest.raises(NotResidentError, match=r"replica 1: infer: rank 1 died; close\(\) the engine and build\(\)"):
        engine.generate([[3]])


def test_one_request_is_aborted_by_its_name(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas
    replicas.run = lambda method, ids, **_: replicas.aborted.append((method, ids))
    engine.abort("mine")
    assert replicas.aborted == [("abort", ["mine"])]


def failing_once(replicas: Replicas, method: str, *, lives: list[Any]) -> Any:
    """`run`, but for the first call of this method: it fails on a replica, and leaves these lives."""
    real = replicas.run

    def run(called: str, *args: Any, **kwargs: Any) -> list[Any]:
        if called == method and replicas.lives == [SERVING, SERVING]:
            replicas.lives = lives
            raise WorkerError("rank 1 failed") from RayTaskError(method, "", NotResidentError("no room"))
        return real(called, *args, **kwargs)

    return run


def test_after_a_shutdown_nothing_starts_a_new_ray(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    group = object.__new__(WorkerGroup)
    group.name, group._closed = "infer-1", False
    engine._group = group
    group.placements = ((),)
    for call in (lambda: engine.generate([[3]]), engine.cuda, engine.meta):
        with pytest.raises(WorkerError, match=r"infer-1: .*called after Ray was shut down.*rlix\.init\(\)"):
            call()
    with pytest.raises(WorkerError, match="there is no Ray to start workers in"):
        WorkerGroup(Worker, name="x", placements=[()])
    with pytest.raises(RlixError, match=r"call rlix\.init\(\) first"):
        InferenceEngine(qwen()).build()


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "max_model_len=0: at least 1"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1: at least 1"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes=0: at least 1"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90: a share above 0, at most 1"),
        ({"dtype": "float33"}, "unknown dtype 'float33'"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    here = Device(0, "node", "127.0.0.1", 0, DeviceKind.CPU)
    unbuilt = InferenceEngine(qwen(), settings.pop("executor", "transformers"))
    with pytest.raises(ValueError, match=message):
        unbuilt.build(devices=[here], **settings)
    assert not unbuilt.devices


def test_mistakes_in_calls_say_what_is_wanted(engine: InferenceEngine) -> None:
    with pytest.raises(ValueError, match="cannot move an engine to disk; known: cuda, cpu, meta"):
        engine.to("disk")
    with pytest.raises(ValueError, match=r"cannot move an engine to cuda:1; .* that it was built for"):
        engine.to("cuda:1")
    for params in (5, "temperature"):
        with pytest.raises(TypeError, match="sampling_params are a dictionary for all prompts, or a list of them"):
            engine.generate([[3]], params)  # type: ignore[arg-type]
    calls: list[Any] = [engine.update_weights, lambda folder: engine.cuda(weights=folder)]
    for call in calls:
        with pytest.raises(TypeError, match="returns, not 'a/folder'"):
            call("a/folder")
        with pytest.raises(TypeError, match="not dict: for those"):  # not all its tensors
            call({"w": torch.zeros(3)})
    assert SamplingParams.of({"stop_token_ids": 5}).stop_token_ids == (5,)


def test_a_replica_that_has_died_is_built_again_not_brought_back(engine: InferenceEngine) -> None:
    replicas: Any = engine.replicas
    replicas.lives[1] = WorkerError("rank 1 died")
    engine._known = False
    with pytest.raises(NotResidentError, match=r"rank 1 died; close\(\) the engine and build\(\) it again\)$"):
        engine.generate([[3]])


def test_whose_weights_come_back_after_meta_is_said(engine: InferenceEngine, caplog: pytest.LogCaptureFixture) -> None:
    replicas: Any = engine.replicas
    engine.update_weights(publish([], 2, put=lambda data: data))
    away = SERVING.drain().released(keep_host=False)
    for said in (1, 1):  # once: from then on they are the folder's
        replicas.lives, engine._known = [away, away], False
        engine.cuda()
        assert sum("those it was given were dropped" in record.message for record in caplog.records) == said
    replicas.lives, engine._known = [away, away], False
    engine.cuda(weights=publish([], 3, put=lambda data: data))
    assert len(caplog.records) == 1
    engine.close()
    engine._group, replicas.lives = replicas, [away, away]
    engine.cuda()
    assert len(caplog.records) == 1, "what is built anew was given nothing"
