"""What a job trains: the built-in tiny model, or any Hugging Face causal LM."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from rlix.pipeline.spec.section import Count, Section


class TinyModel(Section):
    """A small Qwen2 with one token per character, initialised from the job's seed."""

    dtype: ClassVar[str] = "float32"
    linear: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    kind: Literal["tiny"] = "tiny"
    hidden_size: Annotated[Count, Field(le=8192)] = 64
    layers: Annotated[Count, Field(le=128)] = 2
    heads: Annotated[Count, Field(le=256)] = 4
    context: Annotated[Count, Field(le=2**20)] = 64
    """Longest prompt and completion together, in tokens."""
    alphabet: Annotated[str, Field(min_length=1)] = "0123456789>="


class PretrainedModel(Section):
    """A Hugging Face causal LM: a local folder (relative to the job's file) or a name on the hub."""

    kind: Literal["pretrained"] = "pretrained"
    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which training computes and rollouts hold the weights. The optimizer's own weights are always float32."""


def quantized(folder: Path) -> str | None:
    """What there is to say of a model folder whose weights are quantized; None: they are not, as far as it says."""
    try:
        found = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError):  # others say so
        return None
    return quantization_problem(str(folder), found)


def quantization_problem(model: str, found: Any) -> str | None:
    """The same of what a model's configuration says of its quantization."""
    if found is None:
        return None
    how = found.get("quant_method", "in a way of its own") if isinstance(found, dict) else type(found).__name__
    return (
        f"{model} is quantized ({how}), and training needs plain weights: name a model of bfloat16 or float32 weights "
        "(vLLM's rollouts can hold them quantized: rollout.executor_options.quantization)"
    )


def _model_kind(value: Any) -> str:
    given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return "pretrained" if given.get("kind", "pretrained" if "path" in given else "tiny") == "pretrained" else "tiny"


ModelSpec = Annotated[
    Annotated[TinyModel, Tag("tiny")] | Annotated[PretrainedModel, Tag("pretrained")], Discriminator(_model_kind)
]
