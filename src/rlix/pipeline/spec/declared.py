"""The section of a job spec that says how fast the GPUs are that virtual ones stand for."""

from rlix.engine.declared import DeclaredSpeed
from rlix.pipeline.spec.section import NonNegative, Positive, Section


class DeclaredSpeedSpec(Section):
    """On virtual GPUs: work lasts as long as it would on the GPUs that are declared here, by waiting until then, so
    that a rehearsal on a laptop takes turns as a cluster would. Names and model are those of the simulator."""

    token_ms: NonNegative
    """One decoding step of a replica while its batch is below the knee."""
    knee: Positive = 96.0
    """Sequences from where on arithmetic, not memory, bounds a step."""
    kv_us: NonNegative = 40.0
    """Added to a step by each sequence, for reading its cache."""
    prefill_us: NonNegative = 25.0
    """For each token of a prompt, or of what a trajectory that moved had generated."""
    trained_token_ms: NonNegative
    """GPU-milliseconds for each token of a training step."""
    scored_token_ms: NonNegative = 0.0
    """GPU-milliseconds for each token of log-probs and values."""
    expand_s: NonNegative = 6.0
    """A replica loads the current weights."""
    sync_s: NonNegative = 1.0
    """New weights into a replica that stayed."""
    shrink_s: NonNegative = 2.0
    """A replica releases its device's memory."""
    move_s: NonNegative = 5.0
    """The state of a training engine comes to its GPUs, or leaves them."""
    relocate_s: NonNegative = 5.0
    """Besides, if it comes to others than it was on (`moves` of a cluster)."""

    @property
    def speed(self) -> DeclaredSpeed:
        return DeclaredSpeed(**self.model_dump())
