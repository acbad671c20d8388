"""A pipeline that computes nothing: it holds its devices, and waits in its third step for a file named `go`."""

import time
from collections.abc import Mapping
from pathlib import Path

from rlix.pipeline import Pipeline
from rlix.protocol.types import Phase


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
