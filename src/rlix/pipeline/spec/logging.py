"""Where a job's metrics go besides its run folder."""

from typing import Annotated, Literal

from pydantic import Field

from rlix.pipeline.spec.section import Count, Index, Section, one_or_many


class WandbSpec(Section):
    """Weights & Biases; needs the package wandb, and takes key and host from where wandb does."""

    project: Annotated[str, Field(min_length=1)]
    entity: str | None = None
    group: str | None = None
    tags: Annotated[tuple[str, ...], one_or_many(str), Field(strict=False)] = ()
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run folder; `wandb sync` sends it later."""


class MlflowSpec(Section):
    """MLflow; needs the package mlflow or mlflow-skinny."""

    experiment: Annotated[str, Field(min_length=1)]
    """It is created where there is none of that name."""
    tracking_uri: str | None = None
    """Left out: as MLflow finds it (`MLFLOW_TRACKING_URI`)."""
    tags: dict[str, str] = Field(default_factory=dict)


class LoggingSpec(Section):
    """Where metrics go besides `metrics.jsonl` and TensorBoard's event files, which are always written. Whatever fails
    there is said once in the log and costs the job nothing."""

    samples: Index = 4
    """How many samples of a step are written as text to `samples.jsonl` and the report; 0 for none."""
    samples_every: Count = 10
    """Steps between those; of an evaluation there are some every time."""
    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None
