"""A flow's rollout on devices that come and go, in a real pool: whoever takes them, it learns what it learns alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import ray

from rlix.control.program import attach
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.programs import patience
from rlix.flow.programs.flow import GANG, Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.step_lease import StepLease
from rlix.flow.programs.wiring import Part
from rlix.pipeline.parts import Answered, Generate, Policy, Train
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.shared import SharedRollout
from rlix.pipeline.sources.choice import build_task
from rlix.pipeline.sources.tasks.base import Task
from rlix.protocol.types import Phase
from tests.pipeline.training_jobs import closing_jobs, learnt_of, small, until_nothing_is_held
from tests.pipeline.training_jobs import learnt as of_run
from tests.waiting import PROGRAM_S, until

pytestmark = pytest.mark.ray

GPUS = 2
INSTANT = dict.fromkeys(("trained_token_ms", "expand_s", "sync_s", "shrink_s", "move_s"), 0.0)


class Asks(FlowWorker):
    """The task that a job has, for its rewards."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def run(self, answered: Sequence[Answered]) -> list[Answered]:
        return [
            one.rewarded(self.task.reward(one.prompt, s.turns[0].answer.token_ids) for s in one.samples)
            for one in answered
        ]


class Judge(FlowWorker):
    def run(self, answered: Sequence[Answered]) -> list[Answered]:
        return [one.rewarded(text.count(one.prompt.text[0]) / 8 for text in one.texts) for one in answered]


def answering(name: str, token_ms: float = 0.0) -> Flow:
    policy = Policy(
        rollout={"samples_per_prompt": 8, "max_new_tokens": 56},
        optimizer={"learning_rate": 1e-3},
        declared_speed={"token_ms": token_ms, **INSTANT},
    )
    return Flow(name, [Generate(policy), Part("judge", Judge, cpu_ranks=1), Train(policy)])


def prompts(step: int) -> list[str]:
    return [f"{(step + number) % 10}>" for number in range(4)]


def learnt(running: Running, step: int) -> Any:
    """Tokens and log-probs of a step, to the bit, and what training made of them."""
    said = [sample.turns[0].answer for one in running.step(prompts(step)) for sample in one.samples]
    metrics = {name: running.metrics[name] for name in ("loss", "grad_norm", "reward", "trajectories_digest")}
    return [(answer.token_ids, answer.logprobs) for answer in said], metrics


def rollout(running: Running) -> RolloutManager:
    worker: Any = running.groups["generate"]
    manager: RolloutManager = worker.worker._rollout._manager
    return manager


@pytest.fixture(autouse=True)
def runs(ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RLIX_RUNS_DIR", str(tmp_path))
    yield
    until_nothing_is_held()


def in_a_gang(flow: Flow, steps: int) -> list[Any]:
    """What the flow learns where nobody takes anything from it."""
    with attach("gang", gangs={GANG: GPUS}, stay=True) as job:
        plan = flow.like(prompts(0)).unmeasured(GPUS)
        with Running(flow.like(prompts(0)), job.devices(GANG), plan=plan, job=job, cluster=GANG) as running:
            return [learnt(running, step) for step in range(steps)]


def test_a_gang_takes_a_flows_rollout_again_and_again_and_it_learns_the_same() -> None:
    alone = in_a_gang(answering("alone"), 2)
    taken, open_then = 0, list[int]()
    with answering("shares", token_ms=40.0).start(GPUS, like=prompts(0), plan="collocated") as running:
        (cluster,) = [one for one in running._job.registration.clusters if one.elastic]  # type: ignore[union-attr]
        assert cluster.devices == tuple(device.id for device in running.devices)
        manager = rollout(running)
        with attach("other", gangs={"mine": cluster.devices}) as other, ThreadPoolExecutor(1) as threads:
            shared = []
            for step in range(2):
                stepping: Future[Any] = threads.submit(learnt, running, step)
                while True:
                    known = manager._router.decoded[0]
                    until(lambda: stepping.done() or manager._router.decoded[0] > known, "it generates nothing")  # noqa: B023
                    if stepping.done():
                        break
                    with other.phase(Phase.ACTOR_TRAINING):
                        taken += 1
                        open_then.append(manager._router.outstanding)
                        assert not manager._pool.held
                shared.append(stepping.result())
                replicas: Any = running.groups["generate"]
                ray.kill(replicas.worker.engine.replicas.handles[step])  # another takes its place
        assert shared == alone
        assert sum(left > 0 for left in open_then) >= 2, (taken, open_then)  # and not when its segment had ended
        assert manager.slot_use()["tokens_recomputed"] > 0


def test_flows_to_which_others_leave_nothing_get_a_gang_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, got = list[object](), list[object]()
    add, hold = StepLease.add, SharedRollout.hold
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    monkeypatch.setattr(patience, "_LOOK_S", 0.01)
    monkeypatch.setattr(StepLease, "add", lambda lease, *how: asked.append(lease) or add(lease, *how))
    monkeypatch.setattr(SharedRollout, "hold", lambda mine, gang: got.append(mine) or hold(mine, gang))
    alone = in_a_gang(answering("alone"), 1)
    both = list(range(GPUS))
    with (
        attach("elsewhere", gangs={f"gang{n}": list(range(GPUS, 8)) for n in range(4)}),  # or they went there
        answering("one").start(GPUS, like=prompts(0), plan="collocated") as one,
        answering("two").start(GPUS, like=prompts(0), plan="collocated") as two,
        attach("other", gangs={"mine": both}) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        assert [[device.id for device in flow.devices] for flow in (one, two)] == [both, both]
        with other.phase(Phase.ACTOR_TRAINING):
            steps = [threads.submit(learnt, flow, 0) for flow in (one, two)]
            until(lambda: len(set(map(id, asked))) == 2, "they do not ask for a gang")
        assert [[step.result(PROGRAM_S)] for step in steps] == [alone, alone]
        assert {id(mine) for mine in got} == {id(flow.groups["generate"].worker._rollout) for flow in (one, two)}  # type: ignore[attr-defined]


def test_flows_and_the_job_of_the_same_numbers_share_devices_and_learn_the_same(tmp_path: Path) -> None:
    both = {"devices": tuple(range(GPUS))}
    spec = small(
        name="job",
        steps=3,
        warmup=None,
        rollout={"max_new_tokens": 24},
        clusters={"actor_train": both, "actor_infer": both},
        declared_speed={"token_ms": 10.0, **INSTANT},
    )
    begin, seen = Barrier(2), list[str]()

    def run(name: str) -> list[dict[str, Any]]:
        policy, metrics = Policy(spec), list[dict[str, Any]]()
        assert spec.source.task is not None
        task = build_task(spec.source.task, policy.tokenizer)
        asked = [task.prompts(spec.seed, step, spec.rollout.prompts_per_step) for step in range(spec.steps)]
        judge = Part("judge", Asks, cpu_ranks=1, kwargs={"task": task})
        flow = Flow(name, [Generate(policy), judge, Train(policy)])
        with flow.start(GPUS, like=asked[0], plan="collocated") as running:
            assert {device.id for device in running.devices} == set(both["devices"])
            begin.wait(PROGRAM_S)
            for prompts in asked:
                running.step(prompts)
                metrics.append(learnt_of(running.metrics))
                seen.append(name)
                if name == "two" and len(metrics) == 1:
                    running.restart("generate")
        return metrics

    elsewhere = {f"gang{n}": list(range(GPUS, 8)) for n in range(4)}
    with attach("elsewhere", gangs=elsewhere), closing_jobs() as jobs, ThreadPoolExecutor(2) as threads:
        started = jobs.start(spec, runs=tmp_path)  # on crowded devices, if the others were not more so
        one, two = threads.map(run, ("one", "two"))
        jobs.finish(*started)
    known = [{name: row[name] for name in one[0] if name in row} for row in of_run(tmp_path / "job")]
    assert {"loss", "grad_norm", "reward", "trajectories_digest"} <= known[0].keys()
    assert [{name: row[name] for name in known[0]} for row in one] == known
    assert one == two
    assert set(seen[: spec.steps]) == {"one", "two"}  # before one has ended the other is on its way
