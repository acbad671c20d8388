"""What a trainer's weights answer, by which a replica finds out whether it has laid them out right.

Names, shapes and dtypes that agree say nothing of what a backend makes of the bytes: fused, cut, packed for a kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlix.protocol.errors import RlixError

TOKENS = 12
_ROUNDING = {"float32": 0.02, "float16": 0.2, "bfloat16": 0.4}
"""How far the log-probabilities of one model may be apart on average, in nats, by the coarser of two dtypes."""
_QUANTIZED = 1.0  # or anything else that is coarser than bfloat16


def tokens(vocabulary: int) -> tuple[int, ...]:
    """Some, from all over a vocabulary of this size."""
    return tuple((7 + 7919 * number) % vocabulary for number in range(TOKENS))


def fineness(dtype: str) -> float:
    """Greater for one that rounds less."""
    return -_ROUNDING.get(dtype, _QUANTIZED)


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Log-probabilities of all tokens but the first, in nats, as the trainer computed them in `dtype`.

    `trainer` names the processes that laid the weights out: after others took their place it is another.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str
    trainer: str

    def check(self, found: Sequence[float], dtype: str, version: int) -> None:
        """Raise RlixError unless an engine that computes in `dtype` gives these tokens the same."""
        apart = sum(abs(a - b) for a, b in zip(self.logprobs, found, strict=True)) / len(self.logprobs)
        most = max(_ROUNDING.get(each, _QUANTIZED) for each in (self.dtype, dtype))
        if not apart <= most:  # nan is no answer either
            raise RlixError(
                f"with weight version {version} this engine gives known tokens log-probabilities that are {apart:.3g} "
                f"from the trainer's on average, where rounding in {dtype} explains {most:g}: it does not compute the "
                'model that was trained, and answers nothing; use another executor ("transformers") or other options '
                "for this model"
            )
