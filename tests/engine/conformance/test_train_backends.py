"""What every training backend has to pass: add yours to `BACKENDS`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlix.engine.parallel import NeedParallel
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.executor import TrainExecutor, find, register
from rlix.engine.train.layout import Layout
from rlix.engine.weights import publication
from rlix.protocol.errors import NotResidentError, WeightSyncError, WorkerError
from tests.engine import models
from tests.engine.models import qwen
from tests.engine.training_models import Descending, Swapping, batch, policy

pytestmark = [pytest.mark.ray]
STEPS = 6


@dataclass(frozen=True)
class Backend:
    """An executor, and two layouts of it."""

    executor: str | type[TrainExecutor]
    sizes: dict[str, int]
    other: dict[str, int]
    data: int  # parts of a batch in the first layout
    tensor: int = 1
    refused: dict[str, int] = field(default_factory=dict)  # sizes it cannot have


BACKENDS = {
    "fsdp2": Backend(Swapping, {"shard": 2}, {"data_parallel_size": 4, "shard": 2}, 2),
    "tensor parallel": Backend(
        "tests.engine.conformance.tensor_parallel:TensorParallelExecutor",
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel_size": 2},
        data=2,
        tensor=2,
        refused={"shard": 2},
    ),
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def built(ray_session: Any, backend: Backend) -> Iterator[TrainEngine]:
    with TrainEngine((Descending, qwen()), backend.executor).build(**backend.sizes, seed=11) as engine:
        yield engine


@pytest.fixture(scope="module")
def initial(built: TrainEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial") / "state"
    built.save_state(folder)
    return folder


@pytest.fixture
def engine(built: TrainEngine, initial: Path) -> TrainEngine:
    built.load_state(initial)
    return built


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training in one process."""
    torch.manual_seed(11)
    module = Descending(qwen())
    module.on_weights_materialized()
    return [module.train_step(batch(step))["loss"] for step in range(STEPS)], module.state_dict()


def train(engine: TrainEngine, steps: range) -> list[float]:
    return [engine.train_step(NeedParallel(batch(step)))["loss"] for step in steps]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_it_trains_as_one_process_does_and_exports_what_it_trained(
    engine: TrainEngine, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, weights = plain
    assert train(engine, range(STEPS)) == pytest.approx(losses, rel=1e-5)
    exported = engine.state_dict()
    assert exported.keys() == weights.keys()
    assert all(torch.allclose(exported[name], tensor, atol=1e-5) for name, tensor in weights.items())


def test_it_begins_with_the_seeds_weights_and_publishes_them_whole(engine: TrainEngine) -> None:
    torch.manual_seed(11)
    expected = Qwen2ForCausalLM(qwen())
    assert same(engine.state_dict(), expected.state_dict())
    published = engine.publish(bucket_bytes=2**16)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    assert {entry.name: entry.shape for entry in published.manifest.entries} == shapes
    replica = Qwen2ForCausalLM(qwen())
    publication.apply(replica, published)
    assert same(replica.state_dict(), expected.state_dict())


def test_whole_weights_go_in_and_come_out_to_the_bit(engine: TrainEngine, tmp_path: Path) -> None:
    given = models.model(5).state_dict()
    engine.load_state_dict(given)
    assert same(engine.state_dict(), given)
    engine.save(tmp_path / "model")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), given)
    train(engine, range(1))
    engine.load(tmp_path / "model")
    assert same(engine.state_dict(), given)
    with pytest.raises(WeightSyncError, match=r"shape of model.layers.0.self_attn.q_proj.weight: stored \[3\]"):
        engine.load_state_dict({**given, "model.layers.0.self_attn.q_proj.weight": torch.ones(3)})
    assert same(engine.state_dict(), given)


def test_bytes_leave_and_come_back_to_the_bit(engine: TrainEngine, initial: Path) -> None:
    expected = train(engine, range(2))
    engine.load_state(initial)
    train(engine, range(1))
    held = sum(status.device_bytes for status in engine.status())
    assert engine.cpu().bytes == held
    assert all(status.device_bytes == 0 for status in engine.status())
    weights = engine.state_dict()
    engine.cuda()
    assert same(engine.state_dict(), weights)
    assert train(engine, range(1, 2)) == expected[1:]
    engine.meta()
    with pytest.raises(NotResidentError):
        engine.publish()
    engine.load_state(initial)
    assert train(engine, range(2)) == expected


def test_its_state_goes_on_in_another_backend_and_back(
    engine: TrainEngine, plain: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    train(engine, range(2))
    engine.save_state(tmp_path / "state", asynchronous=True).wait(300.0)
    with TrainEngine((Descending, qwen())).build(random_weights=True) as other:
        other.load_state(tmp_path / "state")
        losses = train(other, range(2, 4))
        other.save_state(tmp_path / "back")
    engine.load_state(tmp_path / "back")
    losses += train(engine, range(4, STEPS))
    assert losses == pytest.approx(plain[0][2:], rel=1e-5)


def test_every_rank_knows_its_place(engine: TrainEngine, backend: Backend) -> None:
    places = engine.groups()
    world = backend.data * backend.tensor
    assert len(places) == backend.data
    for dp_rank, place in enumerate(places):
        assert place == (dp_rank, backend.data, world, backend.data, backend.tensor)
    assert engine.count(NeedParallel(batch(0))) == 9
    assert engine.counted(NeedParallel(batch(0))) == 9  # summed over the ranks that have different parts of it


def test_a_failed_call_leaves_it_as_it_was(
    engine: TrainEngine, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    train(engine, range(1))
    with pytest.raises(KeyError) as caught:
        engine.fail()
    assert isinstance(caught.value, WorkerError)
    assert train(engine, range(1, 2)) == pytest.approx(plain[0][1:2], rel=1e-5)


def test_it_goes_on_at_another_width(
    engine: TrainEngine, backend: Backend, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses = train(engine, range(2))
    for step, sizes in ((2, backend.other), (4, backend.sizes)):
        engine.resize(**sizes)
        losses += train(engine, range(step, step + 2))
        published = {entry.name: tensor for entry, tensor in publication.stream(engine.publish())}
        engine.cpu()
        engine.cuda()
        assert same(published, engine.state_dict())
    assert losses == pytest.approx(plain[0], rel=1e-5)


def test_layouts_it_cannot_have_are_refused_before_anything_starts(backend: Backend) -> None:
    if backend.refused:
        with pytest.raises(ValueError, match="shard=2"):
            TrainEngine(policy(), backend.executor).build(**backend.refused)


def test_backends_are_found_by_name_path_and_class() -> None:
    path = "tests.engine.conformance.tensor_parallel:TensorParallelExecutor"
    register("mine", path)
    assert find("mine") is find(path) is find(find(path))
    assert find("fsdp2").arrange(Layout(data=3, tensor=2)) == Layout(data=6, shard=2)
    with pytest.raises(ValueError, match=r"unknown executor 'megatron' for TrainEngine; known: fsdp2, .*mine"):
        TrainEngine(policy(), "megatron")
    with pytest.raises(TypeError, match=r"no rlix\.engine\.train\.executor\.TrainExecutor"):
        TrainEngine(policy(), "tests.engine.models:qwen")
