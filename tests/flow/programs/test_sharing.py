"""A flow's rollout on devices that come and go, in a real pool: whoever takes them, it learns what it learns alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from rlix.control.program import attach
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.programs.flow import GANG, Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Part
from rlix.pipeline.parts import Answered, Generate, Policy, Train
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.protocol.types import Phase
from tests.pipeline.training_jobs import until_nothing_is_held
from tests.waiting import PROGRAM_S, until

pytestmark = pytest.mark.ray

GPUS = 2
INSTANT = dict.fromkeys(("trained_token_ms", "expand_s", "sync_s", "shrink_s", "move_s"), 0.0)


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
    manager: RolloutManager = worker.worker._rollout[0]
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
        assert shared == alone
        assert sum(left > 0 for left in open_then) >= 2, (taken, open_then)  # and not when its segment had ended
        assert manager.slot_use()["tokens_recomputed"] > 0


def test_flows_on_the_same_devices_starve_nobody() -> None:
    steps, begin = 3, Barrier(2)
    elsewhere = {f"gang{n}": list(range(GPUS, 8)) for n in range(3)}

    def run(name: str) -> list[Any]:
        with answering(name, token_ms=5.0).start(GPUS, like=prompts(0), plan="collocated") as running:
            assert [device.id for device in running.devices] == [0, 1]
            begin.wait(PROGRAM_S)
            for step in range(steps):
                found[name].append(learnt(running, step))
                seen.append(name)
            return found[name]

    found: dict[str, list[Any]] = {"one": [], "two": []}
    seen: list[str] = []
    with attach("elsewhere", gangs=elsewhere), ThreadPoolExecutor(2) as threads:  # others' devices are crowded
        first, second = threads.map(run, found)
    assert first == second
    assert set(seen[:steps]) == set(found)  # before one has ended the other is on its way
