"""The runs of a multi_lora job, each as the job that it would be alone."""

import json
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from rlix.pipeline.spec.algorithm import ALGORITHMS, Needs
from rlix.pipeline.spec.lora import RunSpec, unknown_targets
from rlix.pipeline.spec.old_keys import moved
from rlix.pipeline.spec.sections import Sections
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Problem, problems_of

Job = TypeVar("Job", bound=Sections)
_OF_REPLICAS = {"executor", "executor_options", "max_num_seqs"}


def run_data(job: Sections, run: RunSpec) -> dict[str, Any]:
    """What a run says, and the job where it says nothing; as a job's file has it."""
    data = job.model_dump(mode="json", exclude={"runs", "pipeline", "warmup"}, exclude_unset=True)
    for key, value in run.model_dump(mode="json", exclude_unset=True).items():
        outside = key == "lora" and "path" in value  # whose adapter says itself what the job says of all others
        merged = key in ("lora", "rollout", "optimizer", "checkpoint") and not outside
        data[key] = {**(data.get(key) or {}), **value} if merged else value
    data.setdefault("lora", {})
    return data


def run_of(job: Job, name: str, run: RunSpec) -> Job:
    """A run of a multi_lora job as the job that it would be alone, but for the model's warm-up.

    Raises:
        pydantic.ValidationError: it does not fit together; with the fields of a job.
    """
    return type(job).model_validate_json(json.dumps({**run_data(job, run), "name": name}))


def with_run(job: Job, name: str, run: RunSpec) -> Job:
    """The job with a further run. Raises SpecError when that does not fit together."""
    data = job.model_dump(mode="json", exclude_unset=True)
    data["runs"] = {**data.get("runs", {}), name: run.model_dump(mode="json", exclude_unset=True)}
    try:
        return type(job).model_validate_json(json.dumps(data))
    except ValidationError as error:
        lines = [f"{p.field}: {p.message}" for p in problems_of(error.errors(), type(job), data, moved)]
        raise SpecError("\n".join(lines)) from None


def run_problems(job: Sections) -> Iterator[Problem]:
    """What is wrong with each run."""
    for name, run in job.runs.items():
        for key in sorted(_OF_REPLICAS & run.rollout.keys()):
            yield Problem(
                f"runs.{name}.rollout.{key}", "is one for all runs, whose replicas are the same; give it to the job"
            )
        try:
            algorithm = run_of(job, name, run).algorithm
        except ValidationError as error:
            for problem in problems_of(error.errors(), type(job), run_data(job, run), moved):
                yield Problem(f"runs.{name}.{problem.field}", problem.message)
        else:
            needs = algorithm.needs(off_policy=False) if algorithm.name in ALGORITHMS else Needs()
            for part in ("critic", "teacher"):
                if getattr(needs, part) is not None:
                    why = f"has a {part}, which multi_lora has no place for; use another"
                    yield Problem(f"runs.{name}.algorithm", why)


def target_problems(job: Sections, linear: Collection[str]) -> Iterator[Problem]:
    """Layers that adapters of the job are to go on and its model, which has these linear layers, does not have."""
    own = list(unknown_targets(job.lora, linear))
    yield from own
    for name, run in job.runs.items():
        if not own or "targets" in run.lora:
            for problem in unknown_targets(run_of(job, name, run).lora, linear):
                yield Problem(f"runs.{name}.{problem.field}", problem.message)
