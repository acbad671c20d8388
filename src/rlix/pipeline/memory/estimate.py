"""Bytes per device in each phase of a job. Pure functions of sizes; docs/training.md says what they leave out."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlix.pipeline.memory.shape import ModelShape

_WIDE = 4  # bytes of the numbers that are trained, reduced and normalised with
_MOMENTS = 2  # of AdamW, for each parameter
_LOGITS_AT_ONCE = 2**27  # as in `rlix.pipeline.training.token_scores`, which imports torch
_LOGITS_COPIES = 3
_BLOCKS_GATHERED = 2  # the one that computes and the one that comes next
_SYNC_CHUNKS = 2
_CHUNK = 32 * 2**20
PREFILL_TOKENS = 8192
"""Of one forward pass of a replica: vLLM's default on large GPUs."""
_GRAPHS = 2**30  # CUDA graphs and what they keep


@dataclass(frozen=True, slots=True)
class Training:
    """How a cluster trains.

    Attributes:
        width: devices that hold one copy of weights and optimizer state between them; `devices`: all of them.
        compute: bytes of a number in forward and backward passes.
        tokens: most that go through the model at once.
        stored: bytes of a number of the weights as they are kept.
        trained: numbers of the adapters, all of them on each device; None where the weights themselves are trained.
    """

    devices: int
    width: int
    compute: int
    tokens: int
    checkpointing: bool = False
    offload: bool = False
    stored: int = _WIDE
    trained: int | None = None

    @property
    def wrapped(self) -> bool:
        """Whether FSDP gathers and casts weights; a device alone in float32 computes with those it has."""
        return self.devices > 1 or self.compute != self.stored


@dataclass(frozen=True, slots=True)
class Generation:
    """How a replica generates.

    Attributes:
        width: devices that hold one copy of the weights between them.
        dtype: bytes of a number of the weights and of the KV cache.
        sequences: most at a time; `longest`: tokens of the longest.
        share: of the device's memory, at most.
        cache_bytes: of the KV cache, when the job says it.
    """

    width: int
    dtype: int
    sequences: int
    longest: int
    share: float = 0.9
    cache_bytes: int | None = None
    prefill_tokens: int = PREFILL_TOKENS
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """What a phase takes on each of a cluster's devices: bytes by what they are for."""

    phase: str
    cluster: str
    devices: int
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def training(model: ModelShape, how: Training, cluster: str = "actor_train", *, has_logits: bool = True) -> Need:
    """An update at its highest: in the backward pass, or, with offload, perhaps when the optimizer steps."""
    own = model.parameters // how.width
    learnt = own if how.trained is None else how.trained
    moments = _WIDE * _MOMENTS * learnt
    resident = {"weights": _weights(model, how), "gradients": _WIDE * learnt}
    backward = {
        **resident,
        **({} if how.offload else {"optimizer": moments}),
        "gathered": _gathered(model, how, backward=True),
        "activations": activations(model, how),
        "logits": _logits(model, how, backward=True) if has_logits else 0,
    }
    step = {**resident, "optimizer": moments}
    parts = max(backward, step, key=lambda parts: sum(parts.values()))
    return Need("critic_training" if cluster == "critic" else "actor_training", cluster, how.devices, parts)


def scoring(model: ModelShape, how: Training, phase: str, cluster: str, *, moments: bool = True) -> Need:
    """Log-probs or values: a forward pass beside whatever else the engine keeps on its devices."""
    parts = {
        "weights": _weights(model, how),
        "optimizer": _moments(model, how) if moments and not how.offload else 0,
        "gathered": _gathered(model, how, backward=False),
        "activations": how.tokens * (how.compute * model.hidden + _block_bytes(model, how.compute)),
        "logits": _logits(model, how, backward=False),
    }
    return Need(phase, cluster, how.devices, parts)


def sync(model: ModelShape, how: Training) -> Need:
    """Publishing weights: chunks of them come together on the trainer's devices."""
    largest = max(model.head, _CHUNK // _WIDE)
    parts = {
        "weights": _weights(model, how),
        "optimizer": 0 if how.offload else _moments(model, how),
        "buffers": _SYNC_CHUNKS * how.compute * largest,
    }
    return Need("weight_sync", "actor_train", how.devices, parts)


def _moments(model: ModelShape, how: Training) -> int:
    return _WIDE * _MOMENTS * (model.parameters // how.width if how.trained is None else how.trained)


def _weights(model: ModelShape, how: Training) -> int:
    return how.stored * model.parameters // how.width + _WIDE * (how.trained or 0)


def adapter_parameters(model: ModelShape, rank: int) -> int:
    """Of an adapter on every linear layer of a Llama-like block."""
    attention = 2 * (model.hidden + model.query) + 2 * (model.hidden + model.keys)
    return rank * model.layers * (attention + 3 * (model.hidden + model.intermediate))


def generation(model: ModelShape, how: Generation, devices: int) -> Need:
    """What a replica must have: weights, its passes, and a KV cache for one trajectory of the greatest length."""
    tokens = min(how.prefill_tokens, how.longest * how.sequences)
    widest = 2 * model.hidden + 2 * model.intermediate // how.width + (model.query + 2 * model.keys) // how.width
    parts = {
        "weights": how.dtype * model.parameters // how.width,
        "activations": how.dtype * tokens * widest,
        "logits": 2 * _WIDE * how.sequences * model.vocabulary,
        "graphs": _GRAPHS if how.graphs else 0,
        "cache": how.cache_bytes if how.cache_bytes is not None else sequence_bytes(model, how),
    }
    return Need("rollout", "actor_infer", devices, parts)


def sequence_bytes(model: ModelShape, how: Generation) -> int:
    """Bytes per device of the KV cache of one trajectory of the greatest length."""
    return how.dtype * model.cache * how.longest // how.width


def sequences_that_fit(model: ModelShape, how: Generation, memory: int) -> int:
    """Trajectories of the greatest length whose KV cache a device with so much memory holds at a time."""
    need = generation(model, how, 1)
    room = how.cache_bytes if how.cache_bytes is not None else _room(how, memory) - need.total + need.parts["cache"]
    return max(0, min(how.sequences, room // sequence_bytes(model, how)))


def _room(how: Generation, memory: int) -> int:
    return int(how.share * memory)


def activations(model: ModelShape, how: Training) -> int:
    """What the forward pass keeps for the backward pass, and the gradients of one block beside it."""
    block, entering = _block_bytes(model, how.compute), how.compute * model.hidden
    if how.trained is not None and how.compute < _WIDE:
        block += _WIDE * _linear_inputs(model)  # adapters compute in float32, each from a copy of its own
    kept = model.layers * (entering if how.checkpointing else block) + (block if how.checkpointing else 0)
    passing = how.compute * 4 * (model.intermediate + model.hidden)  # gradients of a feed-forward part
    ends = (2 * _WIDE + 3 * how.compute) * model.hidden  # the last norm, and hidden states before and after it
    return how.tokens * (kept + passing + ends)


def _block_bytes(model: ModelShape, compute: int) -> int:
    """Per token: what the operations of one block keep, as PyTorch runs a Llama-like one.

    The residual stream before each norm, what comes out of both norms before and after their weight, queries, keys,
    values, attention's result as the kernel and as the next layer wants it, and four tensors of the feed-forward part.
    A norm computes in float32, and keeps what it was given as that too where the passes do not.
    """
    hidden = 6 * model.hidden
    kept = compute * (hidden + 3 * model.query + 2 * model.keys + 4 * model.intermediate)
    return kept + (2 * _WIDE * model.hidden if compute < _WIDE else 0)


def _linear_inputs(model: ModelShape) -> int:
    """Numbers that enter the linear layers of a Llama-like block, per token: three of attention, its output, and the
    feed-forward part's two and one."""
    return 5 * model.hidden + model.query + model.intermediate


def _gathered(model: ModelShape, how: Training, *, backward: bool) -> int:
    """Whole weights of the blocks in use, and of what is outside them; gradients before they are reduced."""
    if not how.wrapped:
        return 0
    weights = how.compute * (model.rest + _BLOCKS_GATHERED * model.block)
    if not backward or how.trained is not None:
        return weights
    gradients = how.compute * (model.rest + model.block)
    return weights + gradients + _WIDE * max(model.rest, model.block)


def _logits(model: ModelShape, how: Training, *, backward: bool) -> int:
    tokens = min(how.tokens, max(1, _LOGITS_AT_ONCE // model.vocabulary))
    return tokens * model.vocabulary * (_LOGITS_COPIES * _WIDE if backward else 2 * _WIDE)
