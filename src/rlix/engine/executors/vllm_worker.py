"""What RLix adds to vLLM's workers; vLLM mixes the class into its own, in each tensor-parallel worker process."""

from typing import Any

from rlix.engine import weights
from rlix.engine.weights import PublishedWeights


class ReplicaWorker:
    """A worker extension (`worker_extension_cls`)."""

    model_runner: Any

    def rlix_reload(self, published: PublishedWeights) -> None:
        """Replace the weights in place, with vLLM's post-processing of a load. Buckets must be arrays by now."""
        named = ((entry.name, tensor) for entry, tensor in weights.stream(published))
        self.model_runner.reload_weights(weights_iterator=named)

    def rlix_reload_folder(self, path: str) -> None:
        self.model_runner.reload_weights(weights_path=path)

    def rlix_bytes(self) -> tuple[int, int]:
        """Bytes of weights and of KV cache in this worker."""
        held = sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())
        return held, sum(_nbytes(cache) for cache in self.model_runner.kv_caches)


def _nbytes(cache: Any) -> int:
    return sum(map(_nbytes, cache)) if isinstance(cache, list | tuple) else int(cache.nbytes)
