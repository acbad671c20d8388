"""What of a model decides how much memory it takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlix.pipeline.hub import check_reachable
from rlix.pipeline.spec.model import quantization_problem
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from rlix.pipeline.spec.model import ModelSpec

_MOST_LAYERS = 1000  # the deepest models have a tenth of that; a thousand take two seconds to count


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only language model.

    Attributes:
        parameters: in all; tied ones once.
        block: of the largest transformer block, the unit that FSDP gathers.
        layers: transformer blocks.
        intermediate: width of the feed-forward part that a token goes through; of its experts together.
        query: width of all attention heads together; `keys`: of all key heads.
        context: tokens that the model can see at once.
        linear: last names of the linear layers that adapters may go on: all but the head.
    """

    parameters: int
    block: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    query: int
    keys: int
    context: int
    linear: frozenset[str] = frozenset()

    @property
    def rest(self) -> int:
        """Parameters outside the blocks: embeddings, head, last norm."""
        return max(0, self.parameters - self.layers * self.block)

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def cache(self) -> int:
        """Numbers that the KV cache holds for each token."""
        return 2 * self.layers * self.keys


def shape_of(model: "ModelSpec", config_folder: Path | None = None) -> ModelShape:
    """The sizes of a job's model, of which its configuration is needed and no weights.

    Args:
        config_folder: holds the configuration; default: where the job's model is, or the hub.

    Raises:
        SpecError: the configuration cannot be had, or is of no causal LM.
    """
    from transformers import AutoConfig

    if model.kind == "tiny" and config_folder is None:
        from rlix.pipeline.models import tiny_config

        return counted(tiny_config(model))
    where = str(config_folder) if config_folder is not None else getattr(model, "path", "")
    field = "model.path" if config_folder is None else "--model-config"
    try:
        if not Path(where).is_dir():
            check_reachable(where)
        config = AutoConfig.from_pretrained(where)
        shape = counted(config)
    except OSError as error:
        raise SpecError(
            f"{field}: the configuration of {where!r} cannot be had ({str(error).splitlines()[0]}); give a folder "
            "with its config.json, e.g. with --model-config"
        ) from error
    except Exception as error:  # what is in a configuration may make transformers and torch raise anything
        found = error.__cause__ or error
        raise SpecError(
            f"{field}: the configuration of {where!r} is of no causal LM that can be counted "
            f"({type(found).__name__}: {next(iter(str(found).splitlines()), '')}); use another model"
        ) from error
    if problem := quantization_problem(where, getattr(config, "quantization_config", None)):
        raise SpecError(f"{field}: {problem}")
    return shape


def counted(config: Any) -> ModelShape:
    """The sizes that a transformers configuration says, with the parameters counted on a model without bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlix.engine.lora import linear_layers

    if min(config.vocab_size, config.hidden_size, config.max_position_embeddings) < 1:
        raise ValueError("its vocabulary, its hidden size and its context must be positive")
    if config.num_hidden_layers > _MOST_LAYERS:
        raise ValueError(f"it says {config.num_hidden_layers} layers, and no more than {_MOST_LAYERS} are counted")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = [m for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())]
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        block=max((sum(p.numel() for p in b.parameters()) for b in blocks), default=0),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        intermediate=_intermediate(config),
        vocabulary=int(config.vocab_size),
        query=heads * width,
        keys=int(getattr(config, "num_key_value_heads", None) or heads) * width,
        context=int(config.max_position_embeddings),
        linear=frozenset(linear_layers(model)),
    )


def _intermediate(config: Any) -> int:
    """Of the feed-forward part, or of as many experts as a token is sent to."""
    plain = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(plain)
    each = getattr(config, "moe_intermediate_size", None) or plain
    return int(experts * each + (getattr(config, "shared_expert_intermediate_size", None) or 0))
