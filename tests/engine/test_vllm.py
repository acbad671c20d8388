import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import rlix.nn
from rlix import InferenceEngine
from rlix.engine import lora
from rlix.engine.inference.requests import GenerationRequest, continued
from rlix.engine.lora import AdapterConfig
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights.boxes import whole
from rlix.engine.weights.buckets import WeightSlice
from rlix.engine.weights.publication import PublishedAdapter, PublishedWeights, named_weights, publish
from rlix.node import process
from rlix.node.device_lock import LockRecord
from rlix.node.node import Node
from rlix.protocol.errors import NotResidentError, WeightSyncError, WorkerError
from rlix.protocol.messages import Fence, Process
from tests.engine.models import VOCABULARY, folder, greedy, logprobs, model, qwen
from tests.engine.training_models import Policy

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
]

WAIT_S = 300.0
CONFIG = qwen(hidden_size=128)  # vLLM's CPU attention wants heads of at least 32
PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    path: Path = folder(tmp_path_factory.mktemp("model"), seed=0, config=CONFIG)
    made = InferenceEngine(path, executor="vllm").build(max_model_len=256, max_num_seqs=16)
    yield made
    made.close()


def stored(seed: int, version: int) -> PublishedWeights:
    return publish(named_weights(model(seed, CONFIG)).items(), version)


def answers(engine: InferenceEngine) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in engine.generate([list(p) for p in PROMPTS], GREEDY)]


def expected(seed: int) -> list[tuple[int, ...]]:
    return [greedy(model(seed, CONFIG), prompt, 16) for prompt in PROMPTS]


def test_greedy_equals_plain_transformers(engine: InferenceEngine) -> None:
    assert answers(engine) == expected(0)


def test_sampling_is_seeded_per_request_and_logprobs_are_raw(engine: InferenceEngine) -> None:
    params = {"max_tokens": 16, "temperature": 0.7, "top_k": 20, "seed": 4, "ignore_eos": True}
    first, again, other = (
        output.outputs[0] for output in engine.generate([list(PROMPTS[0])] * 3, [params, params, {**params, "seed": 5}])
    )
    assert first.token_ids == again.token_ids != other.token_ids
    recomputed = logprobs(model(0, CONFIG), PROMPTS[0], first.token_ids)
    assert torch.allclose(torch.tensor(first.logprobs), recomputed, atol=1e-4)


def test_abort_keeps_tokens_and_the_rest_can_be_resumed(engine: InferenceEngine) -> None:
    (replica,) = engine.replicas.handles
    request = GenerationRequest("a", PROMPTS[0], 240, temperature=0.0)
    running = replica.generate.remote([request])
    ray.get(replica.abort.remote(["a"]), timeout=WAIT_S)
    (first,) = ray.get(running, timeout=WAIT_S)
    assert (first.finished, first.finish_reason) == (False, "abort")
    assert len(first.token_ids) == len(first.logprobs) < 240
    (second,) = ray.get(replica.generate.remote([continued(request, first)]), timeout=WAIT_S)
    assert (second.finished, len(first.token_ids + second.token_ids)) == (True, 240)


def test_weights_are_replaced_in_place(engine: InferenceEngine) -> None:
    (report,) = engine.update_weights(stored(4, version=9))
    assert report.bytes == sum(p.nbytes for p in model(4, CONFIG).parameters())
    assert answers(engine) == expected(4) != expected(0)
    with pytest.raises(WeightSyncError, match="nothing was changed"):
        engine.update_weights(publish([], 10))
    engine.meta()
    with pytest.raises(NotResidentError, match="call cuda"):
        answers(engine)
    engine.cuda(weights=stored(5, version=11))
    assert answers(engine) == expected(5)
    engine.meta()
    engine.cuda()
    assert answers(engine) == expected(0)


def test_a_trainers_weights_replace_those_of_cached_prefixes(engine: InferenceEngine) -> None:
    long = list(range(3, 90)) * 2  # several blocks of vLLM's cache
    engine.generate([long], GREEDY)  # leaves them there, computed with the old weights
    with TrainEngine((Policy, CONFIG)).build(seed=3) as trainer:
        report = trainer.p2p_weight_sync(engine)
        trained = model(0, CONFIG)
        trained.load_state_dict(trainer.state_dict())
    (output,) = engine.generate([long], GREEDY)
    assert output.outputs[0].token_ids == greedy(trained, tuple(long), 16)
    assert output.outputs[0].weight_version == report.version
    engine.meta()
    engine.cuda()
    assert answers(engine) == expected(0)


def test_a_token_outside_the_vocabulary_harms_no_later_call(engine: InferenceEngine) -> None:
    (replica,) = engine.replicas.handles
    with pytest.raises(ValueError, match="token 97 is not in"):
        ray.get(replica.generate.remote([GenerationRequest("bad", (VOCABULARY,), 4)]), timeout=WAIT_S)
    assert answers(engine) == expected(0)


def test_options_of_its_own_are_passed_through_and_checked(ray_session: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", seed=0, config=CONFIG)
    with pytest.raises(WorkerError, match=r"'blok_size': vLLM .* has no such option; did you mean 'block_size'\?"):
        InferenceEngine(path, executor="vllm").build(max_model_len=64, executor_options={"blok_size": 16})


def test_worker_processes_hold_their_devices_themselves(ray_session: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", seed=0, config=CONFIG)
    with InferenceEngine(path, executor="vllm") as engine:
        engine.build(tensor_parallel_size=2, max_model_len=64, max_num_seqs=4)
        node = Node("here")
        parent, *workers = _by_start(node.holders(engine.devices))
        assert len(workers) == 2
        assert {worker.pid for worker in workers} <= {child.pid for child in process.descendants(parent)}
        _updates_move_what_each_worker_holds(engine)
        engine.meta()
        assert node.holders(engine.devices) == {}
        engine.replicas.run("load", None, Fence(__name__, 1, "a job"), timeout_s=WAIT_S)
        engine.replicas.run("load", None, Fence(__name__, 2, "a job"), timeout_s=WAIT_S)  # workers change with it
        held = node.holders(engine.devices)
        assert _by_start(held) == [parent, *workers]
        assert {record.fence.epoch for record in held.values()} == {2}

        engine.replicas.kill(0)  # which waits for its workers too
        assert not any(process.alive(worker) for worker in workers)
        assert node.holders(engine.devices) == {}


def _updates_move_what_each_worker_holds(engine: InferenceEngine) -> None:
    """Published by two ranks, each half of every tensor's rows; bytes are those that reach workers."""
    new = named_weights(model(4, CONFIG))
    halves = [
        (WeightSlice(name, tuple(tensor.shape), ((first, last), *whole(tensor.shape[1:]))), tensor[first:last])
        for name, tensor in new.items()
        for first, last in ((0, len(tensor) // 2), (len(tensor) // 2, len(tensor)))
    ]
    both = 2 * sum(tensor.nbytes for tensor in new.values())
    on_both = sum(tensor.nbytes for name, tensor in new.items() if "norm" in name or name.endswith("o_proj.bias"))
    for published in (publish(halves, 1), stored(5, 2)):
        (report,) = engine.update_weights(published)
        assert report.bytes == both // 2 + on_both
        assert answers(engine) == expected(3 + report.version)


def _by_start(holders: dict[int, LockRecord]) -> list[Process]:
    """The processes of a bundle's devices, which are the same for each; the oldest first."""
    (processes,) = {record.processes for record in holders.values()}
    return sorted((replace(p, name="") for p in processes), key=lambda p: p.started)


ADAPTERS = {"a": AdapterConfig(2, 8.0, targets=("q_proj", "v_proj")), "b": AdapterConfig(8, 8.0)}


def adapter(name: str, version: int) -> tuple[Any, PublishedAdapter]:
    """The plain model with an adapter, and the adapter alone."""
    made = model(0, CONFIG)
    lora.add(made, name, ADAPTERS[name])
    torch.manual_seed(10 * version + len(name))
    with torch.no_grad():
        for parameter in lora.parameters(made, name).values():
            parameter.normal_(std=0.2)
    lora.use(made, name)
    named = [(key, value.detach()) for key, value in lora.parameters(made, name).items()]
    return made.eval(), PublishedAdapter(name, ADAPTERS[name], publish(named, version))


def test_one_replica_serves_many_adapters_in_place(ray_session: Any, tmp_path: Path) -> None:
    path = folder(tmp_path, seed=0, config=CONFIG)
    base = stored(0, 1)
    prompt = tuple(range(3, 40))  # long enough for blocks of the prefix cache
    (plain_1, a1), (plain_2, a2), (plain_b, b3) = adapter("a", 1), adapter("a", 2), adapter("b", 3)

    def check(engine: InferenceEngine, versions: dict[str, int], plain: dict[str, Any]) -> None:
        asked = [
            GenerationRequest(f"{name}/{i}", prompt, 12, temperature=1.0, seed=i, adapter=name)
            for i in range(3)
            for name in plain
        ]
        (found,) = engine.replicas.run("generate", asked, ranks=[0], timeout_s=WAIT_S)
        for request, result in zip(asked, found, strict=True):
            wanted = logprobs(plain[request.adapter], prompt, result.token_ids)
            assert torch.allclose(torch.tensor(result.logprobs), wanted, atol=1e-4), request.id
            assert set(result.versions) == {versions[request.adapter]}

    with InferenceEngine(path, executor="vllm") as engine:
        engine.build(max_model_len=128, max_num_seqs=16, adapters=3, adapter_rank=8, load=False)
        engine.cuda(weights=replace(base, version=7, adapters=(a1, b3)))
        check(engine, {"a": 1, "b": 3, "": 7}, {"a": plain_1, "": model(0, CONFIG), "b": plain_b})
        nowhere = PublishedAdapter("nowhere", AdapterConfig(2, 8.0, targets=("query",)), a1.weights)
        mixed_up = PublishedAdapter("mixed_up", ADAPTERS["b"], a1.weights)
        (report,) = engine.update_weights(replace(base, version=8, adapters=(nowhere, a2, mixed_up, b3)))
        assert report.bytes == sum(entry.nbytes for entry in a2.weights.manifest.entries)
        check(engine, {"a": 2, "b": 3, "": 8}, {"b": plain_b, "a": plain_2, "": model(0, CONFIG)})
        for name, why in (("nowhere", "no linear layers"), ("mixed_up", "does not fit")):
            asked = [GenerationRequest(name, prompt, 12, adapter=name)]
            with pytest.raises(ValueError, match=f"adapter '{name}' cannot be served: .*{why}"):
                ray.get(engine.replicas.handles[0].generate.remote(asked), timeout=WAIT_S)
        engine.update_weights(replace(stored(0, 9), adapters=(b3,)))  # vLLM drops all adapters with its weights
        check(engine, {"b": 3, "": 9}, {"b": plain_b, "": model(0, CONFIG)})
        engine.meta()
        engine.cuda()  # the folder's own weights, in an engine that was started without them
        assert answers(engine) == expected(0)


def test_experts_are_replaced_in_place(ray_session: Any, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **{name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "initializer_range", "pad_token_id")},
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )

    def moe(seed: int) -> Qwen3MoeForCausalLM:
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).eval()

    def check(engine: InferenceEngine, seed: int) -> None:
        for prompt, output in zip(PROMPTS, engine.generate([list(p) for p in PROMPTS], GREEDY), strict=True):
            (answer,) = output.outputs
            wanted = logprobs(moe(seed), prompt, answer.token_ids)
            assert torch.allclose(torch.tensor(answer.logprobs), wanted, atol=1e-4)

    moe(0).save_pretrained(tmp_path)
    with InferenceEngine(tmp_path, executor="vllm") as engine:
        engine.build(max_model_len=64, max_num_seqs=4)
        check(engine, 0)
        for version in (1, 2):
            engine.update_weights(publish(named_weights(moe(version)).items(), version))
            check(engine, version)
        engine.meta()
        engine.cuda()
        check(engine, 0)
        with TrainEngine((MoePolicy, config)).build(seed=3) as trainer:
            trainer.p2p_weight_sync(engine)
            trained = moe(0)
            trained.load_state_dict(trainer.state_dict())
        answer = engine.generate([list(PROMPTS[0])], GREEDY)[0].outputs[0]
        wanted = logprobs(trained, PROMPTS[0], answer.token_ids)
        assert torch.allclose(torch.tensor(answer.logprobs), wanted, atol=1e-4)


class MoePolicy(rlix.nn.HuggingFaceFsdp2TrainModule, Qwen3MoeForCausalLM):
    pass


def test_streams_and_turns(engine: InferenceEngine) -> None:
    async def collect() -> list[Any]:
        return [chunk async for chunk in engine.stream(list(PROMPTS[0]), GREEDY)]

    chunks = asyncio.run(collect())
    assert len(chunks) > 1
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected(0)[0]
    (output,) = engine.generate([list(PROMPTS[0])], GREEDY, on_turn=lambda turn: [20, 21] if turn.number == 1 else None)
    prefix = expected(0)[0] + (20, 21)
    assert output.outputs[0].token_ids == prefix + greedy(model(0, CONFIG), PROMPTS[0] + prefix, 16)
    assert output.outputs[0].generated == (True,) * 16 + (False,) * 2 + (True,) * 16
