"""Training engines whose calls fail, whose bytes are away, and which are built anew on other ranks."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlix.engine.life_cycle import Residency
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train import lifecycle
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights import publication
from rlix.protocol.errors import NotResidentError, RlixError, WaitTimeoutError, WorkerError
from tests.engine.models import qwen
from tests.engine.training_models import Several, Swapping, batch, policy
from tests.waiting import until

pytestmark = [pytest.mark.ray]


def train(engine: TrainEngine, steps: range) -> list[float]:
    return [engine.train_step(NeedParallel(batch(step)))["loss"] for step in steps]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def named() -> list[Any]:
    """The processes that holders were named as, each time."""
    return []


@pytest.fixture(scope="module")
def built(ray_session: Any, named: list[Any]) -> Iterator[TrainEngine]:
    settings = {"seed": 11, "collective_timeout_s": 60.0, "name_holders": named.append}
    with TrainEngine(policy()).build(shard=2, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def initial(built: TrainEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial") / "state"
    built.save_state(folder)
    return folder


@pytest.fixture(scope="module")
def unbroken(built: TrainEngine, initial: Path) -> list[float]:
    """Losses of eight steps on two ranks."""
    return train(built, range(8))


@pytest.fixture
def engine(built: TrainEngine, initial: Path, unbroken: list[float], named: list[Any]) -> Iterator[TrainEngine]:
    built.load_state(initial)
    yield built
    assert named[-1] == built.processes


def test_one_ragged_row_costs_a_moment_and_nothing_else(engine: TrainEngine, unbroken: list[float]) -> None:
    """It waits for nobody's deadline, which is longer than a test may take."""
    assert train(engine, range(3)) == unbroken[:3]
    rows = [*batch(3)[:-1], batch(3)[-1][:-1]]  # the last one is too short: rank 1 raises, rank 0 waits for it
    with pytest.raises(ValueError, match="expected sequence of length 12") as caught:
        engine.train_step(NeedParallel(rows))
    assert isinstance(caught.value, WorkerError)
    assert (caught.value.rank, caught.value.items) == (1, (5, 6, 7, 8))
    assert "items 5 to 8 of the split batch" in str(caught.value)
    assert "started anew with their weights and optimizer state; gradients are dropped" in str(caught.value)
    assert train(engine, range(3, 8)) == unbroken[3:]


def test_weights_that_only_some_ranks_changed_are_dropped_and_the_error_says_so(
    engine: TrainEngine, unbroken: list[float], tmp_path: Path
) -> None:
    train(engine, range(2))
    engine.save_state(tmp_path / "state")
    with pytest.raises(KeyError, match=r"weights and optimizer state were dropped\nload_state\(\)"):
        engine.step_on_one_rank()
    assert engine.residency is Residency.META
    with pytest.raises(NotResidentError):
        train(engine, range(1))
    engine.load_state(tmp_path / "state")
    assert train(engine, range(2, 4)) == unbroken[2:4]


def test_a_rank_that_hangs_costs_a_moment_too(
    engine: TrainEngine, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "SETTLE_TIMEOUT_S", 0.5)
    losses = train(engine, range(3))
    with pytest.raises(KeyError, match="started anew with their weights and optimizer state"):
        engine.sleep_on_the_others(600.0)
    assert losses + train(engine, range(3, 8)) == unbroken


def test_one_rank_alone_that_hangs_is_started_anew_and_ended_where_it_does_not_even_answer(
    ray_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrainEngine(policy()).build(seed=11) as engine:
        engine.train_step(batch(0))
        expected = engine.state_dict()
        monkeypatch.setattr(lifecycle, "SETTLE_TIMEOUT_S", 0.5)
        call = ("call", "sleep_on_the_others", (600.0,), {}, None, False)
        with pytest.raises(WaitTimeoutError, match=r"did not answer sleep_on_the_others.*started anew"):
            engine._run(*call, timeout_s=0.5)
        assert same(engine.state_dict(), expected)
        assert engine.draw() == torch.rand(3, generator=torch.Generator().manual_seed(11)).tolist()
        monkeypatch.setattr(lifecycle, "HAND_OVER_TIMEOUT_S", 0.5)
        with pytest.raises(WaitTimeoutError, match=r"weights and optimizer state are lost\nbuild\(\)"):
            engine._run("call", "sleep_deaf", (600,), {}, None, False, timeout_s=0.5)
        with pytest.raises(RlixError, match="given up after an error"):
            engine.count([[1]])


def test_what_a_killed_rank_held_comes_from_a_copy(ray_session: Any) -> None:
    """Also where it was the first of those that hold it; a state of which nobody else holds a part is lost."""
    copies = {"data_parallel_size": 4, "shard": 2, "seed": 11}
    with TrainEngine(policy()).build(**copies, collective_timeout_s=77.0) as engine:
        assert engine.time_limits() == [{77.0}] * 4
        losses = train(engine, range(2))
        expected = engine.state_dict()
        for killed in (0, 3):
            with pytest.raises(WorkerError, match=rf"with their weights.*\(what rank {killed} held, which was killed"):
                engine.die(killed)
            assert same(engine.state_dict(), expected)
        losses += train(engine, range(2, 4))
        assert engine.steps_done() == 4
        engine.resize(shard=2)
        with pytest.raises(WorkerError, match=r"weights and optimizer state are lost\nbuild\(\)"):
            engine.die(1)
        assert "weights and optimizer state are lost" in (engine.life.failure or "")
    with TrainEngine(policy()).build(**copies) as engine:
        assert train(engine, range(4)) == losses


def test_a_call_that_changed_weights_is_not_undone_because_its_ranks_have_begun_the_next(
    ray_session: Any, tmp_path: Path
) -> None:
    """Rank 1 dies in one thread's call, which rank 0 has ended: it is in another thread's."""
    with TrainEngine(policy()).build(data_parallel_size=2, seed=11) as engine, ThreadPoolExecutor(2) as threads:
        first = threads.submit(engine.change_and_die, 1, str(tmp_path))
        until((tmp_path / "changed").exists, "the first call did not begin")
        second = threads.submit(engine.go_on, str(tmp_path))
        for call in (first, second):
            with pytest.raises(WorkerError, match=r"weights and optimizer state were dropped\nload_state\(\)"):
                call.result()
        assert engine.residency is Residency.META


def test_a_rank_in_a_killed_ones_place_draws_what_no_other_rank_draws(ray_session: Any) -> None:
    with TrainEngine(policy()).build(data_parallel_size=2, seed=11) as engine:
        for killed in (0, 1):
            with pytest.raises(WorkerError, match=f"what rank {killed} held"):
                engine.die(killed)
            first, second = engine.draw_each()
            assert first != second


def test_an_engine_without_bytes_has_none_after_a_load_that_failed_on_one_rank(
    engine: TrainEngine, unbroken: list[float], initial: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(initial, broken)
    state = json.loads((broken / "state.json").read_text())
    state["training_state"]["broken"] = True
    (broken / "state.json").write_text(json.dumps(state))
    engine.meta()
    with pytest.raises(KeyError, match=r"started anew, with nothing on them, as before\nload_state\(\)"):
        engine.load_state(broken)
    assert engine.residency is Residency.META
    engine.load_state(initial)
    assert train(engine, range(2)) == unbroken[:2]


def test_the_same_calls_are_allowed_wherever_the_bytes_are(ray_session: Any, tmp_path: Path) -> None:
    """With a mover that frees the device's memory as on a GPU."""
    with TrainEngine(policy(), Swapping).build(shard=2, seed=11) as engine:
        train(engine, range(2))
        expected = engine.state_dict()
        engine.cpu()
        engine.save(tmp_path / "model")
        assert same(engine.state_dict(), expected)
        published = {entry.name: tensor for entry, tensor in publication.stream(engine.publish())}
        assert same(published, expected)
        engine.save_state(tmp_path / "state")
        engine.save_state(tmp_path / "later", asynchronous=True).wait(300.0)
        for load in (engine.load, engine.load_state):
            with pytest.raises(NotResidentError, match="on host"):
                load(tmp_path / "model")
        engine.cuda()
        after = train(engine, range(2, 4))
        for state in ("state", "later"):
            engine.meta()
            for read in (engine.state_dict, engine.publish, lambda: engine.save_state(tmp_path / "no")):
                with pytest.raises(NotResidentError, match="on meta"):
                    read()
            engine.load_state(tmp_path / state)
            assert train(engine, range(2, 4)) == after


def test_optimizers_in_lists_and_dictionaries_move_and_are_saved(ray_session: Any, tmp_path: Path) -> None:
    with TrainEngine((Several, qwen()), Swapping).build(seed=3) as engine:
        train(engine, range(2))
        held = engine.status()[0].device_bytes
        engine.save_state(tmp_path / "state")
        expected = train(engine, range(2, 4))
        engine.cpu()
        assert engine.status()[0].host_bytes == held > 3 * 4 * engine.status()[0].parameters  # weights and two moments
        engine.meta()
        engine.load_state(tmp_path / "state")
        assert train(engine, range(2, 4)) == expected


def test_forward_is_called_through_the_engine(engine: TrainEngine) -> None:
    ids = torch.tensor(batch(0))
    whole = engine(input_ids=NeedParallel(ids))
    assert whole.logits.shape == (9, 12, 97)
    assert torch.equal(engine.forward(NeedParallel(ids)).logits, whole.logits)


def test_an_engine_moves_to_other_devices_and_another_width(ray_session: Any, unbroken: list[float]) -> None:
    devices, named = pool_devices(), []
    with TrainEngine(policy(), Swapping).build(
        shard=2, devices=devices[:2], seed=11, name_holders=named.append
    ) as engine:
        assert named == [first := engine.processes]
        losses = train(engine, range(2))
        engine.resize(devices=devices[4:6])
        assert engine.devices == devices[4:6]
        assert named[1:] == [engine.processes] != [first]
        losses += train(engine, range(2, 4))
        assert losses == unbroken[:4]
        engine.resize(devices=devices[:3])  # as wide as the devices allow
        losses += train(engine, range(4, 6))
        engine.cpu()
        engine.resize(data_parallel_size=1)
        assert (engine.residency, len(engine.devices)) == (Residency.DEVICE, 1)
        losses += train(engine, range(6, 7))
        engine.resize(data_parallel_size=4, shard=2)
        losses += train(engine, range(7, 8))
        assert losses == pytest.approx(unbroken, rel=1e-5)
        assert engine.steps_done() == 8
        with pytest.raises(ValueError, match="9 device"):
            engine.resize(shard=9)
        assert named[-1] == engine.processes
        assert train(engine, range(1))
        engine.meta()
        with pytest.raises(NotResidentError):
            engine.resize(shard=2)


def test_optimizers_that_a_method_made_are_made_again(ray_session: Any) -> None:
    with TrainEngine(policy()).build(seed=11) as engine:
        engine.use_sgd(0.5)
        train(engine, range(1))
        expected = engine.state_dict()
        engine.resize(shard=2)
        assert same(engine.state_dict(), expected)
        assert engine.learning_rates() == [0.5]
