"""Whatever breaks off, an executor ends in a state with a name, and the next call works or says what to do."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, Site
from rlix.engine.executors.transformers import TransformersExecutor, kv_budget
from rlix.engine.inference.requests import GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.life_cycle import Part, Phase, WeightsId
from rlix.engine.model_source import ModelSource
from rlix.engine.movers import VirtualMover
from rlix.engine.weights.publication import PublishedWeights, named_weights, publish
from rlix.protocol.errors import NotResidentError, RlixError, WeightSyncError
from rlix.protocol.messages import DeviceKind
from tests.engine.models import greedy, model, published, qwen

WAIT_S = 300.0
LONG = GenerationRequest("long", (5, 6), 250)
SHORT = GenerationRequest("short", (5, 6), 8, temperature=0.0)


@pytest.fixture
def executor() -> Iterator[TransformersExecutor]:
    made = TransformersExecutor(ModelSource.of(qwen()), ExecutorOptions(), Site(DeviceKind.CPU))
    made.load(published(model(0), version=1), ALL_PARTS)
    yield made
    made.close()


def answer(executor: TransformersExecutor) -> tuple[int, ...]:
    (result,) = executor.submit([SHORT]).result(WAIT_S)
    return result.token_ids


def many_buckets(seed: int, version: int) -> PublishedWeights:
    return publish(named_weights(model(seed)).items(), version, bucket_bytes=2**12, put=lambda data: data.copy())


def failing(*errors: Exception | None) -> Callable[..., Any]:
    """Raises these, one after the other; None passes the call on to what it stands for."""
    left = list(errors)

    def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return real(*args, **kwargs)

    return call


def breaking(monkeypatch: pytest.MonkeyPatch, executor: object, method: str, *errors: Exception | None) -> None:
    real, call = getattr(executor, method), failing(*errors)
    monkeypatch.setattr(executor, method, lambda *args, **kwargs: call(real, *args, **kwargs))


@pytest.mark.parametrize("lost", [None, 7])
def test_a_pull_that_breaks_off_half_way_leaves_no_mixed_weights(executor: TransformersExecutor, lost: Any) -> None:
    """Whatever the error is: an object that Ray lost is neither a timeout nor a transfer's."""
    broken = many_buckets(1, version=2)
    assert len(broken.buckets) > 3
    half = replace(broken, buckets=(*broken.buckets[:2], lost, *broken.buckets[3:]))
    running = executor.submit([LONG])
    with pytest.raises(AttributeError):
        executor.update(half)
    with pytest.raises(AttributeError):
        running.result(WAIT_S)
    assert (executor.life.phase, executor.life.weights, executor.device_bytes) == (Phase.FAILED, None, 0)
    with pytest.raises(NotResidentError, match=r"an update of the weights broke off.*call cuda"):
        answer(executor)
    with pytest.raises(NotResidentError, match="publish weights"):  # and certainly not the old version
        executor.load(None, ALL_PARTS)
    executor.load(broken, ALL_PARTS)
    assert answer(executor) == greedy(model(1), (5, 6), 8)


def test_weights_lost_on_the_way_to_host_memory_are_known_to_be_lost(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Losing(VirtualMover):
        def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
            storages[0].resize_(0)
            raise MemoryError("half-way")

    monkeypatch.setattr(executor._resident, "_mover", Losing())
    with pytest.raises(MemoryError):
        executor.offload(keep_host=True)
    assert (executor.life.phase, executor.life.weights, executor.device_bytes) == (Phase.FAILED, None, 0)
    with pytest.raises(NotResidentError, match=r"lost on the way to host memory: half-way.*call cuda"):
        answer(executor)
    executor.load(published(model(0), version=1), ALL_PARTS)
    assert answer(executor) == greedy(model(0), (5, 6), 8)


def test_a_refused_update_changes_nothing(executor: TransformersExecutor) -> None:
    before = executor.life
    with pytest.raises(WeightSyncError, match="nothing was changed"):
        executor.update(published(model(1, qwen(num_hidden_layers=1)), version=2))
    assert (executor.life, before.phase) == (before, Phase.SERVING)
    assert answer(executor) == greedy(model(0), (5, 6), 8)


def test_another_trainers_version_of_the_same_number_is_another(executor: TransformersExecutor) -> None:
    executor.load(published(model(3), version=1), ALL_PARTS)
    assert answer(executor) == greedy(model(3), (5, 6), 8)
    again = published(model(4), version=1)
    executor.load(again, ALL_PARTS)
    assert executor.load(again, ALL_PARTS) == 0  # the same publication: nothing to do
    assert executor.life.weights == WeightsId(1, again.publication)


def test_when_starting_again_after_a_failed_step_fails_too_nobody_waits(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, executor, "_step", ValueError("a kernel"))
    breaking(monkeypatch, executor, "_recover", MemoryError("no room"))
    with pytest.raises(ValueError, match="a kernel"):
        executor.submit([SHORT]).result(WAIT_S)
    with pytest.raises(NotResidentError, match=r"a kernel.*no room.*call cuda"):
        executor.submit([SHORT]).result(WAIT_S)
    executor.offload(keep_host=False)
    executor.load(published(model(0), version=1), ALL_PARTS)
    assert answer(executor) == greedy(model(0), (5, 6), 8)


def test_a_failed_step_ends_what_it_worked_on_and_no_more(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, executor, "_step", ValueError("a kernel"))
    with pytest.raises(ValueError, match="a kernel"):
        executor.submit([LONG]).result(WAIT_S)
    assert answer(executor) == greedy(model(0), (5, 6), 8)


def test_a_cancelled_call_stops_decoding(executor: TransformersExecutor) -> None:
    steps: list[GenerationChunk] = []
    first: Future[None] = Future()

    def seen(chunk: GenerationChunk) -> None:
        steps.append(chunk)
        if not first.done():
            first.set_result(None)

    call = executor.submit([LONG, replace(LONG, id="other")], seen)
    first.result(WAIT_S)
    assert call.cancel()
    assert answer(executor) == greedy(model(0), (5, 6), 8)
    assert len(steps) < 2 * 250
    assert executor.offload(keep_host=True) > 0  # nothing is in flight


def test_a_listener_that_raises_ends_its_own_call_only(executor: TransformersExecutor) -> None:
    def raises(chunk: GenerationChunk) -> None:
        raise OSError("the loop was closed")

    beside = executor.submit([LONG])
    with pytest.raises(OSError, match="the loop was closed"):
        executor.submit([replace(LONG, id="heard")], raises).result(WAIT_S)
    (result,) = beside.result(WAIT_S)
    assert len(result.token_ids) == 250


@pytest.mark.parametrize("method", ["_leave", "_restore", "_open_cache"])
def test_a_move_that_fails_keeps_the_weights_and_the_next_one_works(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    breaking(monkeypatch, executor, method, MemoryError("no room"))
    with pytest.raises(MemoryError):
        executor.offload(keep_host=True)
        executor.load(None, ALL_PARTS)
    assert (executor.life.phase, executor.life.version) == (Phase.FAILED, 1)
    with pytest.raises(NotResidentError, match=r"no room.*call cuda"):
        answer(executor)
    executor.load(None, ALL_PARTS)
    assert answer(executor) == greedy(model(0), (5, 6), 8)
    executor.offload(keep_host=True)
    assert executor.life.phase is Phase.HOST


def test_the_cache_comes_after_the_weights(executor: TransformersExecutor) -> None:
    executor.offload(keep_host=True)
    with pytest.raises(NotResidentError, match="load the weights first"):
        executor.load(None, [Part.KV_CACHE])
    with pytest.raises(NotResidentError, match="weights are not on the devices"):
        executor.update(published(model(1), version=2))


def test_after_close_every_call_says_so(executor: TransformersExecutor) -> None:
    call = executor.submit([LONG])
    executor.close()
    executor.close()
    for future in (call, executor.submit([SHORT])):
        with pytest.raises(NotResidentError, match="closed"):
            future.result(WAIT_S)
    with pytest.raises(NotResidentError, match="closed"):
        executor.load(None, ALL_PARTS)


def test_offload_waits_for_nobody(executor: TransformersExecutor) -> None:
    call = executor.submit([LONG])
    with pytest.raises(RlixError, match="abort them first"):
        executor.offload(keep_host=True)
    executor.abort(None)
    (result,) = call.result(WAIT_S)
    assert isinstance(result, GenerationResult)


@pytest.mark.parametrize(
    ("free", "utilization", "budget"),
    [
        (60, None, 54),  # nine tenths of what is free: a second job on the GPU finds room and leaves some
        (60, 0.5, 30),  # half of 100, less the weights
        (10, 0.5, 10),  # what somebody else has cannot be had
        (60, 0.1, 0),
    ],
)
def test_the_cache_takes_of_what_is_free(free: int, utilization: float | None, budget: int) -> None:
    assert kv_budget(free, 100, 20, utilization) == budget


def test_published_arrays_are_what_was_given() -> None:
    weights = many_buckets(1, version=2)
    assert all(isinstance(bucket, np.ndarray) for bucket in weights.buckets)
    assert weights.id != many_buckets(1, version=2).id
