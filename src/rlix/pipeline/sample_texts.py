"""A few of a step's samples as text, for people who want to see what the policy says."""

from typing import TYPE_CHECKING, Any

from rlix.node.run_folder import RunFolder
from rlix.pipeline.samples import Sample, Samples
from rlix.pipeline.spec.logging import LoggingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SampleTexts:
    """Writes them to `samples.jsonl` of the run folder, as often as the spec says."""

    def __init__(self, spec: LoggingSpec, folder: RunFolder, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._spec, self._folder, self._tokenizer = spec, folder, tokenizer

    def note(self, step: int, samples: Samples, *, evaluation: bool = False) -> None:
        """Of training every so many steps, the first one included; of every evaluation."""
        if self._spec.samples and (evaluation or step % self._spec.samples_every == 0):
            chosen = spread(len(samples), self._spec.samples)
            self._folder.samples([self._row(step, samples.samples[i], evaluation) for i in chosen])

    def _row(self, step: int, sample: Sample, evaluation: bool) -> dict[str, Any]:
        read = sample.turns[0].observation_ids if sample.turns else ()
        row = {
            "step": step,
            "id": sample.id,
            "evaluation": evaluation,
            "prompt": self._tokenizer.decode(list(read)),
            "completion": self._tokenizer.decode(list(sample.token_ids[len(read) :])),
            "turns": len(sample.turns),
            "tokens": sample.generated,
            "reward": sample.reward,
            "exact": sample.exact,
            "end": str(sample.end),
        }
        return row if sample.error is None else row | {"error": sample.error}


def spread(length: int, count: int) -> list[int]:
    """At most `count` numbers below `length`, as far apart as they can be: of different groups if possible."""
    chosen = min(count, length)
    return [i * length // chosen for i in range(chosen)]
