import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import rlix.nn
from rlix.engine.train import checkpoint
from rlix.engine.train.materialize import ModuleSpec, build_module, parameters_on_meta
from rlix.engine.train.stored import InFile
from rlix.engine.train.together import WholeWriter
from rlix.engine.weights.boxes import Cut, pieces_on_mesh
from rlix.protocol.errors import RlixError, WeightSyncError
from tests.engine.models import qwen
from tests.engine.test_architectures import made
from tests.engine.test_architectures import policy as architecture
from tests.engine.training_models import Policy, batch
from tests.waiting import HANG_S

CPU = torch.device("cpu")


def built(seed: int = 0, **options: object) -> Policy:
    module = build_module(ModuleSpec(Policy, (qwen(),), seed=seed, **options), CPU, None)
    module.on_weights_materialized()
    assert isinstance(module, Policy)
    return module


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    module = built()
    for step in range(3):
        module.train_step(batch(step))
    checkpoint.save_state(module, tmp_path / "state")
    expected_draws = draws()
    expected = [module.train_step(batch(step)) for step in (3, 4)]

    other = built(seed=9)
    checkpoint.load_state(other, tmp_path / "state")
    assert draws() == expected_draws
    assert other.steps == 3
    assert [other.train_step(batch(step)) for step in (3, 4)] == expected
    assert equal(module, other)
    assert other.scheduler.get_last_lr() == module.scheduler.get_last_lr()


def test_state_is_safetensors_and_json_only(tmp_path: Path) -> None:
    module = built()
    module.train_step(batch(0))
    checkpoint.save_state(module, tmp_path / "state")
    assert {path.suffix for path in (tmp_path / "state").iterdir()} == {".safetensors", ".json"}
    for path in (tmp_path / "state").glob("*.json"):
        json.loads(path.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]  # nothing temporary is left


def test_saving_again_replaces_and_an_interrupted_save_leaves_the_old_state(tmp_path: Path) -> None:
    module = built()
    folder = tmp_path / "state"
    checkpoint.save_state(module, folder)
    checkpoint.temporary(folder).mkdir()
    (checkpoint.temporary(folder) / "junk").write_text("half a file")
    other = built(seed=1)
    checkpoint.load_state(other, folder)
    assert equal(module, other)
    module.train_step(batch(0))
    checkpoint.save_state(module, folder)
    checkpoint.load_state(other, folder)
    assert equal(module, other)
    assert not (folder / "junk").exists()


def test_wrong_states_are_refused(tmp_path: Path) -> None:
    module = built()
    with pytest.raises(FileNotFoundError, match=r"state\.json is missing"):
        checkpoint.load_state(module, tmp_path)
    checkpoint.save_state(module, tmp_path / "state")
    module.other = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"has optimizers \['optimizer'\], the module has \['optimizer', 'other'\]"):
        checkpoint.load_state(module, tmp_path / "state")
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    (tmp_path / "state" / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.load_state(module, tmp_path / "state")


@pytest.mark.parametrize("shard_bytes", [2**30, 2**17])
def test_saved_weights_load_in_plain_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    module = built(seed=4)
    tokenizer = tmp_path / "source"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    checkpoint.save_weights(module, tmp_path / "model", str(tokenizer))
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert ("model.safetensors.index.json" in files) == (shard_bytes < 2**30)
    assert "tokenizer.json" in files
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(plain) is Qwen2ForCausalLM
    assert equal(plain, module)
    assert plain.config.architectures == ["Qwen2ForCausalLM"]
    assert equal(built(weights_path=str(tmp_path / "model")), module)  # and come back here, from one file or several


@pytest.mark.parametrize("tied", [False, True])
def test_weights_from_a_folder_equal_those_transformers_loads(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(3)
    plain = Qwen2ForCausalLM(qwen(tie_word_embeddings=tied)).eval()
    plain.save_pretrained(tmp_path)
    spec = ModuleSpec(Policy, (qwen(tie_word_embeddings=tied),), weights_path=str(tmp_path))
    module = build_module(spec, CPU, None).eval()
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == tied
    tokens = torch.tensor(batch(0))
    assert torch.equal(module(input_ids=tokens).logits, plain(input_ids=tokens).logits)  # rotary buffers are right too
    half = build_module(ModuleSpec(Policy, spec.args, weights_path=str(tmp_path), dtype="bfloat16"), CPU, None)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_seeded_weights_equal_plain_pytorch() -> None:
    torch.manual_seed(5)
    assert equal(Qwen2ForCausalLM(qwen()), built(seed=5))


def test_meta_parameters_cost_nothing_and_stay_tied() -> None:
    with parameters_on_meta():
        module = Policy(qwen(tie_word_embeddings=True))
    assert all(p.is_meta for p in module.parameters())
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not any(b.is_meta for b in module.buffers())


def test_parameters_go_to_meta_in_one_thread_only_and_never_afterwards() -> None:
    """Two threads that build at once put torch's method back in any order."""
    entered, may_leave = threading.Event(), threading.Event()

    def first() -> bool:
        with parameters_on_meta():
            entered.set()
            assert may_leave.wait(HANG_S)
            return torch.nn.Linear(1, 1).weight.is_meta

    def second() -> bool:
        with parameters_on_meta():
            return torch.nn.Linear(1, 1).weight.is_meta

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(first)
        assert entered.wait(HANG_S)
        assert not torch.nn.Linear(1, 1).weight.is_meta
        other = threads.submit(second)
        may_leave.set()
        assert one.result(HANG_S) and other.result(HANG_S)
    assert not torch.nn.Linear(1, 1).weight.is_meta


class WithHead(rlix.nn.BaseTrainModule):
    """Renames what it reads, and adds a head of its own."""

    allow_missing = ("head.*",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 1)

    def import_name(self, name: str) -> str:
        return name.replace("old.", "body.")


def test_names_are_mapped_new_ones_allowed_and_wrong_ones_listed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = {"old.weight": torch.ones(4, 4), "old.bias": torch.ones(4)}
    save_file(stored, tmp_path / "model.safetensors")
    module = build_module(ModuleSpec(WithHead, (4,), weights_path=str(tmp_path)), CPU, None)
    assert torch.equal(module.body.weight, torch.ones(4, 4))
    assert module.head.bias.item() == 0.0
    again = build_module(ModuleSpec(WithHead, (4,), weights_path=str(tmp_path)), CPU, None)
    assert torch.equal(module.head.weight, again.head.weight)

    save_file({"old.weight": torch.ones(4, 5), "extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightSyncError) as caught:
        build_module(ModuleSpec(WithHead, (4,), weights_path=str(tmp_path)), CPU, None)
    message = str(caught.value)
    for part in ("missing: body.bias", "unknown here: extra", "shape of body.weight: stored [4, 5], here [4, 4]"):
        assert part in message
    assert "head" not in message


def test_a_save_replaces_saves_only(tmp_path: Path) -> None:
    module = build_module(ModuleSpec(Policy, (qwen(),)), CPU, None)
    module.on_weights_materialized()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("years of work")
    (tmp_path / "file").write_text("more of it")
    for name in ("notes", "file"):
        for save in (checkpoint.save_weights, checkpoint.save_state):
            arguments = (None,) if save is checkpoint.save_weights else ()
            with pytest.raises(FileExistsError, match=f"{name} is no earlier save"):
                save(module, tmp_path / name, *arguments)  # type: ignore[operator]
    assert (tmp_path / "notes" / "mine.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    checkpoint.save_weights(module, tmp_path / "empty", None)
    checkpoint.save_state(module, tmp_path / "empty")  # a save of the other kind
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "notes"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_rank_reads_just_what_it_holds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each tensor, where experts of a layer are tensors of their own in the folder."""
    made(kind).save_pretrained(tmp_path)
    read: list[int] = []
    plainly = InFile.read

    def counted(stored: InFile, box: Any = None) -> torch.Tensor:
        tensor = plainly(stored, box)
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(InFile, "read", counted)
    module_class, config = architecture(kind)
    spec = ModuleSpec(module_class, (config,), weights_path=str(tmp_path))
    whole = build_module(spec, CPU).state_dict()
    everything = sum(read)
    read.clear()
    of_both = [
        build_module(
            spec, CPU, None, lambda shape, rank=rank: pieces_on_mesh(shape, (2,), (Cut(0),), (rank,), "")
        ).state_dict()
        for rank in range(2)
    ]
    assert sum(read) == everything
    for name, tensor in whole.items():
        half = -(-len(tensor) // 2)
        assert torch.equal(torch.cat([of_both[0][name][:half], of_both[1][name][half:]]), tensor)


def test_a_save_to_which_a_part_of_a_rank_has_not_come_is_not_complete(tmp_path: Path) -> None:
    metadata = Metadata(state_dict_metadata={})
    written = [[WriteResult(MetadataIndex("weight"), 1, _StorageInfo(f"shard_{rank}", 0, 1))] for rank in range(3)]
    writer = WholeWriter(str(tmp_path), save_distributed=True)
    (tmp_path / "shard_0").touch()
    with pytest.raises(RlixError, match="shard_1, shard_2 did not come to"):
        writer.finish(metadata, written)
    for rank in (1, 2):
        (tmp_path / f"shard_{rank}").touch()
    writer.finish(metadata, written)
