from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlix import InferenceEngine
from rlix.engine.life_cycle import WeightsId
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights import sync
from rlix.engine.weights.buckets import Manifest, WeightEntry
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.shards import everything
from rlix.engine.weights.sync import choose
from rlix.protocol.errors import NotResidentError, StaleEpochError, WaitTimeoutError, WeightSyncError, WorkerError
from rlix.protocol.messages import Device, DeviceKind, Process
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
    monkeypatch.setattr(sync, "CHANNEL_BUCKET_BYTES", 2**14)


def answers(engine: InferenceEngine) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def expected(module: torch.nn.Module) -> list[tuple[int, ...]]:
    return [greedy(module, tuple(prompt), 8) for prompt in PROMPTS]


@pytest.mark.ray
@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("transport", ["direct", "p2p", "host", "auto"])
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
    assert report.transports == ({"p2p": "p2p", "host": "host"}.get(transport, "shm"),)
    assert report.nbytes == 2 * sum(tensor.nbytes for tensor in state.values())  # two replicas, each byte once
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
        report = trainer.p2p_weight_sync(engine, transport="direct")
        assert [entry.aliases for entry in report.manifest.entries if entry.aliases] == [("lm_head.weight",)]
        assert answers(engine) == expected(model(7, tied))


@pytest.mark.ray
def test_weights_that_do_not_fit_are_listed_and_nothing_is_changed(trainer: TrainEngine, tmp_path: Path) -> None:
    other = qwen(num_hidden_layers=3, vocab_size=90)
    with InferenceEngine(folder(tmp_path, 5, other)).build(data_parallel_size=2) as engine:
        with pytest.raises(WeightSyncError, match="nothing was changed") as caught:
            trainer.p2p_weight_sync(engine, transport="direct")
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
        trainer.p2p_weight_sync(rollout, transport="direct")
    rollout.cuda()
    assert answers(rollout) == before  # replica 0 was told to stop waiting, and has what it had
    trainer._epoch = 3  # a handle that missed the change of hands
    with pytest.raises(StaleEpochError, match="epoch 3 refused"):
        trainer.p2p_weight_sync(rollout, transport="direct")
    trainer._epoch = None
    rollout.cuda()
    trainer.p2p_weight_sync(rollout, transport="direct")
    assert trainer.version > version + 1  # no two attempts share a number


@pytest.mark.ray
def test_a_replica_that_has_died_is_named(trainer: TrainEngine, tmp_path: Path) -> None:
    with InferenceEngine(folder(tmp_path, 0)).build(data_parallel_size=2) as engine:
        engine.replicas.kill(1)
        with pytest.raises(WorkerError, match=r"rank 1 died before it answered weight_layouts\(\)"):
            trainer.p2p_weight_sync(engine, transport="direct")
    assert trainer.count(NeedParallel(batch(0))) == 9


@pytest.mark.ray
def test_only_named_tensors_move(trainer: TrainEngine, rollout: InferenceEngine) -> None:
    trainer.p2p_weight_sync(rollout)
    before, old = answers(rollout), trainer.state_dict()
    trainer.train_step(NeedParallel(batch(3)))
    report = trainer.p2p_weight_sync(rollout, names=["lm_head.weight"])
    state = trainer.state_dict()
    assert report.nbytes == 2 * state["lm_head.weight"].nbytes
    mixed = model(0)
    mixed.load_state_dict({**old, "lm_head.weight": state["lm_head.weight"]})
    assert answers(rollout) == expected(mixed)
    rollout.cuda(weights=trainer.publish())
    rollout.update_weights(trainer.publish())  # somebody else's version in between
    with pytest.raises(WeightSyncError, match="onto this trainer's version"):
        trainer.p2p_weight_sync(rollout, names=["lm_head.weight"])
    rollout.cuda()
    trainer.p2p_weight_sync(rollout)
    assert answers(rollout) != before
    with pytest.raises(ValueError, match="through host memory all tensors move"):
        trainer.p2p_weight_sync(rollout, names=["lm_head.weight"], transport="host")


@pytest.mark.ray
def test_a_receiver_that_does_not_come_is_a_bounded_wait(trainer: TrainEngine) -> None:
    class Absent:
        name = "absent"
        receivers = ((pool_devices()[5],),)
        processes: dict[int, Process] = {}  # noqa: RUF012

        def weight_layouts(self, offered: PublishedWeights) -> list[list[Layout]]:
            return [[everything(offered.manifest)]]

        def join_channel(self, tickets: Any) -> None: ...

        def leave_channel(self, channel: str) -> None: ...

        def update_weights(self, published: PublishedWeights) -> None:
            raise AssertionError

    with pytest.raises(WaitTimeoutError, match=r"rank \d waited 5 s for absent.*, replica 0 to say 'come'"):
        trainer.p2p_weight_sync(Absent(), timeout_s=5.0)
    assert trainer.count(NeedParallel(batch(0))) == 9


@pytest.mark.ray
def test_an_unknown_transport_is_refused(trainer: TrainEngine, rollout: InferenceEngine) -> None:
    with pytest.raises(ValueError, match="unknown transport 'nccl'"):
        trainer.p2p_weight_sync(rollout, transport="nccl")  # type: ignore[arg-type]


def device(number: int, kind: DeviceKind = DeviceKind.CUDA, node: str = "node") -> Device:
    return Device(number, node, "203.0.113.9", number, kind)


def test_direct_takes_the_shortest_way_between_any_two() -> None:
    sources = [device(0), device(1)]
    way = choose("direct", sources, [(device(1), device(2)), (device(3, node="other"),)])
    assert way is not None
    assert [[way(source, target) for target in range(3)] for source in range(2)] == [
        ["shm", "shm", "p2p"],
        ["ipc", "shm", "p2p"],
    ]
    messages = choose("p2p", sources, [(device(2),)])
    assert messages is not None
    assert messages(0, 0) == "p2p"
    virtual = choose("auto", [device(0, DeviceKind.CPU)], [(device(0, DeviceKind.CPU),)])
    assert virtual is not None
    assert virtual(0, 0) == "shm"


def test_on_gpus_auto_is_the_plain_way() -> None:
    assert choose("auto", [device(0)], [(device(0),)]) is None
    assert choose("auto", [device(0)], [(device(1, DeviceKind.CPU),)]) is None
    assert choose("host", [device(0, DeviceKind.CPU)], [(device(1, DeviceKind.CPU),)]) is None


@pytest.mark.parametrize(
    ("transport", "receivers", "message"),
    [
        ("p2p", [(device(0),)], r"a GPU of its own.*\[0, 0\]"),
        ("p2p", [(device(1),), (device(1),)], "a GPU of its own"),
        ("direct", [(device(1, DeviceKind.CPU),)], "from GPUs to virtual ones"),
    ],
)
def test_a_transport_that_cannot_reach_a_receiver_says_why(transport: Any, receivers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(transport, [device(0)], receivers)


def test_a_wrong_name_costs_no_channel_and_a_new_one_knows_what_the_last_one_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Any] = []

    class Fake(sync.Channel):
        manifest = Manifest((WeightEntry("w", "float32", (1,), 0, 0),))

        def __init__(self, trainer: Any, *_: Any) -> None:
            self._trainer, self.synced = trainer, None
            opened.append(self)

        def leads_to(self, engine: Any) -> bool:
            return True

        def transfer(self, version: int, only: Any, epoch: int | None, known: object) -> int:
            self.synced = WeightsId(version)
            return 0

        def close(self) -> None: ...

    monkeypatch.setattr(sync, "Channel", Fake)
    channels, engine = sync.Channels(SimpleNamespace(name="trainer")), SimpleNamespace(name="infer")  # type: ignore[arg-type]
    asked: dict[str, Any] = {"way": None, "timeout_s": 1.0, "epoch": None}
    channels.transfer(engine, 1, transport="direct", only=None, **asked)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match="trainer has no weights of these names: v"):
        channels.transfer(engine, 2, transport="direct", only=["v"], **asked)  # type: ignore[arg-type]
    assert len(opened) == 1
    with pytest.raises(WeightSyncError, match="of these names: v"):  # opened anew, because it is another way
        channels.transfer(engine, 3, transport="p2p", only=["v"], **asked)  # type: ignore[arg-type]
    assert [channel.synced for channel in opened] == [WeightsId(1)] * 2


def test_names_are_no_text() -> None:
    with pytest.raises(TypeError, match=r"names are several.*'lm_head'"):
        TrainEngine(policy()).p2p_weight_sync(None, names="lm_head")  # type: ignore[arg-type]
