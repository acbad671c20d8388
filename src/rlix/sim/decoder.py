"""How fast a bundle decodes, by batch and tensor parallelism.

Decoding follows the roofline: one step of a bundle streams the weights once, whatever the batch, until the batch
reaches the knee where arithmetic takes over; reading each sequence's key-value cache adds to both (Williams et al.,
"Roofline", CACM 2009; Pope et al., "Efficiently scaling transformer inference", 2022).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Decoder:
    """One bundle of `gpus` tensor-parallel GPUs decoding a batch. Times are seconds of the whole bundle."""

    gpus: int
    weights_s: float  # one step's floor: streaming the weights
    compute_s: float  # arithmetic per sequence and step; the knee is at weights_s / compute_s
    kv_s: float  # reading one sequence's cache, per step
    max_batch: int  # sequences that fit; more take turns
    prefill_s: float  # per token of context that is computed
    caches: bool = False  # a trajectory that comes back to it for its next turn finds its context there

    def token_s(self, sequences: Floats) -> Floats:
        """Seconds until each of `sequences` (per bundle, at least one) has one more token."""
        return self._step_s(np.maximum(sequences, 1.0))

    def _step_s(self, batch: Floats) -> Floats:
        held = np.minimum(batch, self.max_batch)
        step = np.maximum(self.weights_s, held * self.compute_s) + held * self.kv_s
        slowed: Floats = step * (batch / held)
        return slowed

    @property
    def knee(self) -> float:
        """The batch where arithmetic takes over from streaming the weights."""
        return min(self.weights_s / self.compute_s, float(self.max_batch))

    @property
    def reference_gpu_s(self) -> float:
        """GPU-seconds per token at the most efficient batch: what a token costs when nothing is wasted."""
        batch = np.arange(1, self.max_batch + 1, dtype=np.float64)
        return float((self._step_s(batch) / batch).min()) * self.gpus
