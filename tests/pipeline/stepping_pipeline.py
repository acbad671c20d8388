"""A pipeline that computes nothing: it holds its devices, and waits in its third step for a file named `go`."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from rlix.pipeline import Pipeline
from rlix.protocol.types import Phase


class PatientPipeline(Pipeline):
    """Says that each step began, and on which host; ends its second one when there is a file named `go`."""

    def setup(self) -> None:
        pass

    def step(self, step: int) -> Mapping[str, float]:
        runs = self.config.run_dir.parent
        (runs / f"began_{self.spec.name}_{step}").write_text(os.uname().nodename)
        with self.phase("actor_train", Phase.ACTOR_TRAINING):
            deadline = time.monotonic() + 120
            while step == 1 and not (runs / "go").exists():
                assert time.monotonic() < deadline, "nobody said go"
                time.sleep(0.02)
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
            deadline = time.monotonic() + 60
            while step == 2 and not (self.config.run_dir.parent / "go").exists():
                assert time.monotonic() < deadline, "nobody said go"
                time.sleep(0.02)
        return {"reward": float(step)}

    def save(self, path: Path) -> None:
        (path / "saved").touch()
