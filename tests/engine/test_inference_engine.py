import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import rlix
from rlix import InferenceEngine
from rlix.engine.inference.requests import GenerationChunk, GenerationRequest, continued
from rlix.engine.inference.turns import Turn, TurnError
from rlix.engine.life_cycle import Residency
from rlix.engine.weights.publication import PublishedWeights, named_weights, publish
from rlix.protocol.errors import NotResidentError, RlixError, StaleEpochError, WeightSyncError, WorkerError
from rlix.protocol.messages import Fence
from tests.engine.models import VOCABULARY, folder, greedy, model, qwen, tokenizer

pytestmark = pytest.mark.ray

WAIT_S = 300.0
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def stored(seed: int, version: int) -> PublishedWeights:
    return publish(named_weights(model(seed)).items(), version)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folder(tmp_path_factory.mktemp("model"), seed=0)
    tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def engine(ray_session: Any, path: Path) -> Iterator[InferenceEngine]:
    made = InferenceEngine(path, executor="transformers").build(data_parallel_size=2)
    yield made
    made.close()


@pytest.fixture
def replica(ray_session: Any) -> Iterator[Any]:
    """One replica's actor, of a model whose weights come from published buckets alone."""
    engine = InferenceEngine(qwen()).build(load=False)
    yield engine.replicas.handles[0]
    engine.close()


def test_answers_come_in_the_order_of_the_prompts(engine: InferenceEngine) -> None:
    prompts = [[3 + i, 4, 5 + i] for i in range(7)]
    outputs = engine.generate(prompts, GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [tuple(p) for p in prompts]
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(model(0), tuple(p), 8) for p in prompts]
    assert len(outputs[0].outputs[0].logprobs) == 8


def test_texts_and_parameters_of_each_prompt(engine: InferenceEngine) -> None:
    params = [{"max_tokens": 3, "seed": 5}, {"max_new_tokens": 9, "seed": 5}, {"max_tokens": 9, "seed": 6}]
    params = [{**values, "ignore_eos": True} for values in params]
    outputs = engine.generate(["ab"] * 3, params)
    short, long, other = (o.outputs[0] for o in outputs)
    reference = tokenizer()
    assert outputs[0].prompt_token_ids == tuple(reference("ab")["input_ids"])
    assert (len(short.token_ids), len(long.token_ids)) == (3, 9)
    assert long.token_ids[:3] == short.token_ids
    assert long.token_ids != other.token_ids
    assert long.text == reference.decode(long.token_ids, skip_special_tokens=True) != ""


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_token_ids_may_be_arrays_and_tensors(engine: InferenceEngine, make: Any) -> None:
    for prompts in (make([[3, 4], [5, 6]]), [make([3, 4]), make([5, 6])]):
        assert [output.prompt_token_ids for output in engine.generate(prompts, GREEDY)] == [(3, 4), (5, 6)]
    assert [output.prompt_token_ids for output in engine.generate(make([7, 8, 9]), GREEDY)] == [(7, 8, 9)]


def test_prompts_without_a_seed_have_streams_of_their_own(engine: InferenceEngine) -> None:
    outputs = engine.generate([[5, 6]] * 8, {"max_new_tokens": 12})
    assert len({o.outputs[0].token_ids for o in outputs}) > 4


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[3], [4, VOCABULARY]], GREEDY, "prompt 1: token 97"),
        ([[3], []], GREEDY, "prompt 1.*no tokens"),
        ([[3], ["x"]], GREEDY, "prompt 1: token 'x'"),
        ([[3], [4]], [GREEDY, {"temprature": 1.0}], "prompt 1.*temprature"),
        ([[3], [4]], [GREEDY], "1 sampling_params for 2 prompts"),
        ([[3]], {"max_tokens": 1, "max_new_tokens": 2}, "both max_tokens and max_new_tokens"),
        ([[3]], {"max_tokens": 999}, "prompt 0.*max_model_len=256"),
        ([[3], None], GREEDY, "prompt 1: a prompt is a text or token ids, not NoneType"),
        ([[3], {"prompt_token_ids": [3]}], GREEDY, "prompt 1.*not dict"),
        ([[3], [4]], [GREEDY, {"seed": "x"}], "prompt 1: seed is 'x'"),
        ([[3]], {"seed": 2**64}, "prompt 0: seed is 18446744073709551616"),
        ([[3]], {"max_tokens": 2.5}, r"prompt 0: max_new_tokens is 2\.5"),
        ([[3]], {"temperature": "hot"}, "prompt 0: temperature is 'hot'"),
        ([[3]], {"stop_token_ids": ["x"]}, "prompt 0.*stop_token_ids is 'x'"),
        ([], GREEDY, "no prompts"),
    ],
)
def test_a_bad_prompt_is_named_and_the_next_call_works(
    engine: InferenceEngine, prompts: list[Any], params: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params)
    assert len(engine.generate([[3]], GREEDY)) == 1


def test_concurrent_async_calls_and_abort_by_name(engine: InferenceEngine) -> None:
    async def both() -> list[Any]:
        long = asyncio.create_task(
            engine.generate_async([[3]], {"max_tokens": 250, "ignore_eos": True}, request_ids=["long"])
        )
        short = await engine.generate_async([[4]], GREEDY)
        await asyncio.to_thread(engine.abort, ["long"])
        return [*await long, *short]

    long, short = asyncio.run(both())
    assert long.outputs[0].finish_reason == "abort"
    assert len(long.outputs[0].token_ids) < 250
    assert short.outputs[0].token_ids == greedy(model(0), (4,), 8)


def test_replicas_agree_to_the_bit(engine: InferenceEngine) -> None:
    batch = [GenerationRequest(f"r{i}", (5, 6 + i), 40, seed=i) for i in range(8)]
    first, second = engine.replicas.handles
    whole = ray.get(first.generate.remote(batch), timeout=WAIT_S)
    assert ray.get(second.generate.remote(batch[5:2:-1]), timeout=WAIT_S) == whole[5:2:-1]


def test_residency_as_in_pytorch(engine: InferenceEngine) -> None:
    before = engine.generate([[7, 8]], GREEDY)
    weights = sum(p.nbytes for p in model(0).parameters())
    assert engine.cpu().bytes > 2 * weights  # with the KV caches
    assert (engine.residency, engine.device.type) == (Residency.HOST, "cpu")
    with pytest.raises(NotResidentError, match=r"kv_cache and weights.*call cuda\(\)"):
        engine.generate([[7, 8]], GREEDY)
    with pytest.raises(NotResidentError, match="no weights"):
        engine.cuda("kv_cache")
    assert engine.cuda("weights").bytes == 2 * weights
    with pytest.raises(NotResidentError, match="kv_cache"):
        engine.generate([[7, 8]], GREEDY)
    engine.update_weights(stored(4, version=9))
    engine.cuda("kv_cache")
    (after,) = engine.generate([[7, 8]], GREEDY)
    assert after.outputs[0].token_ids == greedy(model(4), (7, 8), 8)
    assert after.outputs[0].weight_version == 9
    engine.meta()
    with pytest.raises(NotResidentError, match="on meta"):
        engine.to("cpu")
    engine.to("cuda")
    assert engine.generate([[7, 8]], GREEDY)[0].outputs == before[0].outputs


def lease(epoch: int) -> Fence:
    """Of a pool that has no other leases."""
    return Fence(__name__, epoch, "a job", "rollout")


def test_a_replica_under_leases(replica: Any) -> None:
    def call(method: str, *args: Any) -> Any:
        return ray.get(getattr(replica, method).remote(*args), timeout=WAIT_S)

    request = GenerationRequest("a", (5, 6, 7), 30, seed=3)
    with pytest.raises(NotResidentError, match="off"):
        call("generate", [request])
    with pytest.raises(NotResidentError, match="publish weights"):
        call("load", None, lease(1))
    report = call("load", stored(0, version=1), lease(2))
    assert (report.phase, report.version) == ("serving", 1)
    assert report.bytes == sum(p.nbytes for p in model(0).parameters()) <= report.device_bytes
    (whole,) = call("generate", [request])

    # The shrink arrives while a call is in flight: the call returns with what it has, and goes on after the next load.
    running = replica.generate.remote([request])
    report = call("offload", 2)
    assert (report.phase, report.device_bytes) == ("off", 0)
    (first,) = ray.get(running, timeout=WAIT_S)
    with pytest.raises(StaleEpochError):
        call("load", stored(0, version=1), lease(2))
    call("load", stored(0, version=1), lease(3))
    with pytest.raises(StaleEpochError):
        call("offload", 2)
    (second,) = call("generate", [continued(request, first)])
    assert first.token_ids + second.token_ids == whole.token_ids
    assert first.logprobs + second.logprobs == whole.logprobs

    assert call("update", stored(1, version=2)).version == 2
    with pytest.raises(WeightSyncError, match="nothing was changed"):
        call("update", publish([], 3))
    assert call("generate", [request])[0].weight_version == 2  # a refused update is no harm
    broken = stored(0, version=3)
    with pytest.raises(AttributeError):
        call("update", replace(broken, buckets=(None,)))
    with pytest.raises(NotResidentError, match=r"is failed.*an update of the weights broke off.*call cuda"):
        call("generate", [request])
    call("load", broken, lease(4))
    assert call("generate", [request])[0].weight_version == 3


def test_a_replica_hands_over_each_trajectory_when_it_ends(replica: Any) -> None:
    def call(method: str, *args: Any) -> Any:
        return ray.get(getattr(replica, method).remote(*args), timeout=WAIT_S)

    call("load", stored(0, version=1), lease(11))
    batch = [GenerationRequest(f"t{n}", (5, 6, 7), n, seed=n) for n in (1, 40, 200)]
    whole = call("generate", batch[:2])
    call("start", batch)
    got: dict[str, list[GenerationChunk]] = {request.id: [] for request in batch}
    ended: list[str] = []
    while len(ended) < len(batch):
        collected = call("collect", 1.0)
        assert not collected.refused
        for chunk in collected.chunks:
            got[chunk.id].append(chunk)
            if chunk.finish_reason is not None:
                ended.append(chunk.id)
        if len(ended) == 1:
            call("abort", ["t200"])
    for result in whole:
        pieces = got[result.id]
        assert tuple(token for piece in pieces for token in piece.token_ids) == result.token_ids
        assert tuple(p for piece in pieces for p in piece.logprobs) == result.logprobs
        assert {version for piece in pieces for version in piece.versions} == {1}
    assert ended[0] == "t1", "the short one does not wait for the long ones"
    assert got["t200"][-1].finish_reason in ("abort", "length")
    call("start", [GenerationRequest("bad", (99_999,), 4)])
    assert "token 99999" in call("collect", WAIT_S).refused[0][1]
    assert call("collect", 0.0).chunks == ()
    call("offload", 11)


def test_streamed_pieces_make_up_the_answer(engine: InferenceEngine) -> None:
    params = {"max_tokens": 40, "seed": 3, "ignore_eos": True}

    async def collect() -> list[Any]:
        return [chunk async for chunk in engine.stream("ab", params)]

    chunks = asyncio.run(collect())
    (whole,) = engine.generate("ab", params)
    assert len(chunks) > 1
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.outputs[0].token_ids
    assert sum((chunk.logprobs for chunk in chunks), ()) == whole.outputs[0].logprobs
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_leaving_a_stream_aborts_it_and_a_bad_prompt_is_named(engine: InferenceEngine) -> None:
    async def first() -> Any:
        pieces = engine.stream([3], {"max_tokens": 250, "ignore_eos": True}, request_id="left")
        chunk = await anext(pieces)
        await pieces.aclose()
        return chunk

    async def bad() -> None:
        async for _ in engine.stream([VOCABULARY]):
            pass

    assert asyncio.run(first()).finish_reason is None
    with pytest.raises(ValueError, match="prompt 0: token 97"):
        asyncio.run(bad())
    assert engine.cpu().bytes > 0  # nothing holds it up
    engine.cuda()


def test_a_callback_appends_tokens_and_they_are_marked(engine: InferenceEngine) -> None:
    """Two prompts take different numbers of turns; what the model says next is what it says after that prefix."""

    async def agent(turn: Turn) -> list[int] | None:
        await asyncio.sleep(0)
        assert turn.token_ids == turn.answer_ids[-8:]
        return [50 + turn.index, 60] if turn.number <= turn.index + 1 else None

    prompts = [[5, 6], [7, 8, 9]]
    for prompt, turns, output in zip(prompts, (2, 3), engine.generate(prompts, GREEDY, on_turn=agent), strict=True):
        answer, tool = output.outputs[0], (50 + turns - 2, 60)
        expected: tuple[int, ...] = greedy(model(0), tuple(prompt), 8)
        for _ in range(turns - 1):
            expected += tool
            expected += greedy(model(0), tuple(prompt) + expected, 8)
        assert (answer.token_ids, answer.turns, answer.finish_reason) == (expected, turns, "length")
        assert answer.generated == ((True,) * 8 + (False,) * 2) * (turns - 1) + (True,) * 8
        assert [p == 0.0 for p in answer.logprobs] == [not model_made for model_made in answer.generated]


def test_turns_are_seeded_and_end_at_the_models_length(engine: InferenceEngine) -> None:
    params = {"max_tokens": 100, "seed": 7, "ignore_eos": True}
    first, again = (engine.generate("ab", params, on_turn=lambda turn: "cd")[0].outputs[0] for _ in range(2))
    assert first == again
    assert (len(first.token_ids), first.turns) == (254, 3)  # 256 with the prompt
    assert first.token_ids[:98] != first.token_ids[102:200]


def test_a_raising_hook_names_its_prompt_and_the_next_call_works(engine: InferenceEngine) -> None:
    def hook(turn: Turn) -> str | None:
        if turn.index == 1:
            raise KeyError("no such tool")
        return "a"

    with pytest.raises(TurnError, match="prompt 1 after turn 1: KeyError: 'no such tool'"):
        engine.generate([[3], [4], [5]], GREEDY, on_turn=hook)
    with pytest.raises(TurnError, match=r"prompt 0 after turn 1.*token 97"):
        engine.generate([[3]], GREEDY, on_turn=lambda turn: [VOCABULARY])
    assert engine.generate([[4]], GREEDY)[0].outputs[0].token_ids == greedy(model(0), (4,), 8)


def test_placement_beside_and_away_and_close(ray_session: Any, path: Path, engine: InferenceEngine) -> None:
    beside = InferenceEngine(path).build(colocate_with=engine, data_parallel_size=2, load=False)
    away = InferenceEngine(path).build(not_colocate_with=[engine, beside], load=False)
    assert set(beside.devices) == set(engine.devices)
    assert not set(away.devices) & set(engine.devices)
    with pytest.raises(ValueError, match="2 of colocate_with"):
        InferenceEngine(path).build(colocate_with=engine, data_parallel_size=3)
    names = [f"{made.name}:0" for made in (beside, away)]
    for made, name in zip((beside, away), names, strict=True):
        ray.get_actor(name)
        made.close()
        made.close()
        with pytest.raises(ValueError, match="Failed to look up actor"):
            ray.get_actor(name)
        with pytest.raises(RlixError, match="not built"):
            made.generate([[3]])
        with pytest.raises(RlixError, match="not built"):
            made.cuda()
    assert all(name.split(":")[0] not in actor for actor in ray.util.list_named_actors() for name in names)


def test_older_names_resolve_and_none_costs_an_import_of_torch() -> None:
    assert rlix.RLiteInferenceEngine is rlix.RliteInferenceEngine is InferenceEngine
    assert rlix.RLiteTrainEngine is rlix.RliteTrainEngine is rlix.TrainEngine
    assert str(rlix.device("meta")) == "meta"
    lazy = "import rlix, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", lazy], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout.strip() == "False"


def test_layouts_that_cannot_be(ray_session: Any, path: Path) -> None:
    with pytest.raises(ValueError, match="unknown executor"):
        InferenceEngine(path, executor="tgi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9 device"):
        InferenceEngine(path).build(data_parallel_size=9)
    with pytest.raises(ValueError, match=r"on nodes 203\.0\.113\.9"):
        InferenceEngine(path).build(acceptable_node_ips=["203.0.113.9"])
    before = set(ray.util.list_named_actors())
    with pytest.raises(WorkerError, match="layers"):
        InferenceEngine(qwen(use_sliding_window=True, sliding_window=8, max_window_layers=0)).build()
    assert set(ray.util.list_named_actors()) <= before
