"""The pipeline that ships, which begins its last step when a file says so: until then it cannot have ended."""

from collections.abc import Mapping
from pathlib import Path

from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.trainer import Trainer
from tests.waiting import until


class GatedPipeline(Trainer):
    def step(self, step: int) -> Mapping[str, float]:
        go = gate(self.config.run_dir)
        until(lambda: step < self.spec.steps - 1 or go.exists(), f"nobody has made {go}")
        return super().step(step)


def gated(spec: JobSpec) -> JobSpec:
    """The same job, whose last step waits for its `gate`."""
    return JobSpec.model_validate(spec.model_dump() | {"pipeline": "tests.pipeline.gated_pipeline:GatedPipeline"})


def gate(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.go")
