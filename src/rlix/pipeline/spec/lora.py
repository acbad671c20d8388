"""What a job says of LoRA: the adapter that it trains, or several of them as runs on one model."""

from collections.abc import Collection, Iterator
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.spec.evaluation import EvaluationSpec
from rlix.pipeline.spec.schedule import ScheduleSpec
from rlix.pipeline.spec.section import Beta, Count, Positive, Section, Seed, one_or_many
from rlix.pipeline.spec.source import SourceSpec
from rlix.protocol.spec_file import Problem, nearest

MULTI_LORA = "multi_lora"
ALL_LINEAR = ("all-linear",)
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=48)]


class LoraSpec(Section):
    """Train a LoRA adapter and leave the model as it is. A warm-up trains the model itself, before there is an
    adapter. What an algorithm compares with is the model without its adapter, on the devices of `actor_train`."""

    rank: Count = 16
    alpha: Positive | None = None
    """The adapter's part is scaled by alpha / rank; left out: twice the rank."""
    dropout: Beta = 0.0
    """Of what goes into the adapter, in training steps."""
    targets: Annotated[tuple[str, ...], one_or_many(str), Field(strict=False, min_length=1)] = ALL_LINEAR
    """Last names of the linear layers that get one, such as `[q_proj, v_proj]`; `all-linear`: all but the head."""
    path: str | None = None
    """Folder of a PEFT adapter to go on from; its rank, alpha, dropout and targets are taken. What an algorithm
    compares with is without it: to stay near to it, e.g. with dpo, merge it into the model first (`rlix lora merge`).
    """


def unknown_targets(lora: LoraSpec | None, linear: Collection[str]) -> Iterator[Problem]:
    """Layers that an adapter is to go on and a model with these linear layers does not have."""
    if lora is None or lora.targets == ALL_LINEAR:
        return
    for target in lora.targets:
        if target not in linear:
            yield Problem(
                "lora.targets",
                f"the model has no linear layer {target!r}{nearest(target, linear)} (it has "
                f"{', '.join(sorted(linear))}; all-linear, alone, is all of them)",
            )


class RunSpec(Section):
    """One adapter of a `multi_lora` job. `source`, `schedule`, `algorithm` and `evaluation` replace the job's, of the
    other sections only the keys that are given; a `lora` with a `path` replaces the job's as well."""

    steps: Count | None = None
    seed: Seed | None = None
    source: SourceSpec | None = None
    schedule: ScheduleSpec | None = None
    algorithm: AlgorithmSpec | None = None
    evaluation: EvaluationSpec | None = None
    lora: dict[str, Any] = Field(default_factory=dict)
    rollout: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    checkpoint: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _as_the_job(cls, given: Any) -> Any:
        """`runs: {plain: }` says nothing of its own."""
        return {} if given is None else given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "null"}, super().__get_pydantic_json_schema__(core_schema, handler)]}
