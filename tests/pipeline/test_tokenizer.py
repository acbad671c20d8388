import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from rlix.engine.model_source import ModelSource
from rlix.pipeline.ends import Ends
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import Answer, End
from rlix.pipeline.sources.base import ended
from rlix.pipeline.sources.episodes import EpisodeSource
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.tokenizer import character_tokenizer, load_tokenizer
from rlix.protocol.errors import SpecError

ALPHABET = "0123456789>= \nä<"
TOKENIZER = character_tokenizer(ALPHABET)


@given(st.text(ALPHABET, max_size=30))
def test_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == [TOKENIZER.bos_token_id, *(4 + ALPHABET.index(c) for c in text)]
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id], skip_special_tokens=True) == text


def test_special_tokens_come_first() -> None:
    assert [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id] == [
        0,
        1,
        2,
        3,
    ]
    assert len(TOKENIZER) == len(ALPHABET) + 4
    assert TOKENIZER.encode("1x", add_special_tokens=False) == [5, 3]


def test_what_an_environment_says_in_unknown_characters_is_read_and_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlix.pipeline.tokenizer._said", set())
    source: EpisodeSource = SimpleNamespace(around=SimpleNamespace(tokenizer=TOKENIZER))  # type: ignore[assignment]
    for said in ("1", "1x", "x2", "-x1"):
        read = EpisodeSource.encode(source, said, (1,))
        assert read == tuple(TOKENIZER.encode(said, add_special_tokens=False))
    first, second = (record.getMessage() for record in caplog.records)
    assert "does not know 'x': the policy reads <unk> in its place, in '1x'" in first
    assert "does not know '-'" in second
    asked: list[str] = []
    monkeypatch.setattr(type(TOKENIZER), "encode", lambda _, text, **__: asked.append(text) or [3])
    EpisodeSource.encode(source, "-1-" * 1000, (1,))
    assert asked == ["-1-" * 1000, "1"], "each character once, and none that was named already"


def test_a_saved_folder_loads_as_any_hugging_face_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("12>") == TOKENIZER.encode("12>")
    assert loaded.decode(loaded.encode("1 2\n"), skip_special_tokens=True) == "1 2\n"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


def test_the_tiny_models_own_tokenizer_is_loaded_beside_its_configuration(tmp_path: Path) -> None:
    write_tiny_model(TinyModel(alphabet=ALPHABET, hidden_size=8, layers=1, heads=2), tmp_path, 0)
    engines: Any = ModelSource.of(tmp_path).tokenizer()
    for loaded in (load_tokenizer(tmp_path), engines):
        assert loaded.encode("1 2\nä?") == TOKENIZER.encode("1 2\nä?")
        assert loaded.encode("?", add_special_tokens=False) == [loaded.unk_token_id]
        assert loaded.decode(loaded.encode("1 2\nä"), skip_special_tokens=True) == "1 2\nä"


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {
    "bytes": BYTES,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "with a space first": pre_tokenizers.ByteLevel(add_prefix_space=True),
}


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2", "gpt2"])
def test_the_tokenizer_of_a_folder_is_the_one_that_was_saved_there(kind: str, tmp_path: Path) -> None:
    """For its kind of model transformers has another one, which a folder that holds that one keeps."""
    own: Any = {"qwen2": Qwen2Tokenizer, "llama": LlamaTokenizer, "gemma2": GemmaTokenizer, "gpt2": GPT2Tokenizer}[kind]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa", "12", "▁", "<|endoftext|>"]
    vocabulary, merges = {word: number for number, word in enumerate(words)}, [("a", "b"), ("Ġ", "a"), ("1", "2")]
    for name, split in SPLITS.items():
        backend = Tokenizer(models.BPE(vocabulary, merges))
        backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
        folder = tmp_path / name
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
        values = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(values | {"tokenizer_class": own.__name__}))
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        loaded = load_tokenizer(folder)
        for text in ("1 + 1=", "ab 1212 a", "  AB\n\nab"):
            ids = backend.encode(text).ids
            assert loaded.encode(text, add_special_tokens=False) == ids, (name, text)
            assert loaded.decode(ids).strip() == text.strip()
    own(vocab=vocabulary, merges=merges).save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": kind}))
    assert type(load_tokenizer(tmp_path / "own")) is own


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    bare = character_tokenizer("ab")
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 2


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="twice"):
        character_tokenizer("aba")
    with pytest.raises(SpecError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    endless = character_tokenizer("ab")
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="would never end"):
        load_tokenizer(tmp_path)


class TestEnds:
    tokenizer = character_tokenizer("0123456789>=")

    def ends(self, folder: Path, *strings: str, token_ids: tuple[int, ...] = ()) -> Ends:
        return Ends(self.tokenizer, folder, strings, token_ids)

    def test_tokens_are_those_of_tokenizer_model_and_job(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
        assert self.ends(tmp_path, ">", "==", token_ids=(9,)).token_ids == (2, 7, 9, self.tokenizer.encode(">")[1])
        assert self.ends(tmp_path / "none").token_ids == (2,)
        with pytest.raises(SpecError, match=r"rollout\.stop_token_ids: 16 is none of the model's 16 tokens"):
            self.ends(tmp_path, token_ids=(15, 16))

    def test_a_string_cuts_after_its_first_place(self, tmp_path: Path) -> None:
        ends = self.ends(tmp_path, "==", "9>")
        for text, kept in (("12==34==", 4), ("9>==", 2), ("==", 2), ("1=2=", None), ("", None)):
            assert ends.kept(self.tokenizer.encode(text)[1:]) == kept, text
        assert self.ends(tmp_path).kept([1, 2, 3]) is None

    def test_what_is_cut_keeps_its_log_probs_and_is_no_longer_truncated(self, tmp_path: Path) -> None:
        ids = self.tokenizer.encode("12==34")[1:]
        logprobs, versions = [-0.1 * i for i in range(6)], [3, 3, 4, 4, 5, 5]
        done = Trajectory("t", (1,), 0, Sampling(6), list(ids), logprobs, versions, "length")
        answer, end = ended(done, self.ends(tmp_path, "=="))
        assert answer == Answer(tuple(ids[:4]), tuple(logprobs[:4]), (3, 3, 4, 4))
        assert end is End.DONE
        assert ended(done, self.ends(tmp_path)) == (
            Answer(tuple(ids), tuple(logprobs), tuple(versions), cut_off=True),
            End.LENGTH,
        )
