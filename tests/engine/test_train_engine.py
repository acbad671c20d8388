from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlix.engine import placement
from rlix.engine.life_cycle import Residency
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.executor import register
from rlix.engine.weights import publication
from rlix.protocol.errors import NotResidentError, RlixError, StaleEpochError, WeightSyncError, WorkerError
from rlix.protocol.messages import Device, DeviceKind, Fence
from tests.engine.models import qwen
from tests.engine.training_models import OneBatch, Policy, batch, policy

pytestmark = [pytest.mark.ray]
STEPS = 20


@pytest.fixture(scope="module")
def engines(ray_session: Any) -> Iterator[dict[str, TrainEngine]]:
    """The same model on one rank, on two that share its shards, on two that each hold it, and on two of which each
    computes on its half of every sequence."""
    layouts: dict[str, tuple[dict[str, int], slice]] = {
        "one": ({}, slice(0, 1)),
        "sharded": ({"tensor_parallel_size": 2, "data_parallel_size": 1}, slice(1, 3)),
        "replicated": ({"data_parallel_size": 2}, slice(3, 5)),
        "stretches": ({"sequence_parallel_size": 2, "shard": 2}, slice(5, 7)),
    }
    engines = {name: TrainEngine(policy(), name=name) for name in layouts}
    devices = pool_devices()

    def build(name: str) -> None:
        sizes, where = layouts[name]
        engines[name].build(**sizes, devices=devices[where], seed=11)  # type: ignore[arg-type]

    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(build, layouts))
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


@pytest.fixture(scope="module")
def initial(engines: dict[str, TrainEngine], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state that every test starts from."""
    folder = tmp_path_factory.mktemp("initial") / "state"
    engines["one"].save_state(folder)
    return folder


@pytest.fixture(params=["one", "sharded", "replicated", "stretches"])
def engine(request: pytest.FixtureRequest, engines: dict[str, TrainEngine], initial: Path) -> TrainEngine:
    engines[request.param].load_state(initial)
    return engines[request.param]


@pytest.fixture
def one(engines: dict[str, TrainEngine], initial: Path) -> TrainEngine:
    engines["one"].load_state(initial)
    return engines["one"]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """Losses of the same training in plain PyTorch."""
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(qwen())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=50)
    losses = []
    for step in range(STEPS):
        tokens = torch.tensor(batch(step))
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(engine: TrainEngine, steps: range) -> list[float]:
    return [engine.train_step(NeedParallel(batch(step)))["loss"] for step in steps]


def gathered(published: publication.PublishedWeights) -> dict[str, torch.Tensor]:
    return {entry.name: tensor for entry, tensor in publication.stream(published)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_training_equals_plain_pytorch_on_every_layout(engine: TrainEngine, reference: list[float]) -> None:
    tolerance = 1e-6 if len(engine.devices) == 1 else 1e-5  # sums over ranks are ordered differently
    assert train(engine, range(STEPS)) == pytest.approx(reference, rel=tolerance)


def test_published_weights_are_the_same_from_every_layout_and_apply_exactly(engine: TrainEngine) -> None:
    torch.manual_seed(11)
    expected = Qwen2ForCausalLM(qwen())
    published = engine.publish(version=41, bucket_bytes=2**16)
    target = Qwen2ForCausalLM(qwen())
    publication.apply(target, published)
    assert (published.version, engine.version, len(published.buckets) > 1) == (41, 41, True)
    assert engine.publish().version == 42
    for name, tensor in expected.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_a_split_batch_comes_back_in_order(
    engine: TrainEngine, one: TrainEngine, engines: dict[str, TrainEngine]
) -> None:
    ids = batch(1)
    scores = engine.score(NeedParallel(ids))
    assert scores.shape == (9,)
    assert torch.allclose(scores, one.score(ids), rtol=1e-4)
    ranks = 1 if engine is engines["stretches"] else len(engine.devices)
    assert engine.where() == [(rank, ranks) for rank in range(ranks)]
    assert engine.count(NeedParallel(ids)) == 9
    assert engine.numbers() == [0, 1, 2]
    uneven = [[0] * length for length in (1, 2, 3, 4, 5)]
    assert engine.mean_length(NeedParallel(uneven)) == pytest.approx({"length": 3.0})
    assert engine.score(NeedParallel(ids[:1], pad=True)).shape == (1,)


def test_state_saved_on_two_ranks_goes_on_on_one(
    engines: dict[str, TrainEngine], initial: Path, tmp_path: Path
) -> None:
    sharded, one = engines["sharded"], engines["one"]
    sharded.load_state(initial)
    train(sharded, range(3))
    sharded.save_state(tmp_path / "state")
    before = gathered(sharded.publish())
    one.load_state(tmp_path / "state")
    assert all(torch.equal(before[name], tensor) for name, tensor in gathered(one.publish()).items())
    assert one.steps_done() == 3
    assert train(one, range(3, 5)) == pytest.approx(train(sharded, range(3, 5)), rel=1e-5)


def test_resuming_on_as_many_ranks_is_exact(engine: TrainEngine, tmp_path: Path) -> None:
    train(engine, range(2))
    engine.save_state(tmp_path / "state")
    expected = (engine.draw(), train(engine, range(2, 4)))
    engine.load_state(tmp_path / "state")
    assert (engine.draw(), train(engine, range(2, 4))) == expected


def test_training_goes_on_while_a_state_is_saved(engine: TrainEngine, tmp_path: Path) -> None:
    train(engine, range(2))
    first = engine.save_state(tmp_path / "state", asynchronous=True)
    expected = train(engine, range(2, 4))  # changes every tensor while the save is being written
    second = engine.save_state(tmp_path / "later", asynchronous=True)
    engine.cpu()
    assert first.wait(300.0) == tmp_path / "state"
    assert second.wait(300.0).is_dir() and second.done()
    engine.cuda()
    engine.load_state(tmp_path / "state")
    assert engine.steps_done() == 2
    assert train(engine, range(2, 4)) == expected


def test_a_background_save_that_fails_says_so(one: TrainEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    handle = one.save_state(tmp_path / "file" / "state", asynchronous=True)
    with pytest.raises(WorkerError, match=r"rank 0 failed to save to .*NotADirectoryError"):
        handle.wait(300.0)
    assert one.count(NeedParallel(batch(0))) == 9


def test_saved_weights_load_in_plain_transformers(engine: TrainEngine, tmp_path: Path) -> None:
    train(engine, range(1))
    engine.save(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    published = gathered(engine.publish())
    assert published.keys() == plain.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in published.items())
    train(engine, range(1, 2))
    assert not same(engine.state_dict(), plain)
    engine.load(tmp_path / "model")
    assert same(engine.state_dict(), plain)
    engine.meta()
    engine.load(tmp_path / "model")  # optimizers begin anew
    assert same(engine.state_dict(), plain)
    assert train(engine, range(1))


def test_whole_weights_of_the_caller_reach_every_shard(engine: TrainEngine) -> None:
    train(engine, range(1))
    given = Qwen2ForCausalLM(qwen()).state_dict()
    engine.load_state_dict(given)
    assert same(engine.state_dict(), given)
    norm = "model.norm.weight"
    wrong = {**{name: tensor + 1 for name, tensor in given.items()}, "extra": torch.ones(1), norm: torch.ones(3)}
    del wrong["lm_head.weight"]
    with pytest.raises(WeightSyncError) as caught:
        engine.load_state_dict(wrong)
    for problem in ("missing: lm_head.weight", "unknown here: extra", f"shape of {norm}: stored [3], here [64]"):
        assert problem in str(caught.value)
    assert same(engine.state_dict(), given)
    engine.cpu()
    with pytest.raises(NotResidentError, match="on host"):
        engine.load_state_dict(given)
    engine.meta()
    with pytest.raises(WeightSyncError, match="unknown here: extra"):
        engine.load_state_dict(wrong)
    assert engine.residency is Residency.META
    engine.load_state_dict(given)  # optimizers begin anew
    assert same(engine.state_dict(), given)
    assert train(engine, range(1))


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_save(engine: TrainEngine, tmp_path: Path) -> None:
    """One rank writes for all; the others are told instead of waiting for it."""
    (tmp_path / "file").write_text("in the way")
    for save in (engine.save, engine.save_state):
        with pytest.raises(RlixError, match="NotADirectoryError"):
            save(tmp_path / "file" / "folder")
    for load in (engine.load, engine.load_state):
        with pytest.raises(FileNotFoundError):
            load(tmp_path)
    assert train(engine, range(1))


def lease(epoch: int) -> Fence:
    """Of a pool that has no other leases."""
    return Fence(__name__, epoch, "a job", "actor training")


def test_a_move_that_failed_on_one_rank_does_not_block_the_next(
    engines: dict[str, TrainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["sharded"]
    group, run = engine._workers(), engine._run

    def partly(method: str, *args: Any, timeout_s: float, **more: Any) -> list[Any]:
        if method != "to_host":
            return run(method, *args, timeout_s=timeout_s, **more)
        engine._calls += 1
        number = engine._calls
        refs = [group.call("do", number, number, what, ranks=[r])[0] for r, what in enumerate((method, "ping"))]
        group.results(method, refs, timeout_s=timeout_s)
        raise WorkerError("rank 1 had no room")

    monkeypatch.setattr(engine, "_run", partly)
    with pytest.raises(WorkerError, match="rank 1 had no room"):
        engine.cpu()
    with pytest.raises(NotResidentError, match=r"is failed.*rank 0 is host; rank 1 is serving.*call cuda\(\)"):
        engine.train_step(NeedParallel(batch(0)))
    engine.cuda()
    assert train(engine, range(1))


def test_leases_move_the_bytes_and_stale_epochs_are_refused(engine: TrainEngine) -> None:
    held = sum(status.device_bytes for status in engine.status())
    engine.acquire(lease(5))
    assert engine.release(5).bytes == held > 0
    assert engine.residency is Residency.HOST
    assert all((status.device_bytes, status.epoch) == (0, None) for status in engine.status())
    with pytest.raises(NotResidentError, match="on host"):
        engine.train_step(NeedParallel(batch(0)))
    with pytest.raises(StaleEpochError, match="epoch 5 refused: it has ended"):
        engine.acquire(lease(5))
    assert engine.acquire(lease(8)).bytes == held
    with pytest.raises(StaleEpochError, match="epoch 7 refused: epoch 8 holds it now"):
        engine.acquire(lease(7))
    with pytest.raises(StaleEpochError, match="epoch 7 refused: epoch 8 holds"):
        engine.release(7)
    engine._epoch = 7  # a handle that missed the change of hands
    with pytest.raises(StaleEpochError, match="epoch 7 refused: epoch 8 holds it now"):
        engine.count([[1]])
    engine._epoch = 8
    assert train(engine, range(1))
    engine.release(8)
    engine.cuda()


def test_moves_do_not_change_training(engine: TrainEngine, initial: Path) -> None:
    expected = train(engine, range(4))
    engine.load_state(initial)
    moved = []
    for step in range(4):
        engine.cpu()
        assert engine.device == torch.device("cpu")
        engine.to("cuda")
        moved += train(engine, range(step, step + 1))
    assert moved == expected
    engine.meta()
    with pytest.raises(NotResidentError, match="on meta"):
        engine.publish()
    engine.load_state(initial)
    assert train(engine, range(4)) == expected


def test_weights_from_a_folder_and_an_executor_whose_ranks_share_a_batch(
    engines: dict[str, TrainEngine], initial: Path, tmp_path: Path
) -> None:
    engines["one"].load_state(initial)
    train(engines["one"], range(1))
    engines["one"].save(tmp_path / "model")
    register("one batch", OneBatch)
    with TrainEngine((Policy, qwen()), executor="one batch") as other:
        other.build(tensor_parallel_size=2, weights_path=tmp_path / "model")
        found = gathered(other.publish())
        assert (other.where(), other.count(NeedParallel([1, 2, 3]))) == ([(0, 1)], 3)
    expected = gathered(engines["one"].publish())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_unknown_methods_fail_here_with_the_nearest_name(engines: dict[str, TrainEngine]) -> None:
    with pytest.raises(AttributeError, match="has a method 'train_stepp'; did you mean 'train_step'"):
        engines["one"].train_stepp(1)
    with pytest.raises(AttributeError, match=r"Policy defines: .*train_step, score"):
        engines["one"].zzzz()
    with pytest.raises(AttributeError):
        _ = engines["one"]._private


def test_an_error_in_a_method_names_rank_and_method_and_the_engine_goes_on(engine: TrainEngine) -> None:
    with pytest.raises(WorkerError, match=r"rank \d failed in fail\(\): KeyError: .*no such thing'") as caught:
        engine.fail()
    assert isinstance(caught.value, KeyError)
    with pytest.raises(TypeError, match=r"Policy.train_step\(\): missing a required argument"):
        engine.train_step()
    assert engine.count(NeedParallel(batch(0))) == 9


def test_impossible_engines_are_refused_before_anything_starts(engines: dict[str, TrainEngine]) -> None:
    devices = pool_devices()
    actors = len(ray.util.list_named_actors(all_namespaces=True))
    elsewhere = Device(99, "node", "203.0.113.9", 0, DeviceKind.CPU)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"tensor_parallel_size": 2, "devices": devices[:3]}, "3 device"),
        ({"tensor_parallel_size": 9}, "9 device.* wanted, but there are 8 in the pool"),
        ({"acceptable_node_ips": [elsewhere.node_ip]}, "0 on nodes 203"),
        ({"tensor_parallel_size": 2, "colocate_with": engines["one"]}, "1 of colocate_with"),
        ({"dtype": "float33"}, "unknown dtype"),
        ({"tensor_parallel_size": 2, "shard": 2, "data_parallel_size": 2}, "does not cut layers"),
        ({"shard": 2, "data_parallel_size": 3}, "shard=2 does not divide data_parallel_size=3"),
        ({"weights_path": "/nowhere", "random_weights": True}, "not both"),
    ]
    for kwargs, message in wrong:
        with pytest.raises(ValueError, match=message):
            TrainEngine(policy()).build(**kwargs)
    with pytest.raises(FileNotFoundError, match="Hugging Face model folder"):
        TrainEngine(policy()).build(weights_path="/nowhere")
    with pytest.raises(ValueError, match="holds weights"):
        TrainEngine(Policy(qwen()))
    with pytest.raises(RlixError, match="build"):
        TrainEngine(policy()).train_step([])
    assert len(ray.util.list_named_actors(all_namespaces=True)) == actors


def test_engines_spread_over_free_devices(engines: dict[str, TrainEngine]) -> None:
    assert {device.id for device in placement.choose(1)} == {7}
    assert placement.choose(1, colocate_with=engines["one"]) == engines["one"].devices
    assert 0 not in {device.id for device in placement.choose(7, not_colocate_with=engines["one"])}
