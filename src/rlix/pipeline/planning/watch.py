"""Whether a planned job's steps take the time that its plan says, and by which plan they would take less."""

import json
import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from rlix.control.settings import Settings
from rlix.flow.planner.plan import AHEAD
from rlix.flow.programs.drift import LIMIT, Drift
from rlix.node.devices import smallest_memory
from rlix.node.run_folder import command_to_go_on, replace_file
from rlix.pipeline.planning.choose import FILE, Chosen, choose, measured_in, unplanned
from rlix.pipeline.planning.made import PlannedJob
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device, LeaseRecord
from rlix.protocol.types import ClusterName

logger = logging.getLogger(__name__)

STEP = "step"
WORTH = 0.05
"""Another plan must be so much faster than the steps as they are to be worth a word."""
PAYS = 2.0
"""To go over to it, what it saves until the last step must be so many times what starting again takes."""
WAITED = 0.05
"""Of a step: who waits so long for samples waits for generation, and not for a message."""
OWN = 0.9
"""Of the device time that a rollout was planned with, the least with which its time says anything about the plan."""


class PlanWatch:
    """Of a job that was planned; of another it sees nothing. One thread.

    `started`: when that was. `may_switch`: whether somebody is there to start it again by another plan.
    """

    def __init__(self, job: PlannedJob, started: float = 0.0, *, may_switch: bool = False) -> None:
        self._spec, self._plan, self._started, self._may_switch = job.spec, job.plan, started, may_switch
        self._start_s = -1.0  # until the first step
        plan = self._plan
        self._planned = {} if plan is None else {STEP: plan.step_s, **plan.seconds}
        if plan is not None and ClusterName.ACTOR_INFER in self._planned:
            self._planned[ClusterName.ACTOR_INFER] += plan.load_s
        self._drift = _drift(self._planned)
        self._phases: dict[str, float] = {}
        self._ratios: dict[str, float] = {}
        self._leases: dict[int, int] = {}  # devices of those that rollouts have, by epoch
        self._changes: list[tuple[float, int]] = []  # of their number, and when; the first one: all before this step

    def phase(self, cluster: str, seconds: float) -> None:
        """A cluster had its devices for so long, its engine's coming and going included."""
        self._phases[cluster] = self._phases.get(cluster, 0.0) + seconds

    def lease(self, record: LeaseRecord) -> None:
        """A lease of the job's has begun, or ended."""
        lease = record.lease
        if lease.cluster == ClusterName.ACTOR_INFER and record.event != "shrinking":
            held, now = self._leases.pop(lease.epoch, 0), len(lease.devices) if record.event == "granted" else 0
            self._leases |= {lease.epoch: now} if now else {}
            self._changes.append((record.time, now - held))

    def step(self, metrics: Mapping[str, float], end: float) -> str:
        """A step has ended, at this time: says by how much times have drifted, when they have for some in a row."""
        if not self._planned:
            return ""
        seen = {**self._phases, STEP: metrics["step_s"]}
        self._phases = {}
        start = end - metrics["step_s"]
        self._start_s = start - self._started if self._start_s < 0 else self._start_s
        if rollout_s := self._rollout_s(metrics, start):
            seen[ClusterName.ACTOR_INFER] = rollout_s
        self._changes = [(end, sum(self._leases.values()))]
        self._drift.saw({name: [(1, seconds)] for name, seconds in seen.items() if name in self._planned})
        if not (factors := self._drift.factors()):
            return ""
        now = {name: self._planned[name] * factors.get(name, 1.0) for name in self._planned}
        off = {name: ratio for name, ratio in factors.items() if name != STEP and abs(ratio - 1) > LIMIT}
        parts = ", ".join(f"{name} {ratio:.2f} times its time" for name, ratio in off.items())
        said = f"steps take {now[STEP]:.3g} s, planned were {self._planned[STEP]:.3g} s: {parts or 'none of the parts'}"
        self._ratios |= {name: self._ratios.get(name, 1.0) * ratio for name, ratio in factors.items()}
        self._planned, self._drift = now, _drift(now)
        return said

    def anew(
        self, folder: Path, devices: Mapping[int, Device], left: int, home: Path | None = None
    ) -> PlannedJob | None:
        """Once times have drifted: keeps them for plans to come, plans by them, and says in the log what came of it.

        Args:
            devices: of the pool, by id. left: steps to do. home: where profiles are.

        Returns the job by another plan, if it is to go on by that: it may, and that by far repays starting it again.
        """
        plan, clusters = self._plan, self._spec.clusters_in_use
        assert plan is not None
        wanted = plan.wanted
        kept = measured_in(folder)
        kept["times"] = {
            name: [(clusters[name].count or 0) // clusters[name].unit, seconds * self._ratios.get(name, 1.0)]
            for name, seconds in plan.seconds.items()
        }
        replace_file(folder / FILE, json.dumps(kept).encode())
        find = partial(self._found, folder, devices, home or Settings.from_env().home)
        widths = {name: clusters[name].count or 0 for name in plan.seconds}
        trained = {name: width for name, width in widths.items() if name != ClusterName.ACTOR_INFER}
        try:
            now = find(plan.chosen.partition(":")[0], widths).planned.best.seconds
            best = find(wanted.mode, {})
            mine = find(wanted.mode, trained) if wanted.switch == "exact" else best
        except SpecError as error:
            logger.info("%s: is not planned anew: %s", self._spec.name, error)
            return None
        present_s = min(self._planned[STEP], now)  # without what waiting for other jobs takes
        others = [found for found in (mine, best) if self._is_better(found, present_s, kept["left"])]
        may = wanted.switch == "any" or (wanted.switch == "exact" and _goes_on_exactly(self._spec))
        gain_s = (present_s - mine.planned.best.seconds) * left
        if mine in others and may and self._may_switch and gain_s > PAYS * self._start_s:
            logger.info("%s: goes on by another plan, %s", self._spec.name, _named(mine))
            kept["left"].append(plan.chosen)
            replace_file(folder / FILE, json.dumps(kept).encode())
            return mine.job
        if best in others:
            how = f"stop the job and go on with {command_to_go_on(folder)} to have it"
            logger.info("%s: by these times another plan would be %s; %s", self._spec.name, _named(best), how)
        return None

    def _rollout_s(self, metrics: Mapping[str, float], start: float) -> float:
        """What it took to make a step's samples; 0 where that is not known, or says nothing about the plan.

        A step ahead, what somebody had to wait for took the whole time since the step before. With fewer devices than
        planned, because others had them, it would be slower by any plan.
        """
        step_s, plan = metrics["step_s"], self._plan
        seconds = 0.0 if self._spec.schedule.works_ahead else metrics.get("rollout_s", 0.0)
        if plan is not None and AHEAD in plan.chosen and metrics.get("rollout_wait_s", 0.0) > WAITED * step_s:
            seconds = step_s
        end, planned = start + seconds, self._spec.clusters_in_use[ClusterName.ACTOR_INFER].count or 0
        had = sum(more * (end - max(time, start)) for time, more in self._changes if time < end)
        return seconds if had >= OWN * planned * seconds else 0.0

    def _is_better(self, found: Chosen, present_s: float, left: Collection[str]) -> bool:
        """Whether a plan is worth a word. One that was left is not: what was measured at one width may say too much of
        another, to and fro for ever."""
        plan, other = self._plan, found.job.plan
        assert plan is not None
        assert other is not None
        return other.step_s <= present_s * (1 - WORTH) and other.chosen not in (plan.chosen, *left)

    def _found(
        self, folder: Path, devices: Mapping[int, Device], home: Path, mode: str, same: Mapping[str, int]
    ) -> Chosen:
        """The fastest plan of a mode by the times as they are, with some clusters as wide as `same` says."""
        assert self._plan is not None
        job = unplanned(self._spec, self._plan.wanted.model_copy(update={"mode": mode}))
        return choose(job, sorted(devices), home, smallest_memory(devices.values()), folder, same=same)


def _goes_on_exactly(spec: JobSpec) -> bool:
    """Whether it learns the same from a checkpoint on, with rollouts of any width.

    Samples that are under way are made anew, by newer weights; vLLM's log-probs depend on which samples it has beside
    each other; and nobody knows what a schedule, a source or a backend of the user's remembers.
    """
    executors = (spec.rollout.executor, spec.training.executor)
    return spec.schedule.name == "on_policy" and executors == ("transformers", "fsdp2") and spec.source.name is None


def _named(chosen: Chosen) -> str:
    best = chosen.planned.best
    return f"{best.mode}: {best.shape}, {best.seconds:.3g} s a step"


def _drift(planned: Mapping[str, float]) -> Drift:
    return Drift({name: (seconds, 1) for name, seconds in planned.items()})
