"""The contract of a generation backend: what `InferenceExecutor` says is all that anything above it relies on.

A new backend is a class, made known by its "module:Class" or by `registry.register`; no file of RLix changes. Most
derive from `LoopExecutor`, which keeps the life cycle and turns concurrent calls into one batch. Whatever it derives
from, it passes `tests/engine/conformance`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlix.engine.declared import AS_IT_IS, DeclaredSpeed
from rlix.engine.inference.requests import DecodingCounters, GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.life_cycle import Life, Part
from rlix.engine.model_source import ModelSource
from rlix.engine.weights.publication import PublishedWeights
from rlix.protocol.messages import Device, DeviceKind, Fence

ALL_PARTS = (Part.WEIGHTS, Part.KV_CACHE)

DEFAULT_SHARE = 0.9
"""Of the GPU memory that is free when a replica is built: what it may use unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How a replica is laid out.

    Attributes:
        max_model_len: most tokens of one trajectory, prompt included; None: what the model's configuration says.
        max_num_seqs: trajectories decoded at a time; more wait inside the executor.
        gpu_memory_utilization: share of a GPU's memory this replica may use in all (a virtual GPU has no such share);
            None: nine tenths of what is free when it is built.
        kv_cache_bytes: upper bound of the KV cache; None: 1 GiB on a virtual GPU, else from the share above.
        dtype: "float32", "bfloat16", ...; "auto": float32 on a virtual GPU, else what the configuration says.
        exact: of the transformers executor: what is drawn does not depend, to the bit, on what it is batched with,
            for less speed. None: True on a virtual GPU, so that sharing is invisible to learning; False on a GPU.
        adapters: most LoRA adapters that are served at a time, and `adapter_rank` their greatest rank; vLLM makes
            room for so many when it starts. The transformers executor needs neither.
        declared: on a virtual GPU, how long decoding and moves last at least.
        more: options of the backend's own, by the names it gives them; for vLLM those of its `EngineArgs`.
    """

    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    dtype: str = "auto"
    exact: bool | None = None
    adapters: int = 0
    adapter_rank: int = 0
    declared: DeclaredSpeed = AS_IT_IS
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_model_len", "max_num_seqs", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: a share above 0, at most 1")


@dataclass(frozen=True, slots=True)
class Site:
    """Where an executor runs: its bundle's devices, which alone are visible to its process, by their keys.

    `scratch` is a folder for temporary files that goes with the replica's group, even if the replica is killed.
    `further` are the bundle's devices on other nodes, node by node; for workers there are a name and a `namespace`.
    """

    kind: DeviceKind
    keys: tuple[str, ...] = ()
    scratch: str | None = None
    further: tuple[tuple[Device, ...], ...] = ()
    name: str = "replica"
    namespace: str | None = None


class InferenceExecutor(ABC):
    """One full set of weights on the devices of one bundle, generating for any number of concurrent calls.

    `load`, `update` and `offload` block and are never called concurrently with each other; `submit` and `abort` may be
    called from any thread at any time. Each of the three ends in a `life` that says what is so: as it was when it
    refused, and `Phase.FAILED` when it broke off; from there `load` and `offload` work. Weights are current when every
    byte of them is in place: nothing is ever drawn from weights that are partly new.
    """

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        """Cheap: no weights, no device. Raises ValueError for a model or options that the backend does not know."""
        self._source, self._options, self._site = source, options, site
        self._life, self._life_lock = Life(), threading.Lock()

    @property
    def life(self) -> Life:
        return self._life

    def change(self, step: Callable[[Life], Life]) -> Life:
        """Go on to the next state, whichever thread asks; the executor moves bytes, its replica leases."""
        with self._life_lock:
            self._life = step(self._life)
            return self._life

    @abstractmethod
    def load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int:
        """Bring `parts` onto the devices; returns the bytes moved. `published` replaces the source's own weights.

        What is there already stays; weights are replaced when they are another publication's.

        Raises:
            NotResidentError: there are no bytes to bring: nothing was published and the source has no weights; or the
                KV cache was asked for before the weights.
            WeightSyncError: published weights do not fit the model; what was there before still is.
        """

    @abstractmethod
    def update(self, published: PublishedWeights) -> int:
        """Replace the resident weights in place, between two decoding steps; returns the bytes copied.

        Requests in flight go on with the new weights.

        Raises:
            NotResidentError: the weights are not on the devices.
            WeightSyncError: they do not fit; nothing was changed, and generation goes on.
            Anything else: they did not all arrive. The executor has failed, and what was in flight with it.
        """

    @abstractmethod
    def check_update(self, published: PublishedWeights) -> None:
        """Raise the NotResidentError or WeightSyncError with which `update` would refuse; no byte is read."""

    @abstractmethod
    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_chunk: Callable[[GenerationChunk], object] | None = None,
        every_s: float = 0.0,
    ) -> "Future[list[GenerationResult]]":
        """Generate; the future completes, in the order of `requests`, when all are finished or aborted.

        It fails with NotResidentError while `life` is not serving, and with a ValueError that names the request for
        one that can never be answered; such a call generates nothing. Cancelling it ends its requests.

        `on_chunk` is called, on a thread of the executor, with what was added to each request: after each step, or at
        the first one of each `every_s` seconds. A request's last chunk comes when it ends.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all) with the tokens they have. Unknown ids are ignored."""

    @abstractmethod
    def offload(self, *, keep_host: bool) -> int:
        """Release the devices' memory; nothing may be generating. `keep_host` keeps the weights in host memory.

        Returns the bytes released.
        """

    def share_locks(self, keys: Sequence[str], fence: Fence | None) -> None:
        """Have the executor's own processes, those to come too, lock these devices; None: let them go.

        The caller holds the locks meanwhile. What remains of the executor counts then even if the caller dies.
        """

    @abstractmethod
    def close(self) -> None:
        """End threads and child processes. What is in flight, and what comes later, fails with NotResidentError."""

    @property
    @abstractmethod
    def counters(self) -> DecodingCounters:
        """What has been decoded so far. May be read from any thread."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes on the devices now: weights and KV cache."""
