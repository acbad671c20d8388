from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlix import InferenceEngine
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train.engine import TrainEngine
from rlix.protocol.errors import NotResidentError, StaleEpochError, WeightSyncError, WorkerError
from tests.engine.models import folder, greedy, model, qwen
from tests.engine.training_models import Policy, batch, policy

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10], [11]]

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def trainer(ray_session: Any) -> Iterator[TrainEngine]:
    with TrainEngine(policy()) as engine:
        yield engine.build(tensor_parallel_size=2, seed=11, devices=pool_devices()[:2])


@pytest.fixture(scope="module")
def rollout(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    path = folder(tmp_path_factory.mktemp("model"), seed=0)
    with InferenceEngine(path) as engine:
        yield engine.build(data_parallel_size=2, devices=pool_devices()[2:4])


def answers(engine: InferenceEngine) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def expected(module: torch.nn.Module) -> list[tuple[int, ...]]:
    return [greedy(module, tuple(prompt), 8) for prompt in PROMPTS]


def test_every_replica_answers_with_the_weights_of_all_shards(trainer: TrainEngine, rollout: InferenceEngine) -> None:
    before = answers(rollout)
    trainer.train_step(NeedParallel(batch(trainer.version)))
    report = trainer.p2p_weight_sync(rollout)
    state = trainer.state_dict()
    trained = model(0)
    trained.load_state_dict(state)
    outputs = rollout.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected(trained) != before
    assert {output.outputs[0].weight_version for output in outputs} == {report.version} == {trainer.version}
    assert report.nbytes == 2 * sum(tensor.nbytes for tensor in state.values())  # two replicas, each byte once
    assert {entry.name for entry in report.manifest.entries} == state.keys()


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
        report = trainer.p2p_weight_sync(engine)
        assert {entry.aliases for entry in report.manifest.entries if entry.aliases} == {("lm_head.weight",)}
        assert report.nbytes == sum(p.nbytes for p in model(7, tied).parameters())
        assert answers(engine) == expected(model(7, tied))


def test_weights_that_do_not_fit_are_listed_and_nothing_is_changed(trainer: TrainEngine, tmp_path: Path) -> None:
    other, version = qwen(num_hidden_layers=3, vocab_size=90), trainer.version
    with InferenceEngine(folder(tmp_path, 5, other)).build(data_parallel_size=2) as engine:
        with pytest.raises(WeightSyncError, match="nothing was changed") as caught:
            trainer.p2p_weight_sync(engine)
        for problem in ("not published: model.layers.2", "shape of lm_head.weight: published [97, 64], here [90, 64]"):
            assert problem in str(caught.value)
        assert answers(engine) == expected(model(5, other))
    assert trainer.version == version
    assert trainer.count(NeedParallel(batch(0))) == 9


def test_where_one_replica_cannot_take_them_none_does(trainer: TrainEngine, rollout: InferenceEngine) -> None:
    trainer.p2p_weight_sync(rollout)
    before, version = answers(rollout), trainer.version
    trainer.train_step(NeedParallel(batch(trainer.version)))
    rollout.replicas.run("offload", None, True, ranks=[1], timeout_s=60.0)
    with pytest.raises(NotResidentError, match=r"rank 1 failed in check_update.*call cuda"):
        trainer.p2p_weight_sync(rollout)
    with pytest.raises(NotResidentError, match=r"rank 1 failed in check_update.*call cuda"):
        rollout.update_weights(trainer.publish(version + 5))
    trainer.version = version
    rollout.cuda()
    assert answers(rollout) == before  # of both replicas
    trainer._epoch = 3  # a handle that missed the change of hands
    with pytest.raises(StaleEpochError, match="epoch 3 refused"):
        trainer.p2p_weight_sync(rollout)
    trainer._epoch = None
    trainer.p2p_weight_sync(rollout)
    assert trainer.version == version + 1  # what was refused has used up no number
    assert answers(rollout) != before


def test_a_replica_that_has_died_is_named(trainer: TrainEngine, tmp_path: Path) -> None:
    with InferenceEngine(folder(tmp_path, 0)).build(data_parallel_size=2) as engine:
        engine.replicas.kill(1)
        with pytest.raises(WorkerError, match=r"rank 1 died before it answered check_update\(\)"):
            trainer.p2p_weight_sync(engine)
    assert trainer.count(NeedParallel(batch(0))) == 9


def test_a_backend_that_moves_nothing_has_taken_no_weights(trainer: TrainEngine) -> None:
    idle = SimpleNamespace(
        name="idle", check_weights=lambda _: None, update_weights=lambda _: [SimpleNamespace(bytes=0)]
    )
    with pytest.raises(WeightSyncError, match=r"idle was sent weight version \d+ and reports that no byte moved"):
        trainer.p2p_weight_sync(idle)


def test_what_weights_are_said_to_answer_is_read_with_them(
    trainer: TrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that trains between two calls would make it another version's answer, and replicas fail by it."""
    monkeypatch.setattr(trainer, "_asked", (None, 0))
    methods: list[str] = []
    send = trainer._send

    def noted(call: Any, method: str, *args: Any, **more: Any) -> None:
        methods.append(method)
        send(call, method, *args, **more)

    monkeypatch.setattr(trainer, "_send", noted)
    published = trainer.publish()
    assert published.known is not None
    assert methods == ["held_weights", "publish"]
