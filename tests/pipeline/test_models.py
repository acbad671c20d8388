import json
import socket
from http.client import BadStatusLine
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlix.pipeline.hub import check_reachable
from rlix.pipeline.memory.shape import shape_of
from rlix.pipeline.models import local_model, prepare_model
from rlix.pipeline.sources.tables import load_tables
from rlix.pipeline.spec.model import PretrainedModel, TinyModel
from rlix.pipeline.spec.source import DataSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.protocol.errors import SpecError

MODEL = TinyModel(hidden_size=16, layers=1, heads=2, alphabet="01>")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_a_tiny_model_is_a_hugging_face_folder_drawn_from_its_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    folders = [prepare_model(MODEL, tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert torch.equal(torch.random.get_rng_state(), state)
    a, b, c = map(weights, folders)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert a["lm_head.weight"].shape == (len(load_tokenizer(folders[0])), 16)
    assert a["lm_head.weight"].dtype == getattr(torch, MODEL.dtype)


def test_a_folder_that_holds_the_model_is_left_alone(tmp_path: Path) -> None:
    prepare_model(MODEL, tmp_path, 1)
    written = (tmp_path / "model.safetensors").stat().st_mtime_ns
    prepare_model(MODEL, tmp_path, 2)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written


def test_models_that_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_model(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match=r"model\.path: 'no/such' is neither a local folder nor a model"):
        local_model("no/such")


def test_a_hub_that_is_out_of_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "*")
    for name in ("all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    for client in ("rlix.pipeline.models.snapshot_download", "transformers.AutoConfig.from_pretrained"):
        monkeypatch.setattr(client, None)  # which tries again for half a minute
    with pytest.raises(
        SpecError, match=r"model\.path: 'no/such' .* http://127\.0\.0\.1:1 cannot be reached: .*refused"
    ):
        local_model("no/such")
    with pytest.raises(SpecError, match=r"model\.path: .*cannot be reached: .*refused.*; give a folder"):
        shape_of(PretrainedModel(path="no/such"))
    for streaming in (False, True):
        with pytest.raises(SpecError, match=r"source\.data\.path: no/such .*: not in the cache here, .*refused"):
            load_tables(DataSpec(path="no/such", streaming=streaming))
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    check_reachable("no/such")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 10**12}, "RuntimeError: Storage size calculation overflowed"),
        ({"hidden_size": "x"}, "expected int, got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": 0}, "must be positive"),
        ({"num_hidden_layers": 10**5}, "says 100000 layers, and no more than 1000"),
    ],
)
def test_a_configuration_of_no_model_that_is_known_is_said(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **config}))
    with pytest.raises(SpecError, match=rf"model\.path: the configuration of .* is of no causal LM that .*{said}"):
        shape_of(PretrainedModel(path=str(tmp_path)))


def test_a_configuration_in_other_words_is_understood(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1}))
    assert shape_of(PretrainedModel(path=str(tmp_path))).intermediate == 128


@pytest.mark.parametrize(
    ("error", "certain"),
    [
        (URLError(socket.gaierror(-2, "Name or service not known")), True),
        (URLError(ConnectionRefusedError(111, "Connection refused")), True),
        (TimeoutError("timed out"), False),
        (ConnectionResetError(104, "reset by a proxy"), False),
        (BadStatusLine("of a proxy that speaks SOCKS"), False),
    ],
)
def test_only_a_hub_that_is_certainly_out_of_reach_is_given_up(
    error: Exception, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("rlix.pipeline.hub.getproxies", dict)
    monkeypatch.setattr("rlix.pipeline.hub.urlopen", fails)
    if certain:
        with pytest.raises(ConnectionError, match="cannot be reached"):
            check_reachable("no/such")
    else:
        check_reachable("no/such")
