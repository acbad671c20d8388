"""What a job trains: the built-in tiny model, or any Hugging Face causal LM."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from rlix.pipeline.spec.section import Count, Section

if TYPE_CHECKING:
    import torch


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

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return torch.float32


class PretrainedModel(Section):
    """A Hugging Face causal LM: a local folder (relative to the job's file) or a name on the hub."""

    kind: Literal["pretrained"] = "pretrained"
    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which training computes and rollouts hold the weights. The optimizer's own weights are always float32."""

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


def _model_kind(value: Any) -> str:
    given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return "pretrained" if given.get("kind", "pretrained" if "path" in given else "tiny") == "pretrained" else "tiny"


ModelSpec = Annotated[
    Annotated[TinyModel, Tag("tiny")] | Annotated[PretrainedModel, Tag("pretrained")], Discriminator(_model_kind)
]
