"""What Tinker's client sends and reads as protobuf: passes, and answers to passes and samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from rlix.protocol.errors import SpecError

_PACKAGE = "tinker_public"
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int64), 3: np.dtype(np.int32)}
_FLOAT32 = 1
_NOTHING = -99999.0
_MOST_CELLS = 2**26  # of a sparse tensor, which is computed with as a dense one
_MESSAGES: dict[str, str] = {
    "SparseCsr": "values:bytes=1 crow_indices:bytes=2 col_indices:bytes=3",
    "Tensor": "dense:bytes=1|encoding sparse_csr:SparseCsr=2|encoding dtype:int32=3 shape:int64*=4",
    "BatchedTensor": "data:bytes=1 offsets:bytes=2 dtype:int32=3 trailing_shape:int64*=4",
    "ArrayRecord": "type_tag:string=1 fields:BatchedTensor%=2 num_datums:int64=3",
    "ForwardBackwardOutput": "loss_fn_output_type:string=1 loss_fn_outputs:ArrayRecord*=2 metrics:double%=3",
    "LossConfigValue": "number:double=1|value text:string=2|value",
    "EncodedTextChunk": "tokens:bytes=1",
    "OtherChunk": "data:bytes=1",
    "Chunk": "encoded_text:EncodedTextChunk=1|chunk image:OtherChunk=2|chunk dmel:OtherChunk=3|chunk",
    "Datum": "model_input:Chunk*=1 loss_fn_inputs:Tensor%=2",
    "ForwardBackwardRequest": (
        "model_id:string=1 seq_id:int32=2 data:Datum*=3 loss_fn:string=4 loss_fn_config:double%=5 "
        "forward_only:bool=6 loss_fn_config_v2:LossConfigValue%=7"
    ),
    "TopkLogprobs": "token_ids:bytes=1 logprobs:bytes=2 k:uint32=3 length:uint32=4",
    "SampledSequence": "stop_reason:int32=1 tokens:bytes=2 logprobs:bytes?=3 topk_sampled_logprobs:TopkLogprobs?=4",
    "PromptAltTokens": "tokens:Tensor=1 logprobs:Tensor=2",
    "SampleResponse": (
        "sequences:SampledSequence*=1 prompt_logprobs:bytes?=2 topk_prompt_logprobs:TopkLogprobs?=3 "
        "prompt_cache_hit_tokens:int32=4 target_prompt_logprobs:Tensor?=5 prompt_alt_tokens:PromptAltTokens?=6"
    ),
}
"""Fields by message: name:type=number, with `*` for many, `%` for a map from strings, `?` for one that may be absent,
and `|oneof` for one of several. Enumerations are numbers; what the client sends besides is skipped."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence [length], and arrays of the loss by name: [length], or [length, targets]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over `data`, and a backward pass unless `forward_only`."""

    model: str
    seq: int
    data: tuple[Datum, ...]
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class Top:
    """The most likely tokens at each position and their log-probabilities: [positions, k] each.

    Positions of which nothing is known hold NaN.
    """

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    stopped: bool
    top: Top | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is told of a prompt, where it was asked for. Log-probabilities [length], NaN where there is none."""

    log_probs: np.ndarray | None = None
    top: Top | None = None
    targets: np.ndarray | None = None


def _field(message: Any, text: str) -> None:
    name, _, rest = text.partition(":")
    rest, _, oneof = rest.partition("|")
    kind, _, number = rest.partition("=")
    bare = kind.rstrip("*%?")
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if kind[-1] in "*%" else field.LABEL_OPTIONAL
    if kind.endswith("%"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _field(entry, "key:string=1")
        _field(entry, f"value:{bare}=2")
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if bare in _MESSAGES:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{bare}"
    else:
        field.type = getattr(field, f"TYPE_{bare.upper()}")
    if kind.endswith("?"):
        field.proto3_optional, oneof = True, f"_{name}"
    if oneof:
        names = [each.name for each in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="rlix_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in sorted(fields.split(), key=lambda text: text.endswith("?") or "?=" in text):
            _field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


MESSAGES = _classes()


def read_pass(body: bytes) -> Pass:
    """Raises SpecError: it is no such request, or of a kind of input that is not served."""
    request = MESSAGES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise SpecError(f"the body is no ForwardBackwardRequest: {error}") from error
    options: dict[str, float | str] = dict(request.loss_fn_config)
    options |= {
        key: v.text if v.WhichOneof("value") == "text" else v.number for key, v in request.loss_fn_config_v2.items()
    }
    data = tuple(_datum(datum, index) for index, datum in enumerate(request.data))
    return Pass(request.model_id, request.seq_id, data, request.loss_fn, options, request.forward_only)


def _datum(datum: Any, index: int) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise SpecError(f"data[{index}]: only text is served, not {chunk.WhichOneof('chunk') or 'an empty chunk'}")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    try:
        inputs = {name: _array(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    except (ValueError, IndexError) as error:
        raise SpecError(f"data[{index}].loss_fn_inputs: {error}") from error
    return Datum(tokens, inputs)


def _array(tensor: Any) -> np.ndarray:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"there is no dtype {tensor.dtype}")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        found = np.frombuffer(tensor.dense, dtype)
        return found.reshape(shape) if shape else found
    values = np.frombuffer(tensor.sparse_csr.values, dtype)
    ends = np.frombuffer(tensor.sparse_csr.crow_indices, np.int64)
    columns = np.frombuffer(tensor.sparse_csr.col_indices, np.int64)
    if math.prod(shape) > _MOST_CELLS:
        raise ValueError(f"a sparse tensor of shape {list(shape)} has more than {_MOST_CELLS:,} cells")
    whole = np.zeros(shape, dtype)
    whole[np.repeat(np.arange(len(ends) - 1), np.diff(ends)), columns] = values
    return whole


def pass_bytes(given: Pass) -> bytes:
    """The request that `read_pass` reads."""
    request = MESSAGES["ForwardBackwardRequest"](
        model_id=given.model, seq_id=given.seq, loss_fn=given.loss, forward_only=given.forward_only
    )
    for key, value in given.options.items():
        setattr(request.loss_fn_config_v2[key], "text" if isinstance(value, str) else "number", value)
    for each in given.data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = each.tokens.astype(np.int32).tobytes()
        for name, array in each.inputs.items():
            kind = 2 if array.dtype.kind in "iu" else _FLOAT32
            datum.loss_fn_inputs[name].CopyFrom(_tensor(array, kind))
    return bytes(request.SerializeToString())


def pass_answer(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Of each datum the log-probabilities of its targets, in order: [length], or [length, targets]."""
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    for each in log_probs:  # a record for each, for they may differ in how many targets a position has
        record = answer.loss_fn_outputs.add(num_datums=1)
        data = each.astype(np.float32).tobytes()
        batched = record.fields["logprobs"]
        batched.data, batched.dtype = data, _FLOAT32
        batched.offsets = np.asarray([0, len(data)], np.int64).tobytes()
        batched.trailing_shape.extend(each.shape[1:])
    return bytes(answer.SerializeToString())


def sample_answer(sequences: Sequence[Answer], prompt: Prompt) -> bytes:
    answer = MESSAGES["SampleResponse"]()
    for each in sequences:
        sequence = answer.sequences.add(stop_reason=0 if each.stopped else 1)
        sequence.tokens = np.asarray(each.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(each.log_probs, np.float32).tobytes()
        if each.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(each.top))
    if prompt.log_probs is not None:
        answer.prompt_logprobs = prompt.log_probs.astype(np.float32).tobytes()
    if prompt.top is not None:
        answer.topk_prompt_logprobs.CopyFrom(_top(prompt.top))
    if prompt.targets is not None:
        answer.target_prompt_logprobs.CopyFrom(_tensor(prompt.targets.astype(np.float32), _FLOAT32))
    return bytes(answer.SerializeToString())


def _top(top: Top) -> Any:
    length, k = top.ids.shape
    known = ~np.isnan(top.log_probs)
    return MESSAGES["TopkLogprobs"](
        token_ids=np.where(known, top.ids, 0).astype(np.int32).tobytes(),
        logprobs=np.where(known, top.log_probs, _NOTHING).astype(np.float32).tobytes(),
        k=k,
        length=length,
    )


def _tensor(array: np.ndarray, kind: int) -> Any:
    data = array.astype(_DTYPES[kind]).tobytes()
    return MESSAGES["Tensor"](dense=data, dtype=kind, shape=array.shape)
