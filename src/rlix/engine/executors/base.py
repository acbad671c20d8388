"""What a replica needs of a generation backend. A new backend implements `Executor`; nothing above it changes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

from rlix.engine.inference.requests import GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.weights.channel import Ticket
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.publication import PublishedWeights
from rlix.protocol.messages import Fence


class Part(StrEnum):
    """What of an inference engine occupies a device; the parts can be brought back one after the other."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_PARTS = (Part.WEIGHTS, Part.KV_CACHE)


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How a replica is laid out.

    Attributes:
        max_model_len: most tokens of one trajectory, prompt included; None: what the model's configuration says.
        max_num_seqs: trajectories decoded at a time; more wait inside the executor.
        gpu_memory_utilization: share of a GPU's memory this replica may use in all (a virtual GPU has no such share).
        kv_cache_bytes: upper bound of the KV cache; None: 1 GiB on a virtual GPU, else from the share above.
        dtype: "float32", "bfloat16", ...; "auto": float32 on a virtual GPU, else what the configuration says.
        exact: of the transformers executor: what is drawn does not depend, to the bit, on what it is batched with,
            for less speed. None: True on a virtual GPU, so that sharing is invisible to learning; False on a GPU.
        tile_tokens: most tokens per forward of an exact executor; None lets it choose. Results are equal to the bit
            only between replicas of the same value.
    """

    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    dtype: str = "auto"
    exact: bool | None = None
    tile_tokens: int | None = None


class Executor(ABC):
    """One full set of weights on the devices of one bundle, generating for any number of concurrent calls.

    `load`, `update` and `offload` block and are never called concurrently with each other; `submit` and `abort` may be
    called from any thread at any time.
    """

    @abstractmethod
    def load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int:
        """Bring `parts` onto the devices; returns the bytes moved. `published` replaces the source's own weights.

        Raises:
            NotResidentError: there are no bytes to bring: nothing was published and the source has no weights.
            WeightSyncError: published weights do not fit the model.
        """

    @abstractmethod
    def update(self, published: PublishedWeights) -> int:
        """Replace the resident weights in place, between two decoding steps; returns the bytes copied.

        `published` may say that a trainer is sending them now (`PublishedWeights.delivery`); then each worker of the
        executor takes part, through the channel that it has joined.

        Raises:
            NotResidentError: the weights are not on the devices. WeightSyncError: they do not fit, or were not sent.
            WaitTimeoutError, TransferError: they did not all arrive; the resident ones are undefined.
        """

    @abstractmethod
    def weight_layouts(self, offered: PublishedWeights) -> list[Layout]:
        """What each worker, as many as `InferenceEngine.receivers` says, needs of the tensors offered.

        Raises:
            NotResidentError: there is nothing yet that they could go into. WeightSyncError: they do not fit.
        """

    @abstractmethod
    def join_channel(self, tickets: Sequence[Ticket]) -> None:
        """Have each worker open its end of a channel (see `rlix.engine.weights.channel`).

        Raises:
            WaitTimeoutError: a member did not come; names whom.
        """

    @abstractmethod
    def leave_channel(self, channel: str) -> None:
        """Close what is open of it; nothing happens where nothing is."""

    @abstractmethod
    def submit(
        self, requests: Sequence[GenerationRequest], on_chunk: Callable[[GenerationChunk], None] | None = None
    ) -> "Future[list[GenerationResult]]":
        """Generate; the future completes, in the order of `requests`, when all are finished or aborted.

        `on_chunk` is called, on a thread of the executor, after each step with what it added to each request; the last
        chunks come before the future completes.
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
        """End threads and child processes."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the resident weights; -1 for the source's own."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes on the devices now: weights and KV cache."""


SOURCE_VERSION = -1
"""The version of weights that came with the model's folder and were never published."""
