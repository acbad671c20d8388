"""A pipeline that computes nothing: it holds its devices, and waits in its third step for a file named `go`."""

import os
from collections.abc import Mapping
from pathlib import Path

from rlix.pipeline import Pipeline
from rlix.protocol.types import Phase
from tests.waiting import until


class PatientPipeline(Pipeline):
    """Says that each step began, and on which host; ends its second one when there is a file named `go`."""

    def setup(self) -> None:
        pass

    def step(self, step: int) -> Mapping[str, float]:
        runs = self.config.run_dir.parent
        (runs / f"began_{self.spec.name}_{step}").write_text(os.uname().nodename)
        with self.phase("actor_train", Phase.ACTOR_TRAINING):
            until(lambda: step != 1 or (runs / "go").exists(), "nobody said go")
        return {"reward": float(step)}

    def save(self, path: Path) -> None:
        (path / "saved").touch()


class SteppingPipeline(Pipeline):
    def setup(self) -> None:
        pass

    def step(self, step: int) -> Mapping[str, float]:
        with self.phase("actor_train", Phase.ACTOR_TRAINING) as lease:
            nodes = {device.node_id for device in self.devices_of(lease.devices)}
            (self.config.run_dir.parent / f"where_{step}").write_text(" ".join(nodes))
            until(lambda: step != 2 or (self.config.run_dir.parent / "go").exists(), "nobody said go")
        return {"reward": float(step)}

    def save(self, path: Path) -> None:
        (path / "saved").touch()
