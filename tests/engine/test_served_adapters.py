"""One replica serves many adapters from one model; a sync moves only those that are new, in place."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlix.engine import lora
from rlix.engine.executors.base import ALL_PARTS
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.inference.replica import Replica
from rlix.engine.inference.requests import GenerationRequest, GenerationResult
from rlix.engine.lora import AdapterConfig
from rlix.engine.weights.publication import PublishedAdapter, PublishedWeights, publish
from tests.engine.models import logprobs, model, published
from tests.engine.test_executor import WAIT_S, make, prompts, run

CONFIGS = {"a": AdapterConfig(2, 8.0, targets=("q_proj", "v_proj")), "b": AdapterConfig(8, 8.0)}
BASE = published(model(0), version=1)


def adapted(name: str, version: int) -> Any:
    """The plain model with what version `version` of an adapter has learnt."""
    made = model(0)
    lora.add(made, name, CONFIGS[name])
    torch.manual_seed(10 * version + len(name))
    with torch.no_grad():
        for parameter in lora.parameters(made, name).values():
            parameter.normal_(std=0.2)
    lora.use(made, name)
    return made.eval()


def adapter(name: str, version: int) -> PublishedAdapter:
    named = ((key, value.detach()) for key, value in lora.parameters(adapted(name, version), name).items())
    return PublishedAdapter(name, CONFIGS[name], publish(named, version, put=lambda data: data))


A1, A2, B3 = adapter("a", 1), adapter("a", 2), adapter("b", 3)


def serving(version: int, *adapters: PublishedAdapter) -> PublishedWeights:
    return replace(BASE, version=version, adapters=adapters)


def requests(*adapters: str) -> list[GenerationRequest]:
    """Each prompt once for each adapter."""
    return [
        GenerationRequest(f"{i}/{name}", prompt, 12, seed=i, adapter=name)
        for i, prompt in enumerate(prompts(6))
        for name in adapters
    ]


def check(results: list[GenerationResult], batch: list[GenerationRequest], **versions: int) -> None:
    for request, result in zip(batch, results, strict=True):
        name = request.adapter
        reference = adapted(name, versions[name]) if name else model(0)
        recomputed = logprobs(reference, request.prompt_ids, result.token_ids)
        assert torch.allclose(torch.tensor(result.logprobs), recomputed, atol=1e-4)
        assert set(result.versions) == {versions.get(name, 5)}


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "batched"])
def executor(request: pytest.FixtureRequest) -> Iterator[TransformersExecutor]:
    made = make(seed=None, exact=request.param)
    made.load(serving(5, A1, B3), ALL_PARTS)
    yield made
    made.close()


def test_every_request_is_answered_by_its_adapter_and_by_its_version(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = requests("a", "", "b")
    check(run(executor, batch), batch, a=1, b=3)
    moved = executor.update(serving(5, A2, B3))
    assert moved == sum(tensor.nbytes for tensor in A2.tensors().values())
    check(run(executor, batch), batch, a=2, b=3)
    executor.offload(keep_host=True)
    executor.load(serving(5, A2, B3), ALL_PARTS)
    executor.offload(keep_host=False)
    assert executor.device_bytes == 0
    with monkeypatch.context() as patch:
        patch.delattr(lora, "add")  # there is no layer to make
        executor.load(serving(5, A2, B3), ALL_PARTS)
    check(run(executor, batch), batch, a=2, b=3)
    executor.offload(keep_host=False)
    executor.load(serving(5, B3), ALL_PARTS)
    with pytest.raises(ValueError, match=r"there is no adapter 'a'; there are \['b'\]"):
        run(executor, batch)
    executor.update(serving(5, A1, B3))


def test_an_adapter_that_does_not_fit_costs_only_its_own_requests(executor: TransformersExecutor) -> None:
    """Whether the model has no such layers, or the tensors are another adapter's."""
    nowhere = PublishedAdapter("nowhere", AdapterConfig(2, 8.0, targets=("query",)), A1.weights)
    mixed_up = PublishedAdapter("mixed_up", CONFIGS["b"], A1.weights)
    executor.update(serving(5, nowhere, A1, mixed_up, B3))
    batch = requests("a", "b")
    check(run(executor, batch), batch, a=1, b=3)
    for name, why in (("nowhere", "no linear layers"), ("mixed_up", "does not fit")):
        with pytest.raises(ValueError, match=f"adapter '{name}' cannot be served: .*{why}"):
            run(executor, requests(name))
    executor.update(serving(5, A1, replace(B3, name="mixed_up"), B3))
    run(executor, requests("mixed_up"))
    executor.update(serving(5, A1, B3))


def test_what_is_in_flight_ends_with_its_adapter(executor: TransformersExecutor) -> None:
    left: list[bool] = []

    def leave(_chunk: object) -> None:  # on the decoder's thread, between two steps
        if not left:
            left.append(executor._post(lambda: executor._overwrite(serving(5, B3))))

    results = executor.submit(requests("a", "b"), leave).result(timeout=WAIT_S)
    assert {(result.id[-1], result.finish_reason) for result in results} == {("a", "abort"), ("b", "length")}
    executor.update(serving(5, A1, B3))


def test_a_replica_refuses_only_the_requests_of_the_adapter_that_does_not_fit() -> None:
    class Refusing:
        """Only what `start` needs of a replica."""

        start, _started_ended = Replica.start, Replica._started_ended

        def __init__(self) -> None:
            self._arrived, self._failure = asyncio.Event(), None
            self._refused: list[Any] = []
            self.going: list[str] = []

        def _submit(self, own: list[GenerationRequest], *_: object) -> "asyncio.Future[Any]":
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if own[0].adapter == "b":
                done.set_exception(ValueError("no room"))
            else:
                self.going += [request.id for request in own]
            return done

    async def refused() -> tuple[Any, Any]:
        replica: Any = Refusing()
        await replica.start(requests("a", "b")[:4])
        await replica._arrived.wait()
        return replica.going, replica._refused

    assert asyncio.run(refused()) == (["0/a", "1/a"], [(("0/b", "1/b"), "no room")])


def test_what_is_beside_a_request_changes_nothing_to_the_bit() -> None:
    executor = make(seed=None)
    try:
        executor.load(serving(5, A1, B3), ALL_PARTS)
        batch = requests("a", "", "b")
        together = run(executor, batch)
        for name in ("a", "", "b"):
            alone = [request for request in batch if request.adapter == name]
            assert run(executor, alone) == [r for r, q in zip(together, batch, strict=True) if q.adapter == name]
    finally:
        executor.close()
