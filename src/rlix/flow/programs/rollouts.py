"""Parts whose devices come and go while they work: each has an elastic cluster of the flow's job."""

from dataclasses import dataclass
from typing import Any

from rlix.control.client import JobClient
from rlix.flow.parts.local import LocalGroup, LocalWorker, Shared
from rlix.flow.planner import Plan, SegmentPlan
from rlix.flow.profiler.measure import start
from rlix.flow.programs.wiring import Part, Wiring
from rlix.node.run_folder import RunFolder
from rlix.workers.counts import is_count


def asked(flow: Wiring, gpus: int) -> dict[str, Any]:
    """What `rlix.attach` is to be told of the parts that can share; nothing where none can.

    Raises SpecError: there are too few devices for one of them.
    """
    if not is_count(gpus):
        return {}  # which is refused there
    sizes = {name: part.ranks(gpus, flow.items) * part.unit for name, part in _clusters(flow).items()}
    units = {name: part.unit for name, part in _clusters(flow).items()}
    return {"rollouts": sizes, "tensor_parallel": units} if sizes else {}


def alone(segment: SegmentPlan) -> str | None:
    """The part that nobody of its segment has devices beside. Others would keep theirs while it has none, and two flows
    could wait for each other."""
    names = [placed.name for stage in segment.stages for placed in stage.parts if placed.devices]
    return names[0] if len(names) == 1 else None


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Of a job whose `rlix.attach` was told what was `asked`. `folder`: what replicas do is written there."""

    client: JobClient
    folder: RunFolder

    def of(self, flow: Wiring, plan: Plan) -> dict[str, str]:
        """The parts that share under this plan, and their clusters."""
        can = {part.name: cluster for cluster, part in _clusters(flow).items()}
        found = [name for segment in plan.segments if (name := alone(segment)) in can and name is not None]
        return {name: can[name] for name in found}

    def start(self, part: Part, cluster: str, name: str, timeout_s: float) -> tuple[LocalGroup, Shared]:
        """Its replicas, one for each of the cluster's bundles, of which none has its devices yet."""
        mine, known = self.client.registration().cluster(cluster), self.client.devices()
        devices = [known[id] for id in mine.devices]
        group = start(part, len(mine.bundles), devices, 0, name, timeout_s=timeout_s)
        assert isinstance(group, LocalGroup)
        try:
            return group, group.worker.share(self.client, mine, self.folder)
        except BaseException:  # raised again; nothing is left behind
            group.close()
            raise


def _clusters(flow: Wiring) -> dict[str, Part]:
    parts = [part for part in flow.parts if issubclass(part.worker, LocalWorker) and part.worker.elastic]
    return {f"rollout{number}" if number else "rollout": part for number, part in enumerate(parts)}
