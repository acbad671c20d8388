"""A user's pipeline that does not work."""

import sys
from collections.abc import Mapping

from rlix.pipeline import Pipeline

sys.stdout.write("imported\n")


class BrokenPipeline(Pipeline):
    def setup(self) -> None:
        raise RuntimeError("no luck today")

    def step(self, step: int) -> Mapping[str, float]:
        raise AssertionError("setup failed, so no step may run")
