"""The section of a job spec that leaves to a plan where the job's parts run."""

from typing import Literal

from rlix.pipeline.spec.section import Count, NonNegative, Positive, Section


class PlanSpec(Section):
    """Widths and devices of the clusters come from a plan, made when the job starts (docs/planned-jobs.md). A mode
    alone may stand for the section: `plan: auto`. A job that runs has its clusters in place of this section."""

    bare = "mode"

    mode: Literal["auto", "collocated", "disaggregated", "hybrid"] = "auto"
    """The fastest plan, or the fastest of a mode."""
    gpus: Count | None = None
    """For how many of the pool's devices; left out: all."""
    prompt_tokens: Positive | None = None
    """Tokens of a prompt, in the mean; only to plan from `declared_speed`, without a profile. Left out:
    `source.data.max_prompt_tokens`."""
    answer_tokens: Positive | None = None
    """Likewise: tokens of an answer, or all that a trajectory generates, in the median. Left out:
    `rollout.max_new_tokens`."""
    answer_spread: NonNegative = 0.0
    """Likewise: sigma of their lognormal distribution, which is cut at `rollout.max_new_tokens`; 0: all are as long."""
    switch: Literal["exact", "any", "never"] = "exact"
    """What the job may go over to by itself when its steps have for a while taken another time than planned and another
    plan would by far repay starting it again. exact: plans by which it learns the same to the bit; those are the ones
    that leave training clusters as wide as they are, of a job with `schedule: on_policy`, `executor: transformers` and
    no source of its own, and none of any other. any: any plan. never: none. What it may not, the log only names."""
