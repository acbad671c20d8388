"""LoRA adapters on one base: each learns, to the bit, what it would learn alone; PEFT loads what is saved."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rlix.engine import lora
from rlix.engine.lora import AdapterConfig
from rlix.engine.parallel import NeedParallel
from rlix.engine.placement import pool_devices
from rlix.engine.train import lifecycle
from rlix.engine.train.engine import TrainEngine
from rlix.pipeline.spec.environment import environment_problems
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.pipeline.training.policy import policy_on_meta
from rlix.protocol.errors import SpecError, WeightSyncError
from tests.pipeline import plain_training as plain
from tests.pipeline.training_scenarios import TEMPERATURE, Hangs, built, scenario, write_model

OPTIMIZERS = {
    "small": OptimizerSpec(learning_rate=1e-2),
    "wide": OptimizerSpec(learning_rate=3e-3, schedule="linear", warmup_updates=2),
    "dropped": OptimizerSpec(learning_rate=5e-3, max_grad_norm=0.1, weight_decay=0.1),
}
CONFIGS = {
    "small": AdapterConfig(2, 4.0, targets=("q_proj", "v_proj")),
    "wide": AdapterConfig(8, 8.0),
    "dropped": AdapterConfig(4, 16.0, dropout=0.5, targets=("up_proj", "down_proj", "q_proj")),
}
UPDATES = {"small": 3, "wide": 6, "dropped": 4}
ALGORITHMS = {"small": "grpo", "wide": "dr_grpo", "dropped": "gspo"}
SMALLEST: Any = {
    "source": {"task": "sort_digits"},
    "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 5},
    "clusters": {"actor_train": {"gpus": 1}},
}
SMALL = TrainingSpec(micro_batch_tokens=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


class World:
    """A train module, or an engine, and what the adapters on it have learnt."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.module.configure_optimizer(OptimizerSpec(), SMALL)
        self.done: dict[str, int] = {}

    @classmethod
    def on(cls, folder: Path) -> "World":
        return cls(built(policy_on_meta(folder), folder))

    def add(self, name: str, folder: Path | None = None) -> None:
        seed = list(CONFIGS).index(name)
        self.module.add_adapter(name, CONFIGS[name], OPTIMIZERS[name], UPDATES[name], seed)
        if folder is not None:
            self.module.load_adapter(name, folder, OPTIMIZERS[name], UPDATES[name])
        self.done.setdefault(name, 0)

    def step(self, name: str) -> dict[str, float]:
        wanted = scenario(ALGORITHMS[name], batch(name, self.done[name]))
        tensors: Any = NeedParallel(wanted.tensors) if isinstance(self.module, TrainEngine) else wanted.tensors
        norm = OPTIMIZERS[name].max_grad_norm
        self.done[name] += 1
        metrics: dict[str, float] = self.module.policy_step(
            tensors, wanted.denominator, wanted.algorithm, TEMPERATURE, norm, name
        )
        return metrics


def batch(name: str, step: int) -> plain.Batch:
    return plain.random_batch(seed=100 * step + len(name))


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().numpy().tobytes())
    return state.hexdigest()


def of_adapter(module: Any, name: str) -> str:
    own = lora.parameters(module, name)
    moments = [
        s[k] for p in own.values() for s in [module.adapter_optimizers[name].state.get(p, {})] for k in sorted(s)
    ]
    return fingerprint([*own.values(), *moments])


def of_base(module: Any) -> str:
    return fingerprint(value for name, value in module.state_dict().items() if "lora_" not in name)


def alone(folder: Path, name: str) -> tuple[list[dict[str, float]], str]:
    world = World.on(folder)
    world.add(name)
    return [world.step(name) for _ in range(UPDATES[name])], of_adapter(world.module, name)


@pytest.fixture(scope="module")
def each_alone(folder: Path) -> dict[str, tuple[list[dict[str, float]], str]]:
    return {name: alone(folder, name) for name in CONFIGS}


@settings(max_examples=3, deadline=None)
@given(turns=st.permutations([name for name, count in UPDATES.items() for _ in range(count)]), late=st.booleans())
def test_adapters_that_join_and_leave_at_any_step_learn_what_they_learn_alone(
    turns: Sequence[str], late: bool, folder: Path, each_alone: dict[str, Any]
) -> None:
    world = World.on(folder)
    base, metrics, ends = of_base(world.module), {name: [] for name in CONFIGS}, {}
    for name in () if late else CONFIGS:
        world.add(name)
    for name in turns:
        if name not in world.done:
            world.add(name)
        others = {other: of_adapter(world.module, other) for other in world.module.adapters() if other != name}
        metrics[name].append(world.step(name))
        assert others == {other: of_adapter(world.module, other) for other in others}
        if world.done[name] == UPDATES[name]:
            ends[name] = of_adapter(world.module, name)
            world.module.remove_adapter(name)
    assert of_base(world.module) == base
    assert {name: (metrics[name], ends[name]) for name in CONFIGS} == each_alone


def test_an_adapter_that_was_saved_goes_on_to_the_bit_and_loads_in_plain_peft(
    folder: Path, tmp_path: Path, each_alone: dict[str, Any]
) -> None:
    name = "dropped"
    world = World.on(folder)
    world.add(name)
    before = [world.step(name) for _ in range(2)]
    world.module.save_adapter(name, tmp_path / "a", str(folder))
    ids = batch(name, 0).ids
    with world.module.using(name), torch.no_grad():
        expected = world.module.eval()(input_ids=ids).logits
    world.module.remove_adapter(name)
    plainly = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(plainly, tmp_path / "a").eval()(input_ids=ids).logits
    assert torch.equal(loaded, expected)

    other = World.on(folder)
    other.done = dict(world.done)
    other.add(name, tmp_path / "a")
    after = [other.step(name) for _ in range(2)]
    assert (before + after, of_adapter(other.module, name)) == each_alone[name]
    assert AdapterConfig.of_folder(tmp_path / "a") == AdapterConfig(4, 16.0, 0.5, ("down_proj", "q_proj", "up_proj"))


def test_a_gradient_that_is_not_finite_costs_only_its_own_adapter(folder: Path) -> None:
    world = World.on(folder)
    for name in ("small", "wide"):
        world.add(name)
        world.step(name)
    before = {name: of_adapter(world.module, name) for name in ("small", "wide")}
    wanted = scenario("grpo", batch("small", 7))
    wanted.tensors["advantages"] = wanted.tensors["advantages"] * float("nan")
    metrics = world.module.policy_step(wanted.tensors, wanted.denominator, wanted.algorithm, 1.0, 1.0, "small")
    assert metrics == {"skipped_updates": 1.0}
    assert before == {name: of_adapter(world.module, name) for name in before}


def test_what_cannot_be_an_adapter_says_so(folder: Path, tmp_path: Path) -> None:
    world = World.on(folder)
    world.add("small")
    with pytest.raises(SpecError, match="already"):
        world.add("small")
    with pytest.raises(SpecError, match=r"no linear layers called \['query'\]"):
        world.module.add_adapter("x", AdapterConfig(2, 2.0, targets=("query",)), OptimizerSpec())
    world.module.save_adapter("small", tmp_path / "a")
    world.module.add_adapter("x", AdapterConfig(3, 2.0, targets=("q_proj", "v_proj")), OptimizerSpec())
    before = of_adapter(world.module, "x")
    with pytest.raises(WeightSyncError, match="does not fit"):
        world.module.load_adapter("x", tmp_path / "a", OptimizerSpec())
    progress = (tmp_path / "a" / "optimizer.json").read_text()
    world.step("small")
    world.module.save_adapter("x", tmp_path / "b")
    learnt = of_adapter(world.module, "small")
    for torn in (progress[:-4], "{}", "[1]", progress):  # the last is whole, beside moments of another shape
        if torn is progress:
            wide = {f"{key}.exp_avg": p.repeat(2, 1) for key, p in lora.parameters(world.module, "small").items()}
            save_file(wide, tmp_path / "a" / "optimizer.safetensors")
        (tmp_path / "a" / "optimizer.json").write_text(torn)
        with pytest.raises(SpecError, match=r"training cannot go on from optimizer\.json"):
            world.module.load_adapter("small", tmp_path / "a", OptimizerSpec())
        assert of_adapter(world.module, "small") == learnt, "what can be read was not taken either"
    for torn_file in (b"torn" * 9, None):
        (tmp_path / "b" / lora.WEIGHTS_FILE).unlink()
        if torn_file is not None:
            (tmp_path / "b" / lora.WEIGHTS_FILE).write_bytes(torn_file)
        with pytest.raises(SpecError, match="cannot be read"):
            world.module.load_adapter("x", tmp_path / "b", OptimizerSpec())
    assert of_adapter(world.module, "x") == before
    with pytest.raises(SpecError, match="no PEFT adapter"):
        AdapterConfig.of_folder(tmp_path)
    config = tmp_path / "adapter_config.json"
    for text, message in (
        ("{nope", "cannot be read"),
        ('{"peft_type": "LORA", "r": 2}', "does not say .*target_modules"),
    ):
        config.write_text(text)
        with pytest.raises(SpecError, match=message):
            AdapterConfig.of_folder(tmp_path)
    config.write_text((tmp_path / "a" / "adapter_config.json").read_text())
    job = JobSpec.model_validate({"name": "j", "steps": 1, **SMALLEST, "lora": {"path": str(tmp_path)}})
    assert [problem.field for problem in environment_problems(job)] == ["lora.path"], "there are no weights"


def test_memory_is_the_base_once_and_each_adapter_with_its_optimizer(folder: Path) -> None:
    world = World.on(folder)
    base = sum(t.nbytes for t in world.module.parameters())
    expected = base
    for name in CONFIGS:
        world.add(name)
        world.step(name)
        expected += 3 * sum(p.nbytes for p in lora.parameters(world.module, name).values())
    held = {id(p): p.nbytes for p in world.module.parameters()}
    held |= {id(p.grad): p.grad.nbytes for p in world.module.parameters() if p.grad is not None}
    for optimizer in world.module.adapter_optimizers.values():
        held |= {id(t): t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()}
    assert sum(held.values()) == expected


@pytest.mark.ray
@pytest.mark.parametrize("ranks", [4])
def test_on_several_ranks_too(
    ray_session: Any, folder: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, with ranks that hang, a move to the host and a save in between, as each alone after that."""
    monkeypatch.setattr(lifecycle, "GRACE_S", 0.5)
    monkeypatch.setattr(lifecycle, "SETTLE_TIMEOUT_S", 0.5)

    def run(world: World, names: Sequence[str]) -> dict[str, Any]:
        engine, found = world.module, {name: [] for name in names}
        world.done.clear()
        for name in names:
            world.add(name)
        for turn in range(max(UPDATES.values())):
            for name in names:
                if turn < UPDATES[name]:
                    found[name].append(world.step(name))
            if turn == 2 and len(names) > 1:
                tensors: Any = NeedParallel(scenario("grpo", batch("wide", turn)).tensors)
                with pytest.raises(RuntimeError, match=r"no loss here.*started anew"):
                    engine.policy_step(tensors, 1.0, Hangs(), TEMPERATURE, 1.0, "wide")
        engine.cpu()
        for name in names:
            engine.read("save_adapter", name, tmp_path / "-".join(names) / name)
        engine.cuda()
        for name in names:
            engine.remove_adapter(name)
        return found

    devices = pool_devices()[:ranks]
    engine = TrainEngine(policy_on_meta(folder))
    with engine.build(tensor_parallel_size=ranks, devices=devices, weights_path=folder):
        world = World(engine)
        together = run(world, list(CONFIGS))
        for name in CONFIGS:
            assert run(world, [name])[name] == together[name]
            for file in (lora.WEIGHTS_FILE, "optimizer.safetensors"):
                paths = [tmp_path / "-".join(names) / name / file for names in (list(CONFIGS), [name])]
                assert paths[0].read_bytes() == paths[1].read_bytes()
