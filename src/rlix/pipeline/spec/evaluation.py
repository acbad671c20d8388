"""How a job is evaluated while it trains."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlix.pipeline.spec.section import Count, Index, NonNegative, Section, Share
from rlix.pipeline.spec.source import SourceSpec

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=48)]


class EvaluationSetSpec(Section):
    """Prompts or tasks that are held out, and how they are answered."""

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

    def held_out(self, trained_on: SourceSpec) -> SourceSpec:
        """Where its prompts come from; in the conversation's format that the job trains in, unless it has its own."""
        own = self.source
        if own is None:
            return trained_on
        if "chat" in own.model_fields_set or own.task is not None or own.name is not None:
            return own
        inapplicable = {"history": "refuse"} if own.data is not None else {"system": None}
        return own.model_copy(update={"chat": trained_on.chat.model_copy(update=inapplicable)})


class EvaluationSpec(EvaluationSetSpec):
    """What the policy does on held-out prompts, now and then. It changes nothing of what is learnt."""

    every: Count
    """Steps between evaluations; there is one after the last step, too."""
    baseline: bool = False
    """Evaluate before the first step, too: metrics `baseline/...` in that step's row."""
    sets: dict[SetName, EvaluationSetSpec] = Field(default_factory=dict)
    """Several by name, each with the keys above; what one leaves out is as said there. Metrics: `eval/<name>/...`."""
    best: Annotated[str, Field(pattern=r"^eval/.+")] | None = "eval/reward"
    """The metric whose best checkpoint is kept as `checkpoints/best`; null keeps none. With `sets`, unless it is given:
    the first one's reward."""
    best_is: Literal["highest", "lowest"] = "highest"

    @model_validator(mode="before")
    @classmethod
    def _common_to_sets(cls, given: Any) -> Any:
        if not (isinstance(given, dict) and isinstance(sets := given.get("sets"), dict) and sets):
            return given
        common = {key: given[key] for key in EvaluationSetSpec.model_fields if key in given}
        whole = {name: {**common, **one} if isinstance(one, dict) else one for name, one in sets.items()}
        return {"best": f"eval/{next(iter(sets))}/reward", **given, "sets": whole}

    @property
    def named(self) -> Mapping[str, EvaluationSetSpec]:
        """The sets; one alone has the name ""."""
        return self.sets or {"": self}

    @property
    def by_field(self) -> dict[str, EvaluationSetSpec]:
        """The same by where a job's file has them."""
        return {f"evaluation.sets.{name}" if name else "evaluation": one for name, one in self.named.items()}
