"""Starting a flow in one call, with workers that are plain objects and a pool that is pretended."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.parts.local import LocalWorker
from rlix.flow.planner import Mode, StagePlan
from rlix.flow.profiler.profile import Profile, path_of
from rlix.flow.programs import flow as flow_module
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.wiring import Circle, Part
from rlix.monitor.records import load_run
from rlix.node.run_folder import RunFolder
from rlix.protocol.errors import SpecError, WorkerError
from rlix.protocol.messages import Cluster, Lease, LeaseRecord, Registration
from rlix.protocol.types import Phase
from tests.flow.programs.pretended import POOL, Group

pytestmark = pytest.mark.usefixtures("no_ray")


class Small(FlowWorker):
    def memory(self) -> tuple[float, float]:
        return 0.0, 0.0

    def room(self) -> float:
        return 80.0


class Double(Small):
    def run(self, items: Sequence[int]) -> list[int]:
        return [2 * item for item in items]


class Next(Small):
    phase = Phase.OLD_LOG_PROBS

    def run(self, items: Sequence[int]) -> list[int]:
        return [item + 1 for item in items]


class Pool:
    """As a job that `rlix.attach` makes: what it asked for, and whether it has left."""

    def __init__(self, name: str, gangs: Any, stay: bool, **elastic: Any) -> None:
        assert stay
        self.name, self.client, self.size = name, self, gangs["flow"]
        self.rollouts, self.units = elastic.get("rollouts", {}), elastic.get("tensor_parallel")
        self.asked: list[tuple[Phase, int]] = []
        self.left = 0
        self.named: Any = None

    def devices(self, cluster: str | None = None) -> Any:
        """The gang's, or as the client has them."""
        mine = POOL[: self.size]
        return mine if cluster is not None else {device.id: device for device in mine}

    def registration(self) -> Registration:
        gang = Cluster("flow", 1, tuple(range(self.size)))
        rest = [Cluster(name, self.units[name], tuple(range(n)), elastic=True) for name, n in self.rollouts.items()]
        return Registration("job_1", "mine", (gang, *rest), self.name)

    def acquire(self, cluster: str, phase: Phase, *, devices: Sequence[int], giving: Any = ()) -> Any:
        self.asked.append((phase, len(devices)))
        return SimpleNamespace(devices=list(devices))

    def release(self, *leases: Any) -> None: ...

    def fence(self, lease: Any) -> Any:
        return lease

    def name_holders(self, cluster: str, processes: Any) -> None:
        self.named = processes

    def lease_log(self, since: int) -> Sequence[LeaseRecord]:
        """One lease, that it had all the time."""
        lease = Lease(1, "job_1", "flow", Phase.ACTOR_TRAINING, tuple(range(self.size)))
        return [LeaseRecord(1, "granted", lease, 0.0)][since:]

    def progress(self, *_: object, **__: object) -> None: ...

    def close(self) -> None:
        self.left += 1


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, rlix_home: Path) -> list[Pool]:
    made: list[Pool] = []

    def attach(*args: Any, **kwargs: Any) -> Pool:
        made.append(Pool(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(flow_module, "attach", attach)
    monkeypatch.setenv("RLIX_RUNS_DIR", str(rlix_home / "runs"))
    return made


def test_a_flow_is_measured_once_and_then_run_by_what_is_known(jobs: list[Pool], rlix_home: Path) -> None:
    flow = Flow("sums", [Double, Next])
    assert flow.run(range(8), gpus=2) == [2 * n + 1 for n in range(8)]
    (first,) = jobs
    measured = [(Phase.VALUE_COMPUTE, width) for _ in flow.parts for width in (1, 2)]
    assert first.asked[:4] == measured  # a slice for each width, behind every other gang
    assert {phase for phase, _ in first.asked[4:]} <= {Phase.ACTOR_TRAINING, Phase.OLD_LOG_PROBS}
    assert first.left == 1
    assert list(Profile.read(path_of(rlix_home, "sums")).parts) == ["double", "next"]
    with flow.start(gpus=2, like=range(8)) as running:
        for _ in range(2):
            assert running.step(list(range(8))) == [2 * n + 1 for n in range(8)]
        assert jobs[1].left == 0
    assert jobs[1].left == 1
    assert Phase.VALUE_COMPUTE not in dict(jobs[1].asked)
    run = load_run(rlix_home / "runs" / "sums")
    assert (run.state, len(run.metrics), len(run.devices), len(run.leases)) == ("finished", 2, 2, 1)
    for row in run.metrics:
        assert {"planned_s", "step_s", "double_s", "next_s"} <= row.keys()
    assert {(one.cluster, one.phase) for one in run.spans} == {("double", "actor_training"), ("next", "old_log_probs")}
    assert {span.kind for span in run.spans} == {"load", "busy", "offload"}
    assert {span.step for span in run.spans if span.kind == "busy"} == {0, 1}
    flow.run(range(8), gpus=4)  # nothing is known of so many
    assert (Phase.VALUE_COMPUTE, 4) in jobs[2].asked


class Logs(Small):
    """Notes what it gets; of items below 0 it fails."""

    def run(self, items: Sequence[Any]) -> list[Any]:
        for item in items:
            self.log(seen=item, planned_s=item, step=item, share=torch.tensor(0.5))
        if any(item < 0 for item in items):
            raise ValueError("below 0")
        return list(items)


class LogsMore(Small):
    def run(self, items: Sequence[Any]) -> list[Any]:
        self.log(share=1.0)
        return list(items)


@pytest.mark.parametrize("each", [None, 1])
def test_what_parts_log_is_in_the_steps_metrics(jobs: list[Pool], rlix_home: Path, each: int | None) -> None:
    flow = Flow("sums", [Part("logs", Logs, each=each), Next, LogsMore])
    with flow.start(gpus=2, like=range(4), plan="collocated") as running:
        running.step([1, 2, 3, 6])
        named = {"logs.planned_s": 3.0, "logs.step": 3.0, "logs.share": 0.5, "logsmore.share": 1.0}
        assert running.metrics == {"seen": 3.0, **named}
        with pytest.raises(ValueError, match="below 0"):
            running.step([100, 100, 100, -1])
        running.step([8, 8, 8, 0])
        assert running.metrics["seen"] == 6.0  # nothing of the step that failed
    rows = load_run(rlix_home / "runs" / "sums").metrics
    assert [row["seen"] for row in rows] == [3.0, 6.0]
    for step, row in enumerate(rows):
        assert (row["planned_s"], row["step"]) == (0.0, step)  # the flow's own
        assert row.keys() >= {"logs.planned_s", "logs.step", "logs.share"}


def test_only_numbers_are_logged() -> None:
    for value in ("loss", None, torch.zeros(2)):
        with pytest.raises(TypeError, match=r"log\(loss=\.\.\.\) takes a number, not"):
            Logs().log(loss=value)


def test_in_turn_needs_no_profile(jobs: list[Pool], rlix_home: Path) -> None:
    flow = Flow("sums", [Part("double", Double, most=1), Next, Part("far", Next, cpu_ranks=3)])
    with flow.start(gpus=4, like=range(8), plan="collocated") as running:
        assert running.plan.mode is Mode.COLLOCATED
        assert running.explain() == "collocated: double on 1 → next on 4 → far on the CPU\n  nothing of it was measured"
        assert running.step(range(8)) == [2 * n + 2 for n in range(8)]
        assert jobs[0].asked == [(Phase.ACTOR_TRAINING, 1), (Phase.OLD_LOG_PROBS, 4)]  # each for what it does
    assert not path_of(rlix_home, "sums").exists()


def test_a_circle_in_turn_needs_no_profile(jobs: list[Pool]) -> None:
    flow = Flow("sums", [Double, Next, Part("end", Double)], circles=[Circle(("double", "next"), 3)])
    plan = flow.like(range(4)).unmeasured(2)
    (loop,) = plan.segments[0].stages[0].loops
    assert (loop.parts, loop.rounds, loop.shared, loop.together) == (("double", "next"), 3, True, False)
    assert [part.devices for part in plan.parts] == [2, 2, 2]
    assert flow.run(range(4), gpus=2, plan="collocated") == [2 * (8 * n + 7) for n in range(4)]


class Shares(LocalWorker):
    """Can work on devices that come and go; what it was told."""

    elastic = True
    told: ClassVar[list[Any]] = []
    over: Any = None  # the lease that it left last, under which no engine comes back
    processes: ClassVar[Any] = {0: "a replica's"}

    def share(self, client: Any, cluster: Cluster, folder: RunFolder) -> Any:
        self.told.append((cluster.name, [device.id for device in self.devices], folder.path.name))
        return SimpleNamespace(is_open=False, worked_s=0.0, leases=set(), holds=False, let_go=lambda timeout_s: None)

    def onload(self) -> None:
        assert self.lease is None or self.lease is not self.over, "it has ended"
        self.told.append("shares" if self.lease is None else self.lease)

    def offload(self) -> None:
        self.over = self.lease

    def memory(self) -> tuple[float, float]:
        return 0.0, 0.0

    def close(self) -> None:
        self.told.append("ended")

    def run(self, items: Sequence[int]) -> list[int]:
        return [3 * item for item in items]


def test_a_part_that_can_share_holds_no_gang_unless_others_have_devices_beside_it(
    jobs: list[Pool], rlix_home: Path
) -> None:
    parts = [Part("far", Next, cpu_ranks=1), Part("shares", Shares, unit=2), Next]
    flow, told = Flow("sums", parts), Shares.told
    told.clear()
    with flow.start(gpus=3, like=range(4), plan="collocated") as running:
        assert (jobs[0].rollouts, jobs[0].units) == ({"rollout": 2}, {"rollout": 2})
        assert running.step(range(4)) == [3 * n + 4 for n in range(4)]
        assert jobs[0].asked == [(Phase.OLD_LOG_PROBS, 3)]  # of the last part
        assert told == [("rollout", [0, 1], "sums"), "shares"]
        assert jobs[0].named == {0: "a replica's"}
        first, second, third = running.plan.segments
        (far,), (shares,), (after,) = first.stages, second.stages, third.stages
        told.clear()
        running.switch(replace(running.plan, segments=(replace(second, stages=(far, shares), chunk=2), third)))
        assert running.step(range(4)) == [3 * n + 4 for n in range(4)]
        assert jobs[0].asked[1:] == [(Phase.OLD_LOG_PROBS, 3)]  # beside what needs no device it shares, too
        assert set(told) == {"shares"}
        told.clear()
        last = StagePlan((replace(after.parts[0], first=2, ranks=1, devices=1),), 2, 1, 0.0)
        running.switch(replace(running.plan, segments=(first, replace(second, stages=(shares, last), chunk=2))))
        assert running.step(range(4)) == [3 * n + 4 for n in range(4)]
        assert jobs[0].asked[2:] == [(Phase.ACTOR_TRAINING, 3)]
        assert told[0] == "ended"
        assert {tuple(lease.devices) for lease in told[1:]} == {(0, 1, 2)}
        assert jobs[0].named == {0: "a replica's"}


def test_a_part_with_an_engine_is_measured_under_leases_that_it_has_not_left(jobs: list[Pool]) -> None:
    assert Flow("sums", [Shares]).run(range(4), gpus=2) == [3 * n for n in range(4)]
    assert jobs[0].asked == [(Phase.VALUE_COMPUTE, width) for width in (1, 1, 2, 2)]  # to be built, and then measured


def test_who_cannot_start_has_left_the_pool(jobs: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow("sums", [Part("double", Double, unit=8)])
    with pytest.raises(SpecError, match=r"double needs 8 device\(s\) for one rank, and there are 2"):
        flow.run(range(8), gpus=2, plan="collocated")
    assert jobs[0].left == 1
    with pytest.raises(SpecError, match="flow sums: say how many items a step has"):
        Flow("sums", [Double]).start(gpus=2, plan="collocated")
    with pytest.raises(SpecError, match="plan='fast' must be auto"):
        Flow("sums", [Double]).run(range(8), gpus=2, plan="fast")
    assert len(jobs) == 1  # the last two asked nobody

    def fails(*_: object) -> None:
        raise WorkerError("it died")

    closed: list[str] = []
    monkeypatch.setattr(Group, "onload", fails)
    monkeypatch.setattr(Group, "close", lambda group: closed.append(group.name))
    with pytest.raises(WorkerError, match="it died"):
        Flow("sums", [Double]).run(range(8), gpus=2)
    assert len(closed) == 1
    assert jobs[1].left == 1


def test_parts_stand_in_a_row_unless_they_say_otherwise() -> None:
    parts = [Double, Part("next", Next), Part("side", Next, after=()), Part("both", Next, after=("next", "side"))]
    flow = Flow("row", parts, 4)
    assert {part.name: part.after for part in flow.parts} == {
        "double": (),
        "next": ("double",),
        "side": (),
        "both": ("next", "side"),
    }


def test_a_step_that_failed_is_what_the_run_folder_says_unless_another_was_made(
    jobs: list[Pool], rlix_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Group.part

    def fails(*_: object) -> None:
        raise WorkerError("it died")

    flow = Flow("sums", [Double])
    for again in (False, True):
        with flow.start(gpus=2, like=range(8), plan="collocated") as running:
            monkeypatch.setattr(Group, "part", fails)
            with pytest.raises(WorkerError, match="it died"):
                running.step(range(8))
            monkeypatch.setattr(Group, "part", part)
            if again:
                running.step(range(8))
        assert load_run(rlix_home / "runs" / "sums").state == ("finished" if again else "failed")
