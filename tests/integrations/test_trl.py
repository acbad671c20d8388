"""Real TRL trainers, plain and attached: the same losses and weights to the bit, and no byte outside a lease."""

import copy
import io
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import ray
import torch

from rlix.control.program import attach as attach_program
from rlix.engine.movers import SwapMover
from rlix.integrations.leases import ProgramGate, Stages
from rlix.integrations.rollouts import Rollouts
from rlix.integrations.trl import install as install_module
from rlix.integrations.trl.attachment import INITIALIZATION, Attachment, refuse_kind
from rlix.integrations.trl.install import Session, install, main, once
from rlix.integrations.trl.parts import parts_of
from rlix.integrations.trl.served import ServedGeneration
from rlix.monitor.records import load_run
from rlix.node.run_folder import RunFolder
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.protocol.errors import NotResidentError, SpecError
from rlix.protocol.types import Phase
from tests.control.test_run_record import record_in

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "vllm", None)  # which TRL would import, for seconds and for nothing
    import trl
    from trl.experimental import online_dpo

    TRAINERS = {
        "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
        "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
        "online DPO": (online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig),
    }

CPU = torch.device("cpu")
INIT, TRAIN, LOGPS, REF, GENERATE = (
    Phase.INITIALIZATION, Phase.ACTOR_TRAINING, Phase.OLD_LOG_PROBS, Phase.REFERENCE_LOG_PROBS, Phase.VALUE_COMPUTE
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(TinyModel(hidden_size=32), tmp_path_factory.mktemp("model"), seed=0)


def share_of_ones(completions: list[str], **_: Any) -> list[float]:
    return [text.count("1") / max(1, len(text)) for text in completions]


def make(kind: str, model: Any, out: Path, *, adapter: bool = False, **options: Any) -> Any:
    trainer, config = TRAINERS[kind]
    lengths = {"max_new_tokens": 6} if kind == "online DPO" else {"max_completion_length": 6, "num_generations": 4}
    settings = {"max_steps": 2, "save_strategy": "no", "gradient_checkpointing": False} | lengths | options
    args = config(
        output_dir=str(out), per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=5e-3,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, seed=7, disable_tqdm=True, **settings,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": [f"{i % 10}{i % 7}>" for i in range(32)]})
    evaluation = {"eval_dataset": data.select(range(1))} if "eval_strategy" in options else {}
    path = Path(getattr(model, "name_or_path", model))
    return trainer(
        model=str(model) if isinstance(model, Path) else model, reward_funcs=share_of_ones, args=args,
        train_dataset=data, processing_class=load_tokenizer(path),
        peft_config=peft.LoraConfig(r=4) if adapter else None, **evaluation,
    )  # fmt: skip


class Watched:
    """A gate that lets in at once and looks that nothing is left behind."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.attachment: Attachment

    def enter(self, phase: Phase, *, alone: bool = False) -> tuple[int, ...]:
        self.phases.append(phase)
        return (0,)

    def leave(self) -> None:
        tensors = [self.attachment.trainer.model, getattr(self.attachment.trainer, "ref_model", None)]
        assert [each.device_bytes for each in self.attachment.parts.all] == [0] * 5
        with torch._C.DisableTorchFunctionSubclass():
            left = [p for each in tensors if each for p in each.parameters() if p.untyped_storage().nbytes()]
        assert not left


def attach(trainer: Any) -> tuple[Watched, Attachment]:
    gate = Watched()
    stages = Stages(gate, idle_s=0.0)
    stages.close()  # only who asks hears whether the script is idle
    stages.begin(INITIALIZATION)
    gate.attachment = Attachment(trainer, parts_of(trainer, "a job", lambda: SwapMover(CPU)), stages)
    return gate, gate.attachment


def run(trainer: Any, attachment: Attachment | None = None, **how: Any) -> tuple[Any, list[Any]]:
    """What the log says of every step, and the weights."""
    if attachment is None:
        trainer.train(**how)
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    else:
        attachment.train(trainer.train, **how)
        with attachment.stages.readable():
            weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    timing = ("time", "per_second")
    log = [{k: v for k, v in row.items() if not any(t in k for t in timing)} for row in trainer.state.log_history]
    return log, weights


def assert_equal(found: tuple[Any, list[Any]], expected: tuple[Any, list[Any]]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


CASES: dict[str, tuple[str, dict[str, Any], list[Phase]]] = {
    "GRPO with a reference, accumulation and several iterations": (
        "GRPO",
        {"beta": 0.04, "num_iterations": 2, "gradient_accumulation_steps": 2, "sync_ref_model": True,
         "ref_model_sync_steps": 2, "max_steps": 3},
        [INIT, GENERATE, LOGPS, REF, TRAIN, TRAIN, GENERATE, LOGPS, REF, TRAIN],
    ),
    "GRPO with an adapter, recomputed activations and evaluation": (
        "GRPO",
        {"beta": 0.04, "gradient_checkpointing": True, "adapter": True, "eval_strategy": "steps", "eval_steps": 2},
        [INIT, *[GENERATE, LOGPS, TRAIN] * 2, GENERATE, LOGPS, LOGPS],
    ),
    "RLOO": ("RLOO", {"max_steps": 1}, [INIT, GENERATE, LOGPS, REF, TRAIN]),
    "online DPO": ("online DPO", {"gradient_accumulation_steps": 2, "max_steps": 1}, [INIT, *[GENERATE, TRAIN] * 2]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_attached_learns_the_same_and_leaves_nothing(case: str, model: Path, tmp_path: Path) -> None:
    kind, options, phases = CASES[case]
    plain = run(make(kind, model, tmp_path / "plain", **options))
    gate, attachment = attach(trainer := make(kind, model, tmp_path / "attached", **options))
    assert_equal(run(trainer, attachment), plain)
    assert gate.phases == phases


def test_a_checkpoint_is_whole_and_resumes_to_the_same_end(model: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    plain = run(make("GRPO", model, tmp_path / "plain", **options))
    trainer = make("GRPO", model, tmp_path / "attached", **options)
    assert_equal(run(trainer, attach(trainer)[1]), plain)
    trainer.save_model(str(tmp_path / "saved"))
    for file in ("model.safetensors", "optimizer.pt"):
        expected, found = (tmp_path / kind / "checkpoint-2" / file for kind in ("plain", "attached"))
        assert found.stat().st_size == expected.stat().st_size
    saved = (tmp_path / "saved" / "model.safetensors").read_bytes()
    assert saved == (tmp_path / "plain" / "checkpoint-2" / "model.safetensors").read_bytes()
    again = make("GRPO", model, tmp_path / "again", **options)
    log, weights = run(again, attach(again)[1], resume_from_checkpoint=str(tmp_path / "attached" / "checkpoint-1"))
    assert_equal((log[:-1], weights), (plain[0][:-1], plain[1]))  # the last line is a mean over this session's steps


def saved(value: Any, **how: Any) -> tuple[int, Any]:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue()), torch.load(io.BytesIO(file.getvalue()), **how)


def pickled(trainer: Any, _: Path) -> Any:
    size, model = saved(trainer.model.base_model.model, weights_only=False)
    return size, {type(each) for each in model.parameters()}, model.state_dict()


def copied(trainer: Any, _: Path) -> Any:
    model = copy.deepcopy(trainer.model)
    return {type(each) for each in model.parameters()}, model.state_dict()


def folder_saved(save: Callable[[Any, Path], Any]) -> Callable[[Any, Path], Any]:
    def found(trainer: Any, folder: Path) -> Any:
        save(trainer, folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        kept = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
        return kept, [path.read_bytes() for path in files if path.suffix == ".safetensors"]

    return found


def logits(trainer: Any, *_: Any) -> Any:
    with torch.no_grad():
        return trainer.model(IDS).logits


def without_adapter(trainer: Any, _: Path) -> Any:
    with trainer.model.disable_adapter():
        return logits(trainer)


def gradients(trainer: Any, _: Path) -> Any:
    loss = trainer.model(IDS, labels=IDS).loss
    loss.backward()
    found = [each.grad.clone() for each in trainer.model.parameters() if each.grad is not None]
    trainer.model.zero_grad()
    return loss.item(), found


def evaluated(trainer: Any, _: Path) -> Any:
    found = trainer.evaluate(eval_dataset=datasets.Dataset.from_dict({"prompt": ["1>"]}))
    return {key: value for key, value in found.items() if not any(word in key for word in ("time", "per_second"))}


def keeps_a_view(trainer: Any, _: Path) -> None:
    trainer.kept = trainer.model.state_dict()


def saves_the_view(trainer: Any, _: Path) -> Any:
    return saved(vars(trainer).pop("kept"))


def in_another_precision(trainer: Any, _: Path) -> Any:
    trainer.model.to(torch.float64)
    found = logits(trainer)
    trainer.model.to(torch.float32)
    return found


IDS = torch.arange(6).view(1, -1)
USES: dict[str, Callable[[Any, Path], Any]] = {
    "a forward pass": logits,
    "generate": lambda trainer, _: trainer.model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False),
    "without the adapter": without_adapter,
    "gradients": gradients,
    "sums": lambda trainer, _: [each.data.sum().item() for each in trainer.model.parameters()],
    "arrays": lambda trainer, _: [float(each.detach().cpu().numpy().sum()) for each in trainer.model.parameters()],
    "torch.save of weights": lambda trainer, _: saved(trainer.model.state_dict()),
    "torch.save of the optimizer": lambda trainer, _: saved(trainer.optimizer.state_dict()),
    "torch.save of the model": pickled,
    "a deep copy": copied,
    "save_pretrained": folder_saved(lambda trainer, folder: trainer.model.save_pretrained(folder)),
    "save_model": folder_saved(lambda trainer, folder: trainer.save_model(str(folder))),
    "save_state": folder_saved(lambda trainer, folder: trainer.accelerator.save_state(str(folder))),
    "to the CPU": lambda trainer, _: trainer.model.to("cpu").state_dict(),
    "keeps a view": keeps_a_view,
    "evaluate": evaluated,
    "saves the view": saves_the_view,
    "trains on": lambda trainer, _: trainer.train().training_loss,
    "merges": folder_saved(lambda trainer, folder: trainer.model.merge_and_unload().save_pretrained(folder)),
    "in another precision": in_another_precision,
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_what_a_script_does_with_its_model_afterwards_is_as_without(model: Path, tmp_path: Path) -> None:
    plain, trainer = (
        make("GRPO", model, tmp_path / kind, adapter=True, max_steps=1, beta=0.04) for kind in ("plain", "attached")
    )
    before = [each.model.state_dict() for each in (plain, trainer)]  # which see what is learnt
    gate, attachment = attach(trainer)
    torch.manual_seed(3)
    plain.train()
    torch.manual_seed(3)
    attachment.train(trainer.train)
    stages = attachment.stages
    assert same(*before)
    before.clear()
    assert stages.end_if_idle()
    for name, use in USES.items():
        found, leases = [], len(gate.phases)
        for each in (plain, trainer):
            torch.manual_seed(0)
            folder = tmp_path / each.args.output_dir / name
            folder.mkdir(parents=True)
            found.append(use(each, folder))
        assert same(*found), name
        assert (len(gate.phases) == leases) == (name == "save_model"), name  # which reads what is in host memory
        del found
        if name not in ("keeps a view", "in another precision"):  # a script that has a hold of bytes keeps the devices
            assert stages.end_if_idle(), name
            assert [each.device_bytes for each in attachment.parts.all] == [0] * 5


def test_a_second_trainer_goes_on_with_the_model_of_the_first(model: Path, tmp_path: Path) -> None:
    results = []
    for kind in ("plain", "attached"):
        first = make("GRPO", model, tmp_path / kind, max_steps=1)
        if kind == "plain":
            first.train()
        else:
            gate, attachment = attach(first)
            stages = attachment.stages
            attachment.train(first.train)
            stages.begin(INITIALIZATION)  # as of a trainer that is built
        second = make("GRPO", first.model, tmp_path / kind, max_steps=1)
        if kind == "plain":
            second.train()
        else:
            gate.attachment = Attachment(second, parts_of(second, "a job", lambda: SwapMover(CPU)), stages)
            gate.attachment.train(second.train)
        results.append({key: value.clone() for key, value in second.model.state_dict().items()})
        results.append({key: value.clone() for key, value in first.model.state_dict().items()})
    assert all(same(results[0], each) for each in results[1:])


def test_nobody_takes_bytes_away_that_are_in_sight(model: Path, tmp_path: Path) -> None:
    trainer = make("GRPO", model, tmp_path, max_steps=1)
    _, attachment = attach(trainer)
    stages = attachment.stages
    stages.end()
    weight = trainer.model.lm_head.weight
    for hold in (
        weight.detach,
        lambda: weight.data[0],
        weight.sum,
        weight.untyped_storage,
        lambda: weight.detach().numpy(),
    ):
        held = hold()
        assert not stages.end_if_idle(), hold
        del held
        assert stages.end_if_idle(), hold
    attachment.parts.policy.lend = None
    with pytest.raises(NotResidentError, match=r"'lm_head.weight' of the policy of a job was touched \(sum\)"):
        weight.sum()
    assert weight.shape == (trainer.model.config.vocab_size, 32)


def test_what_leases_cannot_surround_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="AsyncGRPOTrainer trains while a vLLM server"):
        refuse_kind(type("AsyncGRPOTrainer", (), {}))
    trainer = make("GRPO", model, tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(SpecError, match="FSDP is not supported in GRPOTrainer"):
        attach(trainer)
    trainer.is_fsdp_enabled, trainer.use_vllm = False, True  # a vLLM of TRL's own, as online DPO has
    with pytest.raises(SpecError, match="use_vllm is not supported in GRPOTrainer"):
        attach(trainer)


def test_what_is_missing_is_said_before_there_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no such script"):
        main(["train.py"])
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SpecError, match="TRL is not installed"):
        install("nobody")


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [
        ("", None, "finished"),
        ("raise SystemExit(0)", 0, "finished"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no-such'])", 2, "failed"),
        ("raise SystemExit('no data')", "no data", "failed"),
    ],
)
def test_how_a_script_ended_is_recorded(
    script: str,
    code: Any,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = Session("job", Stages(Watched()), record_in(tmp_path))
    monkeypatch.setattr(install_module, "install", lambda: session)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text(script)
    try:
        main([str(tmp_path / "train.py")])
    except SystemExit as end:
        assert end.code == code
    session.close()
    assert f"rlix: job is a job of the pool; run folder: {tmp_path}/job\n" in capsys.readouterr().err
    assert ("ended without building a trainer" in caplog.text) == (how == "finished")
    assert load_run(tmp_path / "job").state == how


def test_what_forbids_a_job_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise SpecError("the pool is too small")

    monkeypatch.setattr(install_module, "install", refuse)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "train.py")])
    assert (end.value.code, capsys.readouterr().err.splitlines()[1:]) == (2, ["rlix: the pool is too small"])


def test_a_second_served_trainer_of_a_script_is_refused() -> None:
    served: Any = object()
    start = once(lambda model, dtype: served)
    assert start("one", "bfloat16") is served
    with pytest.raises(SpecError, match=r"second trainer with use_vllm, of two: .* the one of one"):
        start("two", "float32")


@pytest.mark.ray
@pytest.mark.slow
def test_vllm_generation_is_served_by_the_jobs_replicas(
    ray_session: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    started: list[Rollouts] = []

    with attach_program("served", gangs={"actor_train": 1}, rollouts={"actor_infer": 2}, stay=True) as program:

        def start(path: str, dtype: str) -> Rollouts:
            started.append(Rollouts(program, path, RunFolder.open(tmp_path / "run")[0], dtype=dtype))
            return started[-1]

        monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", partial(ServedGeneration, start))
        trainer = make("GRPO", model, tmp_path, use_vllm=True, vllm_mode="server")
        stages = Stages(ProgramGate(program))
        stages.begin(INITIALIZATION)
        run(trainer, Attachment(trainer, parts_of(trainer, "a job", lambda: SwapMover(CPU)), stages))
        assert trainer.vllm_generation.version == 2
        log = [row for row in trainer.state.log_history if "loss" in row]
        # The replicas had the trainer's weights at every step: it finds the same log-probs.
        assert max(row["sampling/sampling_logp_difference/max"] for row in log) < 1e-4
        assert len(log) == 2
        started[0].close()
