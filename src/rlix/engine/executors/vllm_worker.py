"""What RLix adds to vLLM's workers; vLLM mixes the class into its own, in each tensor-parallel worker process."""

from typing import Any

import torch

from rlix.engine import weights
from rlix.engine.weights import PublishedWeights


class ReplicaWorker:
    """A worker extension (`worker_extension_cls`)."""

    model_runner: Any
    rank: int
    device: torch.device

    def rlix_reload(self, published: PublishedWeights) -> None:
        """Replace the weights in place, with vLLM's post-processing of a load. Buckets must be arrays by now.

        What the trainer sends directly each tensor-parallel worker receives whole, and keeps its part of.
        """
        arriving = weights.stream(published.received_by(worker=self.rank), device=self.device)
        named = ((entry.name, tensor) for entry, tensor in arriving)
        self.model_runner.reload_weights(weights_iterator=named)

    def rlix_reload_folder(self, path: str) -> None:
        self.model_runner.reload_weights(weights_path=path)

    def rlix_bytes(self) -> tuple[int, int]:
        """Bytes of weights and of KV cache in this worker."""
        held = sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())
        return held, sum(_nbytes(cache) for cache in self.model_runner.kv_caches)


def _nbytes(cache: Any) -> int:
    return sum(map(_nbytes, cache)) if isinstance(cache, list | tuple) else int(cache.nbytes)
