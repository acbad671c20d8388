"""What every generation backend must do, whatever it is built on: run on one executor in this process.

    RLIX_CONFORMANCE=my_package.backend:MyExecutor python -m pytest tests/engine/conformance/inference_suite.py

takes any backend through it, by its "module:Class" or the name it is registered under; on a GPU where there is one.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, InferenceExecutor, Site
from rlix.engine.executors.registry import backend
from rlix.engine.inference.requests import GenerationChunk, GenerationRequest, GenerationResult, continued
from rlix.engine.life_cycle import SOURCE, SOURCE_VERSION, Part, Phase, Residency
from rlix.engine.model_source import ModelSource
from rlix.engine.weights import known_answer
from rlix.engine.weights.known_answer import KnownAnswer
from rlix.engine.weights.publication import PublishedWeights, named_weights, publish
from rlix.protocol.errors import NotResidentError, RlixError, WeightSyncError
from rlix.protocol.messages import DeviceKind
from tests.engine.models import VOCABULARY, folder, greedy, logprobs, model, published, qwen

CONFIG = qwen(hidden_size=128)  # heads of 32: some attention kernels want no smaller ones
WAIT_S = 300.0
PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]
KIND = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


def make(source: Any, **options: Any) -> InferenceExecutor:
    made: InferenceExecutor = backend(os.environ.get("RLIX_CONFORMANCE", "transformers")).load()(
        ModelSource.of(source), ExecutorOptions(max_model_len=256, max_num_seqs=16, **options), Site(KIND)
    )
    return made


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceExecutor]:
    made = make(folder(tmp_path_factory.mktemp("model"), seed=0, config=CONFIG))
    yield made
    made.close()


@pytest.fixture
def executor(one: InferenceExecutor) -> InferenceExecutor:
    """With its own weights, whatever the test before did to it."""
    one.abort(None)
    one.offload(keep_host=False)
    one.load(None, ALL_PARTS)
    return one


def requests(count: int = 3, tokens: int = 16, **params: Any) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", PROMPTS[i], tokens, **{"seed": i, **params}) for i in range(count)]


def run(executor: InferenceExecutor, batch: list[GenerationRequest]) -> list[GenerationResult]:
    return executor.submit(batch).result(WAIT_S)


def answers(executor: InferenceExecutor) -> list[tuple[int, ...]]:
    return [result.token_ids for result in run(executor, requests(temperature=0.0))]


def expected(seed: int) -> list[tuple[int, ...]]:
    return [greedy(model(seed, CONFIG), prompt, 16) for prompt in PROMPTS]


def other(seed: int, version: int) -> PublishedWeights:
    return published(model(seed, CONFIG), version)


def started(executor: InferenceExecutor, tokens: int = 240) -> "Future[list[GenerationResult]]":
    """A call that has its first tokens."""
    first: Future[None] = Future()

    def seen(chunk: GenerationChunk) -> None:
        if chunk.token_ids and not first.done():
            first.set_result(None)

    call = executor.submit([GenerationRequest("long", (5, 6), tokens)], seen)
    first.result(WAIT_S)
    return call


# ---- generating ------------------------------------------------------------------------------------------------


def test_greedy_answers_are_the_models_own(executor: InferenceExecutor) -> None:
    assert (executor.life.phase, executor.life.weights) == (Phase.SERVING, SOURCE)
    for prompt, result in zip(PROMPTS, run(executor, requests(temperature=0.0)), strict=True):
        assert result.token_ids == greedy(model(0, CONFIG), prompt, 16)
        assert (result.finished, result.finish_reason, result.weight_version) == (True, "length", SOURCE_VERSION)
        assert result.versions == (SOURCE_VERSION,) * 16


def test_samples_are_seeded_and_their_logprobs_those_of_the_unfiltered_model(executor: InferenceExecutor) -> None:
    request = GenerationRequest("a", PROMPTS[0], 24, temperature=0.7, top_k=20, top_p=0.9, seed=4)
    first, again, other_seed = run(executor, [request, replace(request, id="b"), replace(request, id="c", seed=5)])
    assert first.token_ids == again.token_ids != other_seed.token_ids
    recomputed = logprobs(model(0, CONFIG), PROMPTS[0], first.token_ids)
    assert torch.allclose(torch.tensor(first.logprobs), recomputed, atol=1e-4)


def test_a_stop_token_ends_an_answer_and_belongs_to_it(executor: InferenceExecutor) -> None:
    stop = expected(0)[0][4]
    (result,) = run(executor, requests(1, temperature=0.0, stop_token_ids=(stop,)))
    assert (result.finish_reason, result.token_ids) == ("stop", expected(0)[0][: expected(0)[0].index(stop) + 1])


def test_abort_keeps_tokens_and_the_rest_can_be_resumed(executor: InferenceExecutor) -> None:
    request = GenerationRequest("long", (5, 6), 240)
    call = started(executor)
    executor.abort(["long", "unknown"])
    (first,) = call.result(WAIT_S)
    assert (first.finished, first.finish_reason) == (False, "abort")
    assert 0 < len(first.token_ids) == len(first.logprobs) == len(first.versions) < 240
    (second,) = run(executor, [continued(request, first)])
    assert (second.finished, len(first.token_ids + second.token_ids)) == (True, 240)


def test_a_cancelled_call_ends(executor: InferenceExecutor) -> None:
    assert started(executor).cancel()
    assert answers(executor) == expected(0)
    assert executor.offload(keep_host=False) > 0  # which nothing in flight holds up


def test_an_impossible_request_is_named_and_harms_no_other(executor: InferenceExecutor) -> None:
    for bad, why in [((VOCABULARY,), "token 97"), ((3,) * 255, "max_model_len=256")]:
        call = executor.submit([*requests(2), GenerationRequest("bad", bad, 4)])
        with pytest.raises(ValueError, match=f"request 'bad'.*{why}"):
            call.result(WAIT_S)
    assert answers(executor) == expected(0)


def test_chunks_make_up_the_answer(executor: InferenceExecutor) -> None:
    chunks: list[GenerationChunk] = []
    for result in executor.submit(requests(), chunks.append).result(WAIT_S):
        own = [chunk for chunk in chunks if chunk.id == result.id]
        assert sum((chunk.token_ids for chunk in own), ()) == result.token_ids
        assert sum((chunk.logprobs for chunk in own), ()) == result.logprobs
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]


# ---- where the bytes are ---------------------------------------------------------------------------------------


def test_parts_leave_and_come_back(executor: InferenceExecutor) -> None:
    held = executor.device_bytes
    assert executor.offload(keep_host=True) == held > 0
    assert (executor.life.phase, executor.device_bytes) == (Phase.HOST, 0)
    with pytest.raises(NotResidentError, match="load the weights first"):
        executor.load(None, [Part.KV_CACHE])
    with pytest.raises(NotResidentError, match="call cuda"):
        answers(executor)
    assert executor.load(None, [Part.WEIGHTS]) > 0
    assert executor.life.phase is Phase.PARTIAL
    executor.update(other(1, version=3))  # a trainer may send before there is a cache
    executor.load(None, [Part.KV_CACHE])
    assert (executor.life.phase, answers(executor)) == (Phase.SERVING, expected(1))
    executor.offload(keep_host=True)
    executor.load(None, ALL_PARTS)
    assert answers(executor) == expected(1)
    executor.offload(keep_host=False)
    assert executor.life.residency is Residency.META
    executor.load(None, ALL_PARTS)
    assert (executor.life.weights, answers(executor)) == (SOURCE, expected(0))


def test_a_model_without_weights_says_what_to_do() -> None:
    executor = make(CONFIG)
    with pytest.raises(NotResidentError, match="publish weights"):
        executor.load(None, ALL_PARTS)
    with pytest.raises(NotResidentError, match="call cuda"):
        executor.submit(requests()).result(WAIT_S)
    assert executor.life.phase is Phase.OFF
    executor.close()


def test_after_close_every_call_says_so() -> None:
    executor = make(CONFIG)
    executor.close()
    executor.close()
    with pytest.raises(NotResidentError, match="closed"):
        executor.submit(requests()).result(WAIT_S)
    with pytest.raises(NotResidentError, match="closed"):
        executor.load(other(0, version=1), ALL_PARTS)


# ---- weights ---------------------------------------------------------------------------------------------------


def test_weights_are_replaced_in_place_and_requests_in_flight_go_on(executor: InferenceExecutor) -> None:
    new = other(4, version=9)  # before anything is in flight: vLLM draws from torch's own generator in each step
    call = started(executor)
    assert executor.update(new) == sum(p.nbytes for p in model(4, CONFIG).parameters())
    assert executor.life.weights == new.id
    (result,) = call.result(WAIT_S)
    assert (result.finished, result.versions) == (True, tuple(sorted(result.versions)))
    assert set(result.versions) == {SOURCE_VERSION, 9}
    assert answers(executor) == expected(4)


def test_a_load_replaces_what_is_another_publications_and_nothing_else(executor: InferenceExecutor) -> None:
    first = other(4, version=1)
    executor.load(first, ALL_PARTS)
    assert executor.load(first, ALL_PARTS) == 0
    executor.load(other(5, version=1), ALL_PARTS)  # another trainer counts from 1 too
    assert answers(executor) == expected(5)


def test_known_tokens_are_asked_for_when_weights_first_come_in_a_way(executor: InferenceExecutor) -> None:
    tokens = known_answer.tokens(VOCABULARY)

    def answering(seed: int, version: int, trainer: str) -> PublishedWeights:
        said = logprobs(model(seed, CONFIG), tokens[:1], tokens[1:]).tolist()
        return replace(other(4, version), known=KnownAnswer(tokens, tuple(said), "float32", trainer))

    for trainer, bring in (
        ("one that is loaded from", lambda weights: executor.load(weights, ALL_PARTS)),
        ("one that updates", executor.update),
    ):
        if "loaded" in trainer:
            executor.offload(keep_host=False)
        else:
            assert started(executor)  # which goes on, or fails with the rest
        with pytest.raises(RlixError, match=r"known tokens log-probabilities that are .* from the trainer's"):
            bring(answering(5, 1, trainer))
        assert (executor.life.phase, executor.life.weights) == (Phase.FAILED, None)
        executor.load(None, ALL_PARTS)
        executor.abort(None)
        executor.offload(keep_host=False)
        if "updates" in trainer:
            executor.load(None, ALL_PARTS)
        bring(answering(4, 2, trainer))
        assert (executor.life.version, answers(executor)) == (2, expected(4))


def test_weights_that_do_not_fit_change_nothing(executor: InferenceExecutor) -> None:
    before, wrong = executor.life, published(model(1, qwen(hidden_size=128, num_hidden_layers=1)), version=2)
    for refused in (executor.update, lambda weights: executor.load(weights, ALL_PARTS)):
        with pytest.raises(WeightSyncError, match="nothing was changed"):
            refused(wrong)
    assert (executor.life, answers(executor)) == (before, expected(0))


def test_a_pull_that_breaks_off_leaves_the_old_weights_or_none(executor: InferenceExecutor) -> None:
    whole = other(1, version=2)
    half = replace(whole, buckets=(None, *whole.buckets[1:]))
    with pytest.raises(Exception, match=r"\w"):
        executor.update(half)
    if executor.life.phase is Phase.SERVING:
        assert (executor.life.weights, answers(executor)) == (SOURCE, expected(0))
    else:
        assert (executor.life.phase, executor.life.weights) == (Phase.FAILED, None)
        with pytest.raises(NotResidentError, match="call cuda"):
            answers(executor)
    executor.load(whole, ALL_PARTS)
    assert answers(executor) == expected(1)


def test_an_update_that_breaks_in_the_middle_leaves_none_and_the_next_is_whole(executor: InferenceExecutor) -> None:
    """Also where a backend joins several tensors into one, and had some of them."""
    named = named_weights(model(1, CONFIG))
    whole = publish(named.items(), 5, bucket_bytes=2**14, put=lambda data: data.copy())
    assert executor.update(whole) == sum(p.nbytes for p in model(1, CONFIG).parameters())
    assert (executor.life.version, answers(executor)) == (5, expected(1))
    cut = next(
        entry.bucket for entry in whole.manifest.entries if entry.name.endswith("layers.1.self_attn.v_proj.weight")
    )
    short = (*whole.buckets[:cut], whole.buckets[cut][:4], *whole.buckets[cut + 1 :])
    with pytest.raises(Exception, match=r"\w"):
        executor.update(replace(whole, version=6, publication="broken", buckets=short))
    assert (executor.life.phase, executor.life.weights) == (Phase.FAILED, None)
    with pytest.raises(NotResidentError, match="call cuda"):
        answers(executor)
    executor.load(None, ALL_PARTS)
    assert answers(executor) == expected(0)
    executor.update(other(4, version=6))
    assert answers(executor) == expected(4)


def test_who_is_asked_whether_weights_fit_says_what_an_update_would(executor: InferenceExecutor) -> None:
    before = executor.life
    executor.check_update(other(4, version=6))
    with pytest.raises(WeightSyncError, match="nothing was changed"):
        executor.check_update(published(model(1, qwen(hidden_size=128, num_hidden_layers=1)), version=2))
    assert (executor.life, answers(executor)) == (before, expected(0))
    executor.offload(keep_host=True)
    with pytest.raises(NotResidentError, match="call cuda"):
        executor.check_update(other(4, version=6))


def test_a_folder_that_went_away_is_an_error_and_published_weights_still_work(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", seed=0, config=CONFIG)
    executor = make(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(Exception, match=r"\w"):
        executor.load(None, ALL_PARTS)
    assert executor.life.phase is Phase.FAILED
    executor.load(other(2, version=1), ALL_PARTS)
    assert answers(executor) == expected(2)
    executor.offload(keep_host=False)
    folder(path, seed=0, config=CONFIG)
    executor.load(None, ALL_PARTS)  # into what began with published ones
    assert answers(executor) == expected(0)
    executor.close()
