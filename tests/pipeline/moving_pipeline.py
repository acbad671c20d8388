"""The pipeline that ships, whose gangs are on other devices at every phase, by turns."""

from typing import Any

from rlix.pipeline.holdings import Resident
from rlix.pipeline.places import Asking, Places
from rlix.pipeline.trainer import Trainer


class Elsewhere(Places):
    """Does not leave the choice to the scheduler."""

    def asking(self, cluster: str, engine: Resident | None) -> Asking:
        choices = self.registration.cluster(cluster).choices[:2]
        here = super().asking(cluster, engine).get("home", choices[0])
        return {"devices": choices[(choices.index(here) + 1) % 2]}


class MovingPipeline(Trainer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.places = Elsewhere(self.spec.name, self.registration, self.spec.speed)
