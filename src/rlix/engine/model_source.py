"""What a model is made of: a folder or hub name with weights, or a configuration whose weights are published later."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from rlix.engine.executors.attention import ATTENTION
from rlix.engine.tokenizer import saved_tokenizer
from rlix.protocol.errors import WeightSyncError

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A Hugging Face causal LM: `path` (a folder or hub name), or a `config` as its dictionary, without weights."""

    path: str | None = None
    config: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, source: "ModelSource | str | Path | PretrainedConfig | Mapping[str, Any]") -> "ModelSource":
        """From whatever a user calls a model.

        Raises:
            FileNotFoundError: there is no such folder, and it cannot be a hub name.
            ValueError: a dictionary without `model_type`. TypeError: anything else that is no model.
        """
        if isinstance(source, ModelSource):
            return source
        if isinstance(source, str | Path):
            if (isinstance(source, Path) or not _HUB_NAME.fullmatch(source)) and not Path(source).is_dir():
                raise FileNotFoundError(f"no model folder {source}: give a folder that is there, or a hub name")
            return cls(path=str(source))
        if isinstance(source, PretrainedConfig):
            return cls(config=source.to_dict())
        if isinstance(source, Mapping):
            if "model_type" not in source:
                raise ValueError('a model configuration needs "model_type" (for example "qwen2")')
            return cls(config=dict(source))
        raise TypeError(f"a model is a folder, a hub name or a configuration, not {type(source).__name__}")

    @property
    def has_weights(self) -> bool:
        return self.path is not None

    @property
    def is_local(self) -> bool:
        return self.path is None or Path(self.path).is_dir()

    def load_config(self) -> PretrainedConfig:
        if self.path is not None:
            if self.is_local and not (Path(self.path) / "config.json").is_file():
                raise FileNotFoundError(f"model folder {self.path} has no config.json")
            try:
                return AutoConfig.from_pretrained(self.path)
            except OSError as error:
                raise FileNotFoundError(f"model {self.path}: no folder here, nor on the hub: {error}") from error
        values = dict(self.config or {})
        return AutoConfig.for_model(values.pop("model_type"), **values)

    def check_takes_published(self) -> None:
        """Raises WeightSyncError for a quantized model: a trainer's weights come without the scales that it has."""
        quantization = getattr(self.load_config(), "quantization_config", None) or self._beside()
        if quantization is not None:
            said = quantization if isinstance(quantization, Mapping) else vars(quantization)
            raise WeightSyncError(
                f"{self.path or 'the model'} is quantized ({said.get('quant_method', 'in a way of its own')}), and a "
                "trainer sends plain weights, without its scales; nothing was changed: build this engine of the "
                "unquantized model"
            )

    def _beside(self) -> dict[str, Any] | None:
        """What says so in a file of its own, as TensorRT's model optimizer writes it."""
        if self.path is None:
            return None
        name = "hf_quant_config.json"
        file = Path(self.path) / name if self.is_local else try_to_load_from_cache(self.path, name)
        if not isinstance(file, str | Path) or not Path(file).is_file():
            return None
        said = json.loads(Path(file).read_text(encoding="utf-8")).get("quantization", {})
        return {"quant_method": f"{said.get('quant_algo', 'in a way of its own')}, by {name}"}

    def build(self, dtype: torch.dtype, *, weights: bool) -> PreTrainedModel:
        """The model on the CPU in eval mode; without `weights` its parameters are undefined until published."""
        if weights and self.path is not None:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype, attn_implementation=ATTENTION)
        else:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(self.load_config(), dtype=dtype, attn_implementation=ATTENTION)
            model.tie_weights()  # part of the initialisation that was skipped
        model.requires_grad_(False)
        for parameter in model.parameters():
            # Memory-mapped weights lie at odd addresses, and some CPU matrix kernels round by alignment.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        return model.eval()

    def on_meta(self) -> PreTrainedModel:
        """The model's names, shapes and ties, and no bytes."""
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.load_config())
            return model

    def tokenizer(self) -> Any | None:
        """The source's tokenizer, or None where it has none."""
        if self.path is None:
            return None
        if self.is_local and not (Path(self.path) / "tokenizer_config.json").is_file():
            return None
        return saved_tokenizer(self.path)

    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.load_config().eos_token_id
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)
