from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, Site
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.inference.requests import GenerationChunk, GenerationRequest, GenerationResult, continued
from rlix.engine.life_cycle import Part
from rlix.engine.model_source import ModelSource
from rlix.protocol.errors import NotResidentError, WeightSyncError
from rlix.protocol.messages import DeviceKind
from tests.engine.models import VOCABULARY, folder, greedy, logprobs, model, published, qwen

CPU = torch.device("cpu")
WAIT_S = 300.0


def make(source: object = None, seed: int | None = 0, **options: object) -> TransformersExecutor:
    executor = TransformersExecutor(ModelSource.of(source or qwen()), ExecutorOptions(**options), Site(DeviceKind.CPU))
    if seed is not None:
        executor.load(published(model(seed), version=1), ALL_PARTS)
    return executor


@pytest.fixture(scope="module")
def executor() -> Iterator[TransformersExecutor]:
    made = make()
    yield made
    made.close()


def prompts(count: int, lengths: tuple[int, ...] = (3, 5, 17, 40)) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(count)
    return [
        tuple(torch.randint(3, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist())
        for i in range(count)
    ]


def requests(count: int, tokens: int = 20, **params: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"r{i}", prompt, tokens, seed=1000 + i, **params) for i, prompt in enumerate(prompts(count))
    ]


def run(executor: TransformersExecutor, batch: list[GenerationRequest]) -> list[GenerationResult]:
    return executor.submit(batch).result(timeout=WAIT_S)


def test_greedy_equals_plain_transformers_token_for_token(executor: TransformersExecutor) -> None:
    batch = requests(9, temperature=0.0)
    reference = model(0)
    for request, result in zip(batch, run(executor, batch), strict=True):
        assert result.token_ids == greedy(reference, request.prompt_ids, 20)
        assert (result.finished, result.finish_reason, result.weight_version) == (True, "length", 1)


def test_logprobs_equal_a_recompute(executor: TransformersExecutor) -> None:
    batch = requests(8, temperature=0.7, top_p=0.9, top_k=20)
    reference = model(0)
    for request, result in zip(batch, run(executor, batch), strict=True):
        recomputed = logprobs(reference, request.prompt_ids, result.token_ids)
        assert torch.allclose(torch.tensor(result.logprobs), recomputed, atol=1e-5)


def test_results_do_not_depend_on_the_batch_to_the_bit(executor: TransformersExecutor) -> None:
    batch = requests(70)
    together = run(executor, batch)
    assert run(executor, batch[::-1]) == together[::-1]
    assert run(executor, batch[5:6]) == together[5:6]
    calls = [executor.submit([request]) for request in batch[:10]]
    assert [call.result(timeout=WAIT_S)[0] for call in calls] == together[:10]


def test_samples_of_one_prompt_share_its_computation_without_a_trace(executor: TransformersExecutor) -> None:
    prompt = prompts(4)[3]
    group = [GenerationRequest(f"s{i}", prompt, 12, seed=i) for i in range(16)]
    together = run(executor, group)
    assert len({result.token_ids for result in together}) > 1
    assert [run(executor, [request])[0] for request in group[:3]] == together[:3]


@pytest.mark.parametrize("kept", [1, 7, 19])
def test_resuming_elsewhere_gives_the_tokens_of_an_uninterrupted_run(executor: TransformersExecutor, kept: int) -> None:
    batch = requests(12)
    whole = run(executor, batch)
    other = make()
    interrupted = [replace(r, generated_ids=w.token_ids[:kept]) for r, w in zip(batch, whole, strict=True)]
    for full, rest in zip(whole, run(other, interrupted[::-1])[::-1], strict=True):
        assert full.token_ids[kept:] == rest.token_ids
        assert full.logprobs[kept:] == rest.logprobs
    other.close()


def test_abort_keeps_tokens_and_the_rest_follows_exactly(executor: TransformersExecutor) -> None:
    batch = requests(6, tokens=60)
    whole = run(executor, batch)
    call = executor.submit(batch)
    executor.abort(["r1", "r4", "unknown"])
    results = call.result(timeout=WAIT_S)
    assert [result.finished for result in results] == [True, False, True, True, False, True]
    for i in (1, 4):
        first = results[i]
        assert first.finish_reason == "abort"
        (second,) = run(executor, [continued(batch[i], first)])
        assert first.token_ids + second.token_ids == whole[i].token_ids
        assert first.logprobs + second.logprobs == whole[i].logprobs


def test_abort_all_reaches_requests_that_still_wait_for_a_row() -> None:
    small = make(max_num_seqs=2)
    call = small.submit(requests(5, tokens=60))
    small.abort(None)
    results = call.result(timeout=WAIT_S)
    assert [result.finish_reason for result in results] == ["abort"] * 5
    assert run(small, requests(3))[2].finished
    small.close()


def test_more_requests_than_rows_and_blocks_are_served_in_turn(executor: TransformersExecutor) -> None:
    batch = requests(9)
    block_bytes = 16 * 2 * (2 * 16) * 4 * 2  # positions x layers x (heads x dim) x float32 x (keys, values)
    tight = make(max_num_seqs=4, kv_cache_bytes=66 * block_bytes, max_model_len=256)
    assert run(tight, batch) == run(executor, batch)
    assert tight.device_bytes <= 66 * block_bytes + sum(p.nbytes for p in model(0).parameters())
    tight.close()


def test_stop_tokens_end_an_answer_and_belong_to_it(executor: TransformersExecutor) -> None:
    (free,) = run(executor, requests(1, temperature=0.0))
    stop = free.token_ids[4]
    (stopped,) = run(executor, requests(1, temperature=0.0, stop_token_ids=(stop, 96, 95, 94, 93)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_requests_whose_kept_tokens_are_the_whole_answer(executor: TransformersExecutor) -> None:
    request = GenerationRequest("x", (3, 4), 2, stop_token_ids=(9,))
    full, stopped = run(executor, [replace(request, generated_ids=(5, 6)), replace(request, generated_ids=(9,))])
    assert (full.finish_reason, full.token_ids) == ("length", ())
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", ())


def test_update_changes_answers_to_those_of_the_new_weights() -> None:
    executor = make()
    batch = requests(4, temperature=0.0)
    before = run(executor, batch)
    copied = executor.update(published(model(7), version=2))
    after = run(executor, batch)
    assert copied == sum(p.nbytes for p in model(7).parameters())
    assert [r.token_ids for r in after] == [greedy(model(7), r.prompt_ids, 20) for r in batch]
    assert [r.token_ids for r in after] != [r.token_ids for r in before]
    assert {v for r in after for v in r.versions} == {2}
    executor.close()


def test_requests_in_flight_survive_an_update_and_know_which_version_made_each_token() -> None:
    executor = make()
    call = executor.submit(requests(3, tokens=60))
    executor.update(published(model(7), version=2))
    for result in call.result(timeout=WAIT_S):
        assert result.finished
        assert len(result.versions) == 60
        assert list(result.versions) == sorted(result.versions)
        assert result.weight_version == 2
    executor.close()


def test_offload_releases_everything_and_load_brings_it_back() -> None:
    executor = make()
    batch = requests(4)
    before, held = run(executor, batch), executor.device_bytes
    assert executor.offload(keep_host=True) == held > 0
    assert executor.device_bytes == 0
    with pytest.raises(NotResidentError, match="call cuda"):
        run(executor, batch)
    executor.load(None, [Part.WEIGHTS])
    executor.load(None, [Part.KV_CACHE])
    assert run(executor, batch) == before
    executor.offload(keep_host=False)
    with pytest.raises(NotResidentError, match="publish weights"):
        executor.load(None, ALL_PARTS)
    executor.load(published(model(0), version=1), ALL_PARTS)
    assert run(executor, batch) == before
    executor.close()


def test_a_folder_brings_its_own_weights_and_takes_published_ones(tmp_path: Path) -> None:
    executor = make(folder(tmp_path / "model", seed=3), seed=None)
    batch = requests(3, temperature=0.0)
    executor.load(None, ALL_PARTS)
    own = run(executor, batch)
    assert [r.token_ids for r in own] == [greedy(model(3), r.prompt_ids, 20) for r in batch]
    assert own[0].weight_version == -1
    executor.offload(keep_host=False)
    executor.load(published(model(4), version=5), ALL_PARTS)
    assert run(executor, batch)[0].token_ids == greedy(model(4), batch[0].prompt_ids, 20)
    executor.offload(keep_host=False)
    executor.load(None, ALL_PARTS)
    assert run(executor, batch) == own
    executor.close()


def test_tied_weights_and_another_architecture() -> None:
    from transformers import LlamaForCausalLM

    from tests.engine.models import llama

    torch.manual_seed(0)
    reference = LlamaForCausalLM(llama()).eval()
    executor = make(llama(), seed=None)
    executor.load(published(reference, version=1), ALL_PARTS)
    batch = requests(3, temperature=0.0)
    assert [r.token_ids for r in run(executor, batch)] == [greedy(reference, r.prompt_ids, 20) for r in batch]
    executor.close()


def test_a_failed_load_leaves_nothing_that_looks_loaded() -> None:
    executor = make(seed=None)
    with pytest.raises(WeightSyncError):
        executor.load(published(model(0, qwen(num_hidden_layers=1)), version=1), ALL_PARTS)
    assert executor.device_bytes == 0
    with pytest.raises(NotResidentError):
        executor.load(None, ALL_PARTS)
    executor.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("bad", (3,), 256), "request 'bad'.*max_model_len=256"),
        (GenerationRequest("bad", (3, VOCABULARY), 4), "request 'bad': token 97 is not in 0..96"),
        (GenerationRequest("bad", (-1,), 4), "request 'bad': token -1"),
    ],
)
def test_an_impossible_request_is_named_and_harms_no_other(
    executor: TransformersExecutor, request_: GenerationRequest, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(executor, [*requests(2), request_])
    assert run(executor, requests(2))[0].finished


def test_models_that_do_not_attend_to_everything_are_refused() -> None:
    with pytest.raises(ValueError, match='use executor="vllm"'):
        make(qwen(use_sliding_window=True, sliding_window=8, max_window_layers=0), seed=None)


def test_close_fails_what_is_in_flight() -> None:
    executor = make()
    call = executor.submit(requests(3, tokens=60))
    executor.close()
    with pytest.raises(NotResidentError, match="closed"):
        call.result(timeout=WAIT_S)


@pytest.fixture(scope="module")
def fast() -> Iterator[TransformersExecutor]:
    made = make(exact=False)
    yield made
    made.close()


def test_fast_greedy_equals_plain_transformers_token_for_token(fast: TransformersExecutor) -> None:
    batch = requests(9, temperature=0.0)  # prompts of four lengths, some of them computed together
    reference = model(0)
    for request, result in zip(batch, run(fast, batch), strict=True):
        assert result.token_ids == greedy(reference, request.prompt_ids, 20)
        recomputed = logprobs(reference, request.prompt_ids, result.token_ids)
        assert torch.allclose(torch.tensor(result.logprobs), recomputed, atol=1e-5)


def test_fast_draws_what_exact_draws(fast: TransformersExecutor, executor: TransformersExecutor) -> None:
    batch = [replace(r, max_new_tokens=4 + i % 5) for i, r in enumerate(requests(12, temperature=0.8, top_p=0.9))]
    assert [r.token_ids for r in run(fast, batch)] == [r.token_ids for r in run(executor, batch)]


def test_fast_samples_of_one_prompt_are_those_of_each_alone(fast: TransformersExecutor) -> None:
    group = [GenerationRequest(f"s{i}", prompts(4)[3], 12, seed=i) for i in range(6)]
    together = [result.token_ids for result in run(fast, group)]
    assert together == [run(fast, [request])[0].token_ids for request in group]


def test_fast_aborts_resumes_and_serves_more_requests_than_rows(executor: TransformersExecutor) -> None:
    batch = requests(9, tokens=30)
    whole = [result.token_ids for result in run(executor, batch)]
    position_bytes = 2 * (2 * 16) * 4 * 2  # layers x (heads x dim) x float32 x (keys, values)
    tight = make(exact=False, max_num_seqs=4, kv_cache_bytes=2 * 96 * position_bytes)
    call = tight.submit(batch)
    tight.abort(["r1", "r8"])
    results = call.result(timeout=WAIT_S)
    assert [result.finished for result in results] == [i not in (1, 8) for i in range(9)]
    rest = run(tight, [continued(r, done) for r, done in zip(batch, results, strict=True)])
    assert [done.token_ids + r.token_ids for done, r in zip(results, rest, strict=True)] == whole
    assert tight.device_bytes <= 2 * 96 * position_bytes + sum(p.nbytes for p in model(0).parameters())
    with pytest.raises(ValueError, match="do not fit a KV cache"):
        run(tight, [GenerationRequest("long", (3,) * 200, 50)])
    tight.close()


@pytest.mark.parametrize("exact", [True, False])
def test_chunks_make_up_the_answer(exact: bool) -> None:
    executor = make(exact=exact)
    chunks: list[GenerationChunk] = []
    batch = requests(3, tokens=8)
    results = executor.submit(batch, chunks.append).result(timeout=WAIT_S)
    assert len(chunks) > 6
    for result in results:
        own = [chunk for chunk in chunks if chunk.id == result.id]
        assert tuple(token for chunk in own for token in chunk.token_ids) == result.token_ids
        assert tuple(logprob for chunk in own for logprob in chunk.logprobs) == result.logprobs
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
    executor.close()


def test_counters_tell_what_was_decoded_and_what_waits() -> None:
    small = make(max_num_seqs=2)
    before = small.counters
    pieces: list[GenerationChunk] = []
    at_ends: list[tuple[int, int]] = []

    def told(piece: GenerationChunk) -> None:
        pieces.append(piece)
        at_ends.append((small.counters.running, small.counters.waiting))

    small.submit(requests(5, tokens=8), told, 3600.0).result(timeout=WAIT_S)
    after = small.counters
    assert before.steps == 0
    assert after.tokens >= 5 * 8, "a step that only feeds a prompt draws nothing"
    assert after.steps >= after.tokens / 2
    assert after.seconds > 0
    assert at_ends == [(2, 3), (2, 3), (2, 1), (2, 1), (1, 0)], "who waited had no room beside those who end"
    assert [len(piece.token_ids) for piece in pieces] == [8] * 5, "within the hour only what ends is told"
    small.close()


def test_samples_of_one_prompt_draw_in_the_step_that_computes_it() -> None:
    executor = make()
    prompt = prompts(4)[3]
    executor.submit([GenerationRequest(f"s{i}", prompt, 6, seed=i) for i in range(8)]).result(timeout=WAIT_S)
    assert (executor.counters.steps, executor.counters.tokens) == (6, 48)
    executor.close()
