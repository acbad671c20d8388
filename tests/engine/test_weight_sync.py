from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlix import InferenceEngine
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train import state_calls
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.sync import choose
from rlix.protocol.errors import NotResidentError, StaleEpochError, WaitTimeoutError, WeightSyncError, WorkerError
from rlix.protocol.messages import Device, DeviceKind
from tests.engine.models import folder, greedy, model, qwen
from tests.engine.training_models import Policy, batch, policy

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10], [11]]


@pytest.fixture(scope="module")
def trainer(ray_session: Any) -> Iterator[TrainEngine]:
    with TrainEngine(policy()) as engine:
        yield engine.build(tensor_parallel_size=2, seed=11, devices=pool_devices()[:2])


@pytest.fixture(scope="module")
def rollout(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    path = folder(tmp_path_factory.mktemp("model"), seed=0)
    with InferenceEngine(path) as engine:
        yield engine.build(data_parallel_size=2, devices=pool_devices()[2:4])


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_calls, "DEVICE_BUCKET_BYTES", 2**16)


def answers(engine: InferenceEngine) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def expected(module: torch.nn.Module) -> list[tuple[int, ...]]:
    return [greedy(module, tuple(prompt), 8) for prompt in PROMPTS]


@pytest.mark.ray
@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("transport", ["broadcast", "host", "auto"])
def test_every_replica_answers_with_the_weights_of_all_shards(
    trainer: TrainEngine, rollout: InferenceEngine, transport: Any
) -> None:
    before = answers(rollout)
    trainer.train_step(NeedParallel(batch(trainer.version)))
    report = trainer.p2p_weight_sync(rollout, transport=transport)
    state = trainer.state_dict()
    trained = model(0)
    trained.load_state_dict(state)
    outputs = rollout.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected(trained) != before
    assert {output.outputs[0].weight_version for output in outputs} == {report.version} == {trainer.version}
    assert report.transports == (("broadcast",) if transport == "broadcast" else ("host",))
    assert {entry.name for entry in report.manifest.entries} == state.keys()


@pytest.mark.ray
def test_tied_weights_travel_once(ray_session: Any) -> None:
    tied = qwen(tie_word_embeddings=True)
    given = model(7, tied).state_dict()
    with TrainEngine((Policy, tied)) as trainer, InferenceEngine(tied) as engine:
        trainer.build(tensor_parallel_size=2)
        engine.build(load=False)
        del given["lm_head.weight"]
        trainer.load_state_dict(given)  # one of the names is enough
        state = trainer.state_dict()
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
        trainer.load_state_dict(state)
        engine.cuda(weights=trainer.publish())
        report = trainer.p2p_weight_sync(engine, transport="broadcast")
        assert [entry.aliases for entry in report.manifest.entries if entry.aliases] == [("lm_head.weight",)]
        assert answers(engine) == expected(model(7, tied))


@pytest.mark.ray
def test_weights_that_do_not_fit_are_listed_and_nothing_is_changed(trainer: TrainEngine, tmp_path: Path) -> None:
    other = qwen(num_hidden_layers=3, vocab_size=90)
    with InferenceEngine(folder(tmp_path, 5, other)).build(data_parallel_size=2) as engine:
        with pytest.raises(WeightSyncError, match="nothing was changed") as caught:
            trainer.p2p_weight_sync(engine, transport="broadcast")
        for problem in ("not published: model.layers.2", "shape of lm_head.weight: published [97, 64], here [90, 64]"):
            assert problem in str(caught.value)
        engine.cuda()
        assert answers(engine) == expected(model(5, other))
    assert trainer.count(NeedParallel(batch(0))) == 9


@pytest.mark.ray
def test_one_side_that_cannot_stops_all_at_once(trainer: TrainEngine, rollout: InferenceEngine) -> None:
    trainer.p2p_weight_sync(rollout, transport="host")
    before, version = answers(rollout), trainer.version
    rollout.replicas.run("offload", None, True, ranks=[1], timeout_s=60.0)
    with pytest.raises(NotResidentError, match=r"rank 1 failed in update.*call cuda"):
        trainer.p2p_weight_sync(rollout, transport="broadcast")
    rollout.cuda()
    assert answers(rollout) == before  # replica 0 was told to stop waiting, and has what it had
    trainer._epoch = 3  # a handle that missed the change of hands
    with pytest.raises(StaleEpochError, match="epoch 3 refused"):
        trainer.p2p_weight_sync(rollout, transport="broadcast")
    trainer._epoch = None
    rollout.cuda()
    trainer.p2p_weight_sync(rollout, transport="broadcast")
    assert trainer.version > version + 1  # no two attempts share a number


@pytest.mark.ray
def test_a_replica_that_has_died_is_named(trainer: TrainEngine, tmp_path: Path) -> None:
    with InferenceEngine(folder(tmp_path, 0)).build(data_parallel_size=2) as engine:
        engine.replicas.kill(1)
        with pytest.raises(WorkerError, match=r"rank 1 failed in update\(\): ActorDiedError"):
            trainer.p2p_weight_sync(engine, transport="broadcast")
    assert trainer.count(NeedParallel(batch(0))) == 9


@pytest.mark.ray
def test_a_receiver_that_does_not_come_is_a_bounded_wait(trainer: TrainEngine) -> None:
    class Absent:
        name = "absent"
        receivers = ((pool_devices()[5],),)

        def update_weights(self, published: PublishedWeights) -> None:
            assert published.rendezvous is not None

    with pytest.raises(WaitTimeoutError, match=r"training rank 0 waited 0\.2 s for absent, replica 0 to say 'ready'"):
        trainer.p2p_weight_sync(Absent(), transport="broadcast", timeout_s=0.2)
    assert trainer.count(NeedParallel(batch(0))) == 9


@pytest.mark.ray
def test_cuda_ipc_is_refused_on_virtual_gpus(trainer: TrainEngine, rollout: InferenceEngine) -> None:
    with pytest.raises(ValueError, match='"ipc" is for CUDA; on virtual GPUs use "host"'):
        trainer.p2p_weight_sync(rollout, transport="ipc")
    with pytest.raises(ValueError, match="unknown transport 'nccl'"):
        trainer.p2p_weight_sync(rollout, transport="nccl")  # type: ignore[arg-type]
    assert ray.is_initialized()


def device(number: int, kind: DeviceKind = DeviceKind.CUDA) -> Device:
    return Device(number, "node", "203.0.113.9", number, kind)


def test_auto_takes_the_shortest_way_to_each_receiver() -> None:
    source, beside, away = device(0), (device(0),), (device(1),)
    assert choose("auto", source, [beside]) == (("ipc",),)
    assert choose("auto", source, [beside, away]) == (("ipc",), ("broadcast",))
    assert choose("auto", source, [(device(0), device(1)), (device(2), device(3))]) == (
        ("ipc", "broadcast"),
        ("broadcast", "broadcast"),
    )
    assert choose("broadcast", source, [away, (device(2),)]) == (("broadcast",), ("broadcast",))
    assert choose("auto", source, [away, away]) is None  # NCCL takes a GPU once
    assert choose("auto", source, [(device(1, DeviceKind.CPU),)]) is None
    assert choose("auto", device(0, DeviceKind.CPU), [(device(1, DeviceKind.CPU),)]) is None
    assert choose("host", source, [beside]) is None


@pytest.mark.parametrize(
    ("transport", "receivers", "message"),
    [
        ("broadcast", [(device(0),)], r"a GPU of its own.*\[0, 0\]"),
        ("broadcast", [(device(1),), (device(1),)], "a GPU of its own"),
        ("broadcast", [(device(1, DeviceKind.CPU),)], "from GPUs to virtual ones"),
        ("ipc", [(device(0),), (device(1),)], r"stays on device 0, but receivers are on \[1\]"),
    ],
)
def test_a_transport_that_cannot_reach_a_receiver_says_why(transport: Any, receivers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(transport, device(0), receivers)
