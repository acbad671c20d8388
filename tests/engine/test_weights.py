import pickle
import warnings
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2ForCausalLM

from rlix.engine.time_limits import SLOWEST_BYTES_S
from rlix.engine.weights.buckets import (
    ALIGNMENT,
    Bytes,
    Contents,
    Manifest,
    WeightEntry,
    fill,
    pack,
    pack_stream,
    runs_of,
)
from rlix.engine.weights.publication import (
    NodeWeights,
    PublishedWeights,
    apply,
    named_weights,
    publish,
    pulled,
    stream,
    tied_names,
    unpack,
)
from rlix.protocol.errors import WaitTimeoutError, WeightSyncError
from tests.engine.models import qwen

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def stored(data: Bytes) -> Bytes:
    """As Ray's object store: a copy of the bytes, which readers cannot write to."""
    copy = data.copy()
    copy.flags.writeable = False
    return copy


def publication(model: torch.nn.Module, version: int = 1, bucket_bytes: int = 4096) -> PublishedWeights:
    named = named_weights(model)
    names = tied_names(named)
    return publish(((n, named[n]) for n in names), version, bucket_bytes=bucket_bytes, aliases=names, put=stored)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 6), max_size=3)), max_size=8),
    st.integers(1, 600),
)
def test_unpack_gives_back_what_was_packed(shapes: list[tuple[torch.dtype, list[int]]], bucket_bytes: int) -> None:
    named = {f"t{i}": (torch.randn(shape) * 4).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    buckets, manifest = pack(named.items(), bucket_bytes)
    found = dict(unpack([stored(bucket) for bucket in buckets], manifest))
    assert [entry.name for entry in found] == list(named)
    for entry, tensor in found.items():
        assert tensor.dtype == named[entry.name].dtype
        assert entry.offset % ALIGNMENT == 0
        assert torch.equal(tensor, named[entry.name])
    largest = max((tensor.nbytes for tensor in named.values()), default=0)
    assert all(bucket.nbytes < max(bucket_bytes, largest) + ALIGNMENT for bucket in buckets)
    assert manifest.nbytes == sum(tensor.nbytes for tensor in named.values())


FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(
    st.lists(
        st.tuples(FLOATS, FLOATS, st.lists(st.integers(0, 6), max_size=3) | st.just([130, 140])), min_size=1, max_size=8
    )
)
def test_what_is_put_into_a_bucket_comes_out_converted(
    shapes: list[tuple[torch.dtype, torch.dtype, list[int]]],
) -> None:
    tensors = [torch.randn(shape).to(dtype) for dtype, _, shape in shapes]
    wire = [dtype for _, dtype, _ in shapes]
    named = ((f"t{i}", tensor.to(dtype)) for i, (tensor, dtype) in enumerate(zip(tensors, wire, strict=True)))
    (bucket,) = pack_stream(named, 2**20)
    flat = torch.zeros_like(bucket.data)
    runs = runs_of(bucket.entries)
    fill(flat, runs, [tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for tensor in tensors])
    places = [torch.full_like(tensor, -1, dtype=torch.float32) for tensor in tensors]
    names = [entry.name for entry in bucket.entries]
    Contents(flat, bucket.entries, runs).copy_to(dict(zip(names, places, strict=True)))
    for tensor, dtype, place in zip(tensors, wire, places, strict=True):
        assert torch.equal(tensor.to(dtype).float(), place)


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (
            torch.ops.aten.copy_.default,
            torch.ops.aten._foreach_copy_.default,
            torch.ops.aten.cat.out,
        )
        return func(*args, **(kwargs or {}))


def test_small_tensors_are_copied_together() -> None:
    named = [(f"t{i}", torch.full((3, 8), float(i))) for i in range(100)]
    (bucket,) = pack_stream(named, 2**20)
    with Copies() as copies:
        fill(torch.zeros_like(bucket.data), runs_of(bucket.entries), [tensor for _, tensor in named])
    assert copies.count == 1


def test_packing_holds_one_bucket_at_a_time() -> None:
    asked = []

    def tensors() -> "list[tuple[str, torch.Tensor]]":
        for i in range(10):
            asked.append(i)
            yield f"t{i}", torch.zeros(100, dtype=torch.uint8)

    stream = pack_stream(tensors(), 300)
    next(stream)
    assert len(asked) <= 4


def test_a_large_tensor_is_not_copied_on_the_way() -> None:
    tensor = torch.arange(1000.0)
    (bucket,) = pack_stream([("w", tensor)], 4000)
    assert bucket.data.data_ptr() == tensor.data_ptr()


def test_reading_does_not_copy_and_does_not_warn() -> None:
    buckets, manifest = pack([("w", torch.ones(16))], 1024)
    bucket = stored(buckets[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((_, tensor),) = unpack([bucket], manifest)
    assert tensor.data_ptr() == bucket.ctypes.data
    del bucket, buckets
    assert tensor.tolist() == [1.0] * 16  # the view keeps the bytes alive


@pytest.mark.parametrize("tied", [False, True])
def test_apply_makes_a_model_equal(tied: bool) -> None:
    source = Qwen2ForCausalLM(qwen(tie_word_embeddings=tied))
    target = Qwen2ForCausalLM(qwen(tie_word_embeddings=tied))
    identities = [p.data_ptr() for p in target.parameters()]
    published = publication(source, version=7)
    assert apply(target, published) == published.manifest.nbytes
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    assert [p.data_ptr() for p in target.parameters()] == identities
    assert [e.aliases for e in published.manifest.entries if e.aliases] == ([("lm_head.weight",)] if tied else [])


def test_apply_converts_between_floating_point_types_only() -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).bfloat16()
    apply(target, publication(source))
    assert torch.equal(target.weight, source.weight.bfloat16())
    counter = torch.nn.Module()
    counter.register_buffer("count", torch.tensor(3))
    other = torch.nn.Module()
    other.register_buffer("count", torch.tensor(3.0))
    with pytest.raises(WeightSyncError, match="dtype of count: published int64, here float32"):
        apply(other, publication(counter))


def test_every_disagreement_is_named_and_nothing_is_changed() -> None:
    source = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2, bias=False)})
    target = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 2), "c": torch.nn.Linear(2, 2, bias=False)})
    before = target.a.bias.clone()
    with pytest.raises(WeightSyncError) as caught:
        apply(target, publication(source, version=5))
    message = str(caught.value)
    assert "weight version 5" in message
    assert "unknown here: b.weight" in message
    assert "not published: c.weight" in message
    assert "shape of a.weight: published [2, 3], here [2, 4]" in message
    assert "a.bias" not in message
    assert torch.equal(target.a.bias, before)


@pytest.mark.parametrize(
    ("trainer", "replica", "message"),
    [(False, True, "tied here, separate in the trainer"), (True, False, "tied by the trainer, separate here")],
)
def test_tied_and_untied_models_do_not_mix(trainer: bool, replica: bool, message: str) -> None:
    source = Qwen2ForCausalLM(qwen(tie_word_embeddings=trainer))
    target = Qwen2ForCausalLM(qwen(tie_word_embeddings=replica))
    with pytest.raises(WeightSyncError, match=message):
        apply(target, publication(source))


def test_a_publication_is_cheap_to_send() -> None:
    published = publication(Qwen2ForCausalLM(qwen(num_hidden_layers=4)))
    references = PublishedWeights(published.version, published.manifest, tuple(range(len(published.buckets))))
    assert len(pickle.dumps(references)) < 10_000
    once, again = (pickle.loads(pickle.dumps(references.manifest)) for _ in range(2))
    assert once is again  # with all that was made of it
    assert once.entries == published.manifest.entries


def test_other_processes_of_a_node_map_what_one_has_fetched() -> None:
    trainer, replica = (Qwen2ForCausalLM(qwen()) for _ in range(2))
    published = publication(trainer, version=3)
    with closing(NodeWeights(published)) as here:
        message = pickle.dumps(here.published)
        assert len(message) < len(pickle.dumps(published)) / 10
        apply(replica, pickle.loads(message))
    assert here.published.id == published.id
    assert all(torch.equal(a, b) for a, b in zip(trainer.parameters(), replica.parameters(), strict=True))


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        pack([("w", torch.ones(1))], 0)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_through_rays_object_store() -> None:
    source, target = Qwen2ForCausalLM(qwen()), Qwen2ForCausalLM(qwen())
    named = named_weights(source)
    published = publish(named.items(), 3, bucket_bytes=2**16)
    assert len(published.buckets) > 1
    apply(target, pickle.loads(pickle.dumps(published)))
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    streamed = {entry.name: tensor for entry, tensor in stream(published)}
    assert all(torch.equal(streamed[name], tensor) for name, tensor in named.items())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_bucket_that_does_not_come_is_a_bounded_wait() -> None:
    import ray

    @ray.remote(num_cpus=0, resources={"never": 1})
    def never() -> Bytes:
        return np.zeros(8, dtype=np.uint8)

    published = publication(torch.nn.Linear(1, 1))
    pending = never.remote()
    late = PublishedWeights(9, published.manifest, (pending,))
    with pytest.raises(WeightSyncError, match="nothing was changed: bucket 0 of 1 of weight version 9 did not arrive"):
        apply(torch.nn.Linear(1, 1), late, timeout_s=0.05)
    ray.cancel(pending)


def test_a_larger_bucket_may_take_longer() -> None:
    limits: list[float] = []

    def fetch(_: object, timeout_s: float) -> Bytes:
        limits.append(timeout_s)
        return np.zeros(0, dtype=np.uint8)

    experts = WeightEntry("experts", "bfloat16", (128, 3072, 4096), 1, 0)  # 3.2 GB
    pulled(PublishedWeights(1, Manifest((WeightEntry("norm", "bool", (0,), 0, 0), experts)), ("a", "b")), fetch=fetch)
    assert limits == pytest.approx([60.0, 60.0 + experts.nbytes / SLOWEST_BYTES_S])


def test_published_memory_can_still_be_freed() -> None:
    """A large tensor travels straight from its own memory, which an engine frees when it leaves its device."""
    model = Qwen2ForCausalLM(qwen())
    pieces = publish(named_weights(model).items(), 1, bucket_bytes=64, put=lambda bucket: bucket.nbytes).buckets
    assert len(pieces) > 10
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


def test_a_pull_of_which_nothing_arrives_changes_nothing_and_says_so() -> None:
    source, target = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    whole = publish(named_weights(source).items(), 3, bucket_bytes=2**10, put=lambda data: data)
    before = target.weight.detach().clone()
    assert len(whole.buckets) == 2

    def fetch(lost: int) -> Any:
        def one(bucket: Bytes, _: float) -> Bytes:
            if bucket is whole.buckets[lost]:
                raise WaitTimeoutError("it did not come")
            return bucket

        return one

    with pytest.raises(WeightSyncError, match="nothing was changed: it did not come"):
        apply(target, whole, fetch=fetch(0))
    assert torch.equal(target.weight, before)
    with pytest.raises(WaitTimeoutError):  # half of it is there
        apply(target, whole, fetch=fetch(1))
