"""What a job says of itself, in its run folder, and how its failures read."""

import asyncio
import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rlix.pipeline.jobs.job_log import JobLog, is_full_disk, is_the_pools, what_ended
from rlix.pipeline.sources.environments import Action, EnvironmentFailedError, Instance
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, InProcessRunner, Limits
from rlix.pipeline.sources.panel import Asked
from rlix.pipeline.sources.tasks.base import Prompt
from rlix.pipeline.spec.source import RewardSpec
from rlix.protocol.errors import DeviceBusyError, WaitTimeoutError, WorkerError
from rlix.workers.user_errors import failure
from tests.pipeline.test_panel import judged

logger = logging.getLogger("rlix.somewhere")

REWARD = """
def score(prompt, completion, answer):
    return grade(completion)


def grade(text):
    return {"a": 1.0}[text]
"""


@pytest.fixture
def log(tmp_path: Path) -> Any:
    made = JobLog(tmp_path)
    yield tmp_path / "job.log"
    made.close()


def test_a_log_for_each_job_from_info_up(log: Path) -> None:
    logger.info("step %d", 3)
    logging.getLogger("elsewhere").error("not ours")
    assert "INFO rlix.somewhere: step 3" in log.read_text()
    assert "not ours" not in log.read_text()


def test_logs_of_one_process_are_each_of_a_thread_and_end_in_any_order(tmp_path: Path) -> None:
    library = logging.getLogger("rlix")
    before = library.level
    whole, first, second = JobLog(tmp_path), JobLog(tmp_path / "a", "run-a"), JobLog(tmp_path / "b", "run-b")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        thread = threading.Thread(target=logger.info, args=(f"of {name}",), name=f"run-{name}")
        thread.start()
        thread.join()
    whole.close()
    first.close()
    assert library.level == logging.INFO
    second.close()
    second.close()
    assert (library.level, library.handlers) == (before, [])
    said = [
        [word for word in ("of a", "of b") if word in (f / "job.log").read_text()] for f in (tmp_path, tmp_path / "a")
    ]
    assert said == [["of a", "of b"], ["of a"]]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "gone")
    logger.info("nobody reads this")
    log.close()
    assert logging.getLogger("rlix").handlers == []


def test_a_failing_reward_is_told_with_its_sample_and_the_users_own_traceback(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(REWARD)
    prompt = Prompt("prompts/3/1", "what?", (1,), "right", (2,))
    (verdict,) = judged([RewardSpec(name=f"{file}:score")], Asked(prompt, "wrong", (1,)))
    place = f"({file}:7)"
    assert verdict == f"reward {file}:score for prompt prompts/3/1 failed: KeyError: 'wrong' {place}; it judged 'wrong'"
    text = log.read_text()
    assert "\n  prompt: 'what?'\n  completion: 'wrong'\n  answer: 'right'\n" in text
    assert f'File "{file}", line 3, in score\n    return grade(completion)\n' in text
    assert f'File "{file}", line 7, in grade\n' in text
    assert "child.py" not in text


def test_a_failing_environment_is_told_with_its_sample_and_traceback(log: Path) -> None:
    class Broken:
        def __init__(self, instance: Instance) -> None: ...

        async def reset(self, seed: int) -> str:
            return ">"

        async def step(self, action: Action) -> Any:
            return {}[action.text]

        async def close(self) -> None: ...

    async def main() -> None:
        runner = InProcessRunner(Broken)
        guarded = GuardedEnvironment(runner, Instance("episodes/0/1/2", 0), Limits(attempts=1), lambda: 0.0)
        await guarded.reset(7)
        await guarded.step(Action("left", (1,)))

    with pytest.raises(EnvironmentFailedError, match="step raised KeyError: 'left'"):
        asyncio.run(main())
    text = log.read_text()
    assert "the environment of episodes/0/1/2 (seed 7, attempt 0) failed: step raised KeyError: 'left'" in text
    assert "in step\n    return {}[action.text]" in text


def test_a_full_disk_is_known_from_whatever_process_it_comes() -> None:
    plain = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    within = WorkerError("rank 3: SafetensorError: I/O error: No space left on device (os error 28)")
    chained = RuntimeError("the checkpoint was not written")
    chained.__cause__ = plain
    assert all(map(is_full_disk, (plain, within, chained)))
    assert not is_full_disk(OSError(errno.EACCES, os.strerror(errno.EACCES)))


@pytest.mark.parametrize("error", [DeviceBusyError("device 0 is held"), WaitTimeoutError("no grant in 60 s")])
def test_a_device_that_is_taken_and_a_wait_that_is_over_are_the_pools(error: Exception) -> None:
    within = failure("train-1", 0, "cuda", RayTaskError("cuda", "page", error))
    within.__cause__ = RayTaskError("cuda", "page", error)
    plain = RuntimeError("it did not start")
    plain.__cause__ = error
    assert all(map(is_the_pools, (error, within, plain)))
    assert not is_the_pools(ValueError("mine")) and not is_the_pools(TimeoutError("mine"))


def test_a_worker_that_died_is_named_with_what_it_did_and_how_to_go_on(tmp_path: Path) -> None:
    """And not with what somebody who holds its engine could do."""
    died = failure("train-1", 1, "policy_step", ActorDiedError())
    died.__cause__ = ActorDiedError()
    died.add_note("build() the engine and load a state")
    said = what_ended(died, tmp_path, "actor_training")
    assert said.startswith("in actor training: WorkerError: train-1: rank 1 died before it answered policy_step(): ")
    assert said.endswith("; go on from the newest checkpoint with `rlix run --resume`")
    (tmp_path / ".queued").write_text("17\n")
    said = what_ended(died, tmp_path / "job", "actor_training")
    assert said.endswith("; go on from the newest checkpoint with `rlix requeue 17`"), "a queue's job is the queue's"
    assert "build()" not in said
    own = ValueError("mine")
    assert what_ended(own, tmp_path, "rollout") == "ValueError: mine"


def test_a_log_has_no_colours_of_ray(tmp_path: Path) -> None:
    log = JobLog(tmp_path)
    try:
        failed = WorkerError("\x1b[36mray::TrainWorker.__init__()\x1b[39m (pid=1)")
        logger.error("it \x1b[31mfailed", exc_info=failed)
    finally:
        log.close()
    assert "\x1b" not in (text := (tmp_path / "job.log").read_text())
    assert "it failed\nrlix.protocol" in text
    assert "ray::TrainWorker.__init__() (pid=1)" in text
