"""Environments in processes: reused, bounded, killed when they hang, gone when whoever started them is."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from rlix.pipeline.sources.environments import Action, EnvironmentFailedError, Instance, Transition
from rlix.pipeline.sources.environments.base import EnvironmentTimeoutError
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, Limits, bounded
from rlix.pipeline.sources.environments.process import SubprocessRunner

SANDBOX = "tests.pipeline.sandboxes:Sandbox"
INSTANCE = Instance("t", 0)


def act(text: str) -> Action:
    return Action(text, (1, 2))


def test_a_process_serves_one_environment_after_another() -> None:
    async def main() -> None:
        runner = SubprocessRunner(SANDBOX, {"greeting": "hello"}, max_processes=1)
        seen = []
        for seed in (1, 2):
            sandbox = await runner.start(INSTANCE)
            assert await sandbox.reset(seed) == f"hello {seed}"
            seen.append(await sandbox.step(act("pid")))
            assert await sandbox.step(act("tokens")) == Transition((1, 2), done=True, exact=True)
            await runner.stop(sandbox, failed=False)
        assert [t.observation for t in seen] == [str(runner.processes.ids[0])] * 2
        assert seen[0].reward == 0.5
        await runner.close()
        assert runner.processes.ids == []

    asyncio.run(main())


def test_no_more_processes_than_allowed_and_a_failed_one_makes_room() -> None:
    async def main() -> None:
        runner = SubprocessRunner(SANDBOX, {"greeting": ""}, max_processes=1)
        first = await runner.start(INSTANCE)
        waiting = asyncio.ensure_future(runner.start(INSTANCE))
        await asyncio.sleep(0)
        assert len(runner.processes.ids) == 1
        with pytest.raises(EnvironmentFailedError, match="KeyError: 'nothing there'"):
            await first.step(act("raise"))
        with pytest.raises(EnvironmentFailedError, match="ended with 3"):
            await first.step(act("die"))
        await runner.stop(first, failed=True)
        second = await waiting
        assert await second.reset(0) == " 0"
        await runner.stop(second, failed=False)
        await runner.close()

    asyncio.run(main())


def test_a_blocking_environment_is_killed_with_all_it_started_and_the_retry_goes_on() -> None:
    async def main() -> None:
        runner = SubprocessRunner(SANDBOX, {"greeting": ""}, max_processes=2)
        environment = GuardedEnvironment(
            runner, INSTANCE, Limits(300.0, 3.0, attempts=2, backoff_s=0.0), time.monotonic
        )
        await environment.reset(0)
        (blocked,) = (psutil.Process(pid) for pid in runner.processes.ids)
        stepping = asyncio.ensure_future(environment.step(act("sleep")))
        while not (children := blocked.children()):
            assert not stepping.done(), "it must have started a process before it was killed"
            await asyncio.sleep(0.01)
        assert (await stepping).observation == "awake"
        assert (environment.tally.timeouts, environment.tally.retries) == (1, 1)
        _, alive = psutil.wait_procs([blocked, *children], timeout=300)
        assert alive == []
        await environment.close()
        await runner.close()

    asyncio.run(main())


def test_a_factory_that_fails_says_why() -> None:
    async def main() -> None:
        runner = SubprocessRunner(SANDBOX, {"farewell": ""}, max_processes=1)
        with pytest.raises(EnvironmentFailedError, match="unexpected keyword argument 'farewell'"):
            await runner.start(INSTANCE)
        assert runner.processes.ids == []

    asyncio.run(main())


_PARENT = f"""
import asyncio
from rlix.pipeline.sources.environments import Action, Instance
from rlix.pipeline.sources.environments.process import SubprocessRunner

async def main():
    runner = SubprocessRunner({SANDBOX!r}, {{"greeting": ""}}, max_processes=1)
    sandbox = await runner.start(Instance("t", 0))
    asyncio.ensure_future(sandbox.step(Action("sleep", ())))
    print(runner.processes.ids[0], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        blocked = psutil.Process(int(parent.stdout.readline()))
        while not (children := blocked.children()):
            assert blocked.is_running(), "it must have started a process before its parent is killed"
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([blocked, *children], timeout=300)
    assert alive == []


def test_gymnasium_environments_speak_text() -> None:
    options = {"id": "FrozenLake-v1", "is_slippery": False}

    async def main() -> None:
        runner = SubprocessRunner(
            "rlix.pipeline.sources.environments.gym:GymnasiumEnvironment", options, max_processes=1
        )
        lake = await runner.start(INSTANCE)
        assert await lake.reset(0) == "0>"
        steps = [await lake.step(act(text)) for text in "112212"]  # down, down, right, right, down, right
        assert [s.observation for s in steps] == ["4>", "8>", "9>", "10>", "14>", "15>"]
        assert [(s.reward, s.done) for s in steps[-2:]] == [(0.0, False), (1.0, True)]
        await lake.reset(1)
        assert await lake.step(act("7")) == Transition("", 0.0, done=True)
        assert await lake.step(act("swim")) == Transition("", 0.0, done=True)
        await runner.stop(lake, failed=False)
        await runner.close()

    asyncio.run(main())


def test_gymnasium_vectors_and_text_go_both_ways_in_process() -> None:
    from rlix.pipeline.sources.environments.gym import GymnasiumEnvironment, in_thread

    async def main() -> None:
        cart = GymnasiumEnvironment(INSTANCE, id="CartPole-v1", suffix="\n")
        first = await cart.reset(3)
        assert len(first.split()) == 4
        assert await cart.reset(3) == first
        assert (await cart.step(act("1"))).reward == 1.0
        await cart.close()
        pendulum = GymnasiumEnvironment(INSTANCE, id="Pendulum-v1")
        await pendulum.reset(3)
        assert not (await pendulum.step(act("0.5"))).done
        assert (await pendulum.step(act("9.5"))).done  # outside the space
        with pytest.raises(EnvironmentTimeoutError, match=r"a blocked call did not return within 0\.05 s"):
            await bounded("a blocked call", in_thread(lambda: time.sleep(0.5)), 0.05)

    asyncio.run(main())
