"""Sequence parallelism: ranks compute on stretches of the same sequences and exchange heads for positions to attend.

Every rank holds all layers' inputs for its stretch alone, so that activations of long sequences are spread over ranks.
For attention each gets all positions of a part of the heads, and gives them back (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rlix.protocol.errors import RlixError

_STRETCHES = "rlix_stretches"  # the argument that transformers hands down to the attention of every layer
_OF_POSITIONS = ("logits", "last_hidden_state")
_REFUSED = ("attention_mask", "inputs_embeds", "past_key_values", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of every sequence that this rank computes on: number `rank` of `size` equally long ones."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Stretch":
        """Of this rank in the `sequence` group of a module's context; all of it where there is no such group."""
        return cls() if group is None else cls(group, dist.get_rank(group), dist.get_world_size(group))

    def padded(self, length: int) -> int:
        return -(-length // self.size) * self.size

    def cut(self, whole: Tensor, fill: int = 0) -> Tensor:
        """This rank's part of the second dimension of [rows, length, ...], which is padded until it divides."""
        missing = self.padded(whole.shape[1]) - whole.shape[1]
        if missing:
            whole = pad(whole, (0, 0) * (whole.dim() - 2) + (0, missing), value=fill)
        return whole.chunk(self.size, dim=1)[self.rank]

    def joined(self, part: Tensor, length: int) -> Tensor:
        """The ranks' parts [rows, length / size, ...] as [rows, length, ...] on each of them.

        Differentiable: all ranks compute the same loss of it, and FSDP averages their gradients, so each passes its own
        stretch's on, times `size`.
        """
        if self.group is None:
            return part
        whole: Tensor = _Joined.apply(part, self, length)
        return whole


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, stretch: Stretch, length: int) -> Tensor:
        ctx.stretch = stretch
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(stretch.size)]
        dist.all_gather(parts, part.contiguous(), group=stretch.group)
        return torch.cat(parts, dim=1)[:, :length].contiguous()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        stretch: Stretch = ctx.stretch
        return stretch.cut(upstream) * stretch.size, None, None


class _Exchanged(torch.autograd.Function):
    """[size, ...]: the first dimension's parts go to the ranks, and theirs come."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        back: Tensor = _Exchanged.apply(upstream.contiguous(), ctx.group)
        return back, None


@dataclass(slots=True)
class _Stretches:
    """What the attention of one forward pass needs to know of the whole sequences."""

    stretch: Stretch
    positions: Tensor
    mask: Tensor | None
    seen: int = 0


def spread(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Have every transformers model in `module` compute on this rank's stretches; called as it is otherwise.

    Raises:
        ValueError: there is none, or its layers cannot be computed so; says why.
    """
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    inner = {id(part) for model in models for part in model.modules() if part is not model}
    outermost = [model for model in models if id(model) not in inner]
    if not outermost:
        raise ValueError(
            f"sequence_parallel_size: {type(module).__name__} holds no transformers model, whose attention could be "
            "computed on parts of a sequence"
        )
    for model in outermost:
        check(model.config, type(model).__name__, dist.get_world_size(group))
        _spread_attention(model.config._attn_implementation)
        model.forward = partial(_forward, model, model.forward, Stretch.of(group))


def check(configuration: PretrainedConfig, model: str, size: int) -> None:
    """Raise ValueError unless a model of this configuration can be computed on stretches; `model` names it."""
    config = configuration.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or key_heads % size:
        raise ValueError(
            f"sequence_parallel_size={size} must divide the {heads} attention heads and {key_heads} key heads of "
            f"{model}"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds or slides:
        raise ValueError(
            f"sequence_parallel_size={size}: {model} has layers that are no full attention "
            f"({', '.join(sorted(kinds)) or 'sliding_attention'}); they cannot be computed on parts of a sequence"
        )


def _forward(model: Any, plain: Callable[..., Any], stretch: Stretch, /, *args: Any, **kwargs: Any) -> Any:
    """A model's forward pass with whole sequences as arguments and result."""
    if args:
        kwargs["input_ids"], *more = args
        if more:
            raise TypeError(f"with sequence parallelism {type(model).__name__} takes keyword arguments after input_ids")
    _check_arguments(kwargs)
    ids: Tensor = kwargs.pop("input_ids")
    labels = kwargs.pop("labels", None)
    length = ids.shape[1]
    given = kwargs.pop("position_ids", None)
    stretches = _Stretches(stretch, *_positions(ids, given, stretch))
    output = plain(
        input_ids=stretch.cut(ids),
        position_ids=stretch.cut(stretches.positions),
        **{**kwargs, "use_cache": False, _STRETCHES: stretches},
    )
    if not stretches.seen:
        raise RlixError(
            f"{type(model).__name__} does not hand arguments down to its attention, and cannot be computed on parts of "
            "a sequence: build with sequence_parallel_size=1"
        )
    for name in _OF_POSITIONS:
        if getattr(output, name, None) is not None:
            setattr(output, name, stretch.joined(getattr(output, name), length))
    if labels is not None:
        output.loss = model.loss_function(logits=output.logits, labels=labels, vocab_size=model.config.vocab_size)
    return output


def _check_arguments(kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not (mask[:, 1:] > mask[:, :-1]).any():
        del kwargs["attention_mask"]  # padding on the right, which causal attention never looks at
    kwargs.pop("use_cache", None)
    if refused := [name for name in _REFUSED if kwargs.get(name) is not None and kwargs[name] is not False]:
        raise ValueError(
            f"with sequence parallelism a model cannot be called with {', '.join(refused)}; sequences are padded on "
            "the right, or packed in one row and told apart by position_ids"
        )


def _positions(ids: Tensor, given: Tensor | None, stretch: Stretch) -> tuple[Tensor, Tensor | None]:
    """Of all tokens, padding included, and the mask [1, 1, length, length] of sequences that are packed in one row."""
    length, padded = ids.shape[1], stretch.padded(ids.shape[1])
    rows = torch.arange(padded, device=ids.device).expand(len(ids), padded)
    if given is None:
        return rows, None
    positions = torch.cat((given.expand(len(ids), length), rows[:, : padded - length]), 1)
    sequences = (positions[:, 1:] != positions[:, :-1] + 1).cumsum(1)
    if len(ids) > 1 or not sequences.any():
        return positions, None
    number = pad(sequences, (1, 0))
    same = number[:, None, :, None] == number[:, None, None, :]
    return positions, same & (rows[0, :, None] >= rows[0])


def _spread_attention(name: str) -> None:
    """Let an attention implementation compute stretches where the model is called with such."""
    if name == "eager":
        raise ValueError("sequence_parallel_size: attention 'eager' is each model's own; use 'sdpa' or flash attention")
    plain = AttentionInterface()[name]
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        stretches: _Stretches | None = kwargs.pop(_STRETCHES, None)
        if stretches is None:
            answer: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, **kwargs)
            return answer
        stretches.seen += 1
        whole = [_exchanged(part, stretches.stretch) for part in (query, key, value)]  # all positions of some heads
        mask = stretches.mask if name == "sdpa" else None  # flash attention tells packed sequences by their positions
        out, _ = plain(module, *whole, mask, **{**kwargs, "position_ids": stretches.positions})
        return _exchanged(out, stretches.stretch), None

    AttentionInterface.register(name, attention)


def _exchanged(part: Tensor, stretch: Stretch) -> Tensor:
    """[rows, a, b, dim] to [rows, a / size, b * size, dim]: heads for positions, and back."""
    sent = part.unflatten(1, (stretch.size, -1)).movedim(1, 0).contiguous()
    received: Tensor = _Exchanged.apply(sent, stretch.group)
    return received.movedim(0, 2).flatten(2, 3)
