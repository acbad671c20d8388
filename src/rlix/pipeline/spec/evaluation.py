"""How a job is evaluated while it trains."""

from typing import Annotated, Literal

from pydantic import Field

from rlix.pipeline.spec.section import Count, Index, NonNegative, Section, Share
from rlix.pipeline.spec.source import SourceSpec


class EvaluationSpec(Section):
    """What the policy does on held-out prompts, now and then. It changes nothing of what is learnt."""

    every: Count
    """Steps between evaluations; there is one after the last step, too."""
    source: SourceSpec | None = None
    """Where its prompts come from, written as the job's own source, whose `chat` holds for it, too, unless it has one;
    left out: that one with other prompts or episodes, which data do not have."""
    prompts: Count = 64
    """How many, the same every time: of data the first of an order that the job's seed decides, and of one table no
    more than it has."""
    samples_per_prompt: Count = 1
    temperature: NonNegative = 0.0
    """0 is greedy."""
    top_p: Share = 1.0
    top_k: Index = 0
    max_new_tokens: Count | None = None
    """Longest answer in tokens; left out: as in `rollout`."""
    best: Annotated[str, Field(pattern=r"^eval/.+")] | None = "eval/reward"
    """The metric whose best checkpoint is kept as `checkpoints/best`; null keeps none."""
    best_is: Literal["highest", "lowest"] = "highest"

    def held_out(self, trained_on: SourceSpec) -> SourceSpec:
        """Where its prompts come from; in the conversation's format that the job trains in, unless it has its own."""
        own = self.source
        if own is None:
            return trained_on
        if "chat" in own.model_fields_set or own.task is not None or own.name is not None:
            return own
        inapplicable = {"history": "refuse"} if own.data is not None else {"system": None}
        return own.model_copy(update={"chat": trained_on.chat.model_copy(update=inapplicable)})
