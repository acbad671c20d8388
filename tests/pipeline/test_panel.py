"""Several rewards at once, and what a failing one costs."""

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from rlix.pipeline.sources.base import SourceFailedError
from rlix.pipeline.sources.judge import Failures, Verdict, Waiting
from rlix.pipeline.sources.panel import Asked, Panel
from rlix.pipeline.sources.processes import ProcessError, Processes
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.tasks.base import Prompt
from rlix.pipeline.spec.source import RewardSpec
from tests.pipeline import own_rewards
from tests.pipeline.in_process import InProcess
from tests.pipeline.test_composition import job
from tests.pipeline.virtual_time import run

OWN = own_rewards.__file__


def asked(completion: str = "12", /, **columns: Any) -> Asked:
    return Asked(Prompt("p", "1+1=", (1,), "12", (5, 2), columns), completion, (5, 2))


def reward(name: str, **changes: Any) -> RewardSpec:
    return RewardSpec(name=f"{OWN}:{name}", **{"timeout_s": 300.0, **changes})


def judged(rewards: Sequence[RewardSpec], *asked: Asked, **more: Any) -> list[Verdict]:
    """By a panel of its own, all at once; nothing is left behind."""

    async def main() -> list[Verdict]:
        panel = Panel(rewards, **more)
        try:
            return await asyncio.gather(*(panel.judge(one) for one in asked))
        finally:
            await panel.close()

    before = {child.pid for child in psutil.Process().children()}
    verdicts = asyncio.run(main())
    assert {child.pid for child in psutil.Process().children()} <= before
    return verdicts


def test_rewards_are_added_up_by_weight_and_shown_apart() -> None:
    three = [RewardSpec(name="exact_match"), reward("length", weight=0.25), RewardSpec(name="token_match")]
    right, wrong = judged(three, asked(), asked("3"))
    assert right == Reward(1.0 + 0.25 * 2 + 1.0, True, (("exact_match", 1.0), ("length", 2.0), ("token_match", 1.0)))
    assert isinstance(wrong, Reward)
    assert (wrong.reward, wrong.exact) == (0.0 + 0.25 + 1.0, False)
    assert isinstance(right, Reward)
    assert (right.answer, wrong.answer) == ("12", "3"), "the first reward says what was answered, too"
    (number,) = judged([RewardSpec(name="number_match")], asked("it is 12"))
    assert (number, getattr(number, "answer", None)) == (Reward(1.0, True), "12.0")


def test_two_of_the_same_name_are_shown_apart_and_numpy_counts() -> None:
    two = [reward("moody"), reward("moody", options={"mood": "numpy"})]
    assert judged(two, asked(mood="good")) == [Reward(1.5, True, (("moody", 1.0), ("moody_2", 0.5)))]


def test_columns_and_options_go_to_who_has_parameters_for_them() -> None:
    three = [reward("told", options={"factor": 0.5}), reward("length"), reward("any_columns")]
    (verdict,) = judged(three, asked(level=3, source="somewhere", tags=["a"], completion="a column"))
    assert isinstance(verdict, Reward)
    assert verdict.reward == 1.5 + 2.0 + 3.0


def test_what_fails_costs_its_sample_and_says_where() -> None:
    moods = ["good", "raise", "hang", "die", "nothing", "text", "exit", "endless", "good"]
    verdicts = judged([reward("moody", timeout_s=5.0)], *(asked(mood=mood) for mood in moods))
    assert verdicts[0] == verdicts[-1] == Reward(1.0, True)
    line = next(i for i, text in enumerate(Path(OWN).read_text().splitlines(), 1) if "raise KeyError" in text)
    said = [
        f"failed: KeyError: '12' ({OWN}:{line})",
        "failed: it did not return within 5 s",
        "failed: its process ended with 3",
        "failed: TypeError: it returned None, which is no number",
        "failed: TypeError: it returned '1.0', which is no number",
        "failed: SystemExit: 4",
        "returned inf; a reward must be a finite number",
    ]
    for verdict, expected in zip(verdicts[1:-1], said, strict=True):
        assert isinstance(verdict, str)
        assert verdict.startswith(f"reward {OWN}:moody for prompt p ")
        assert expected in verdict


def test_many_calls_of_a_coroutine_wait_at_a_time_in_one_process() -> None:
    verdicts = judged([reward("together")], *(asked(str(number), count=40) for number in range(40)))
    assert all(isinstance(verdict, Reward) for verdict in verdicts), verdicts
    assert len({verdict.reward for verdict in verdicts if isinstance(verdict, Reward)}) == 1, "one process"


def test_a_coroutine_that_is_late_or_raises_costs_its_own_sample_and_one_that_blocks_its_process() -> None:
    (late,) = judged([reward("slow", timeout_s=0.2)], asked(mood="late"))
    assert "did not return within 0.2 s" in str(late)
    good, wrong = judged([reward("slow")], asked(mood="good"), asked(mood="raise"))
    assert good == Reward(1.0, True)
    assert "ValueError: raise" in str(wrong)


def test_a_reward_of_groups_is_asked_once_for_all_completions_of_a_prompt() -> None:
    prompts = [Prompt(id, "1+1=", (1,), "12", (5, 2), {"base": base}) for id, base in (("p", 0.0), ("q", 10.0))]
    three = [Asked(p, text, (5, 2), k) for k, text in enumerate(("a", "ccc", "bb")) for p in prompts]
    ranked = [reward("rank", per="group")]
    verdicts = judged(ranked, *reversed(three), group_size=3)
    found = [v.reward for v in reversed(verdicts) if isinstance(v, Reward)]
    assert found == [0.0, 10.0, 2.0, 12.0, 1.0, 11.0]
    (first, second) = judged([reward("too_few", per="group")], *three[::2][:2], group_size=2)
    assert first == second
    assert "TypeError: it returned 1 rewards of 2 completions" in str(first)


def test_a_group_that_was_given_up_leaves_nothing_to_whoever_asks_its_prompt_again() -> None:
    async def main() -> list[Verdict]:
        panel, prompt = Panel([reward("rank", per="group")], group_size=2), Prompt("p", "", (1,), "", (), {"base": 0.0})
        try:
            left = asyncio.ensure_future(panel.judge(Asked(prompt, "of another time", (), 1)))
            for _ in range(3):
                await asyncio.sleep(0)  # it waits for the other one
            left.cancel()
            await asyncio.wait([left])
            two = [panel.judge(Asked(prompt, text, (), number)) for number, text in enumerate(("bb", "a"))]
            return await asyncio.wait_for(asyncio.gather(*two), 300)
        finally:
            await panel.close()

    assert [v.reward for v in asyncio.run(main()) if isinstance(v, Reward)] == [1.0, 0.0]


def test_a_process_that_died_meanwhile_is_not_asked_and_its_number_not_killed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))

    async def main() -> int:
        processes = Processes()
        dead = await processes.take()
        await processes.give_back(dead)
        dead.process.kill()
        await asyncio.wait([dead._reading])
        other = await processes.take()
        assert other.is_alive
        assert processes.ids == [other.process.pid]
        other.process.kill()
        await processes.close()
        return dead.process.pid

    assert killed.count(asyncio.run(main())) == 1  # when it died


def test_not_everybody_in_the_queue_waits_as_long_for_a_process_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Processes] = []

    async def take(self: Processes) -> Any:
        tried.append(self)
        await asyncio.sleep(0)
        raise ProcessError("its process did not import the rewards")

    monkeypatch.setattr(Processes, "take", take)
    verdicts = judged([reward("length")], *[asked()] * 9)
    assert "its process did not import the rewards" in str(verdicts[0])
    assert all("its process had not started" in str(verdict) for verdict in verdicts[1:])
    assert len(tried) == 1


def test_what_always_fails_does_not_fill_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    with caplog.at_level("INFO", logger="rlix"):
        for number in range(20):
            failures.note("reward mine", f"number {number} failed", {}, "")
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned[:-1] == [f"number {number} failed" for number in range(8)]
    assert "job.log only" in warned[-1]
    assert "number 19 failed" in caplog.text


def test_a_reward_that_always_hangs_does_not_hold_up_a_step_for_ever() -> None:
    hanging = reward("moody", timeout_s=0.2, concurrency=1)
    verdicts = judged([hanging], *[asked(mood="hang")] * 50)
    assert sum("within 0.2 s" in str(verdict) for verdict in verdicts) == 4
    assert sum("4 calls in a row had not returned" in str(verdict) for verdict in verdicts) == 46


def test_nobody_is_asked_any_more_when_the_job_is_to_stop() -> None:
    stop = threading.Event()
    stop.set()
    (verdict,) = judged([reward("moody")], asked(mood="hang"), stop=stop)
    assert "the job is to stop" in str(verdict)


def test_calls_run_side_by_side(tmp_path: Path) -> None:
    three = [Asked(Prompt("p", "", (1,), str(tmp_path), (), {"mood": "meet"}), name, ()) for name in "abc"]
    assert judged([reward("moody", concurrency=3)], *three) == [Reward(1.0, True)] * 3


JUDGE_S, ANSWERS, ROLLOUT_S = 2.0, 1024, 60.0


class SlowJudge:
    """The process of a coroutine that takes its time, on the clock of the loop."""

    is_alive = True
    loaded: ClassVar[Any] = {"asynchronous": {reward("slow").target: True}}

    async def ask(self, what: str, **request: Any) -> Any:
        await asyncio.sleep(JUDGE_S)
        return {"rewards": [(1.0, None, None)]}


def test_a_judge_that_takes_its_time_is_done_with_a_step_soon_after_the_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two seconds for each of a thousand answers, which come evenly over a minute; it would be half an hour in turn."""

    async def taken(_: Processes) -> SlowJudge:
        return SlowJudge()

    async def main() -> float:
        panel = Panel([reward("slow")])

        async def answered(number: int) -> Verdict:
            await asyncio.sleep(ROLLOUT_S * number / ANSWERS)
            return await panel.judge(asked(str(number)))

        verdicts = await asyncio.gather(*(answered(number + 1) for number in range(ANSWERS)))
        assert verdicts == [Reward(1.0, True)] * ANSWERS
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(Processes, "take", taken)
    assert run(main()) == pytest.approx(ROLLOUT_S + JUDGE_S)


def moody_job(folder: Path, moods: tuple[str, ...]) -> InProcess:
    spec = job("data", "on_policy", "grpo", folder, steps=1)
    rows = [{"prompt": f"{i}>", "answer": f"{i}", "mood": mood} for i, mood in enumerate(moods)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"name": f"{OWN}:moody", "options": {}, "weight": 1.0, "timeout_s": 300.0}
    values = spec.model_dump()
    values["source"] |= {"rewards": [own, {"name": "token_match"}]}
    return InProcess(type(spec).model_validate(values), folder)


def test_a_job_whose_rewards_all_fail_does_no_step_and_says_what_failed_on_what(tmp_path: Path) -> None:
    doing = moody_job(tmp_path, ("raise", "raise"))
    of_one = rf"reward {OWN}:moody for prompt \S+ failed: KeyError: .* \({OWN}:\d+\); it judged '.*'"
    with pytest.raises(SourceFailedError, match=rf"every reward of a step failed, the first, \S+: {of_one}"):
        doing.run_steps()


def test_a_job_learns_from_what_is_left(tmp_path: Path) -> None:
    (row,) = moody_job(tmp_path, ("raise", "good")).run_steps()
    assert row["reward_failed"] == 4
    assert (row["reward_moody"], row["trajectories"]) == (1.0, 8)
    assert row["grad_norm"] > 0


def test_a_plain_judge_that_waits_while_others_stand_in_line_is_said_once() -> None:
    idle, busy, quick = (Waiting("judge.py:ask", 4) for _ in range(3))
    said = [idle.note(2.0, 0.01) for _ in range(40)]
    assert [number for number, one in enumerate(said) if one] == [15]
    assert "take 2 s, of which 0.01 s are work, and 4 run at a time: 1,000 take 500 s" in said[15]
    assert not any(busy.note(2.0, 1.9) or quick.note(0.01, 0.0) for _ in range(40))


@pytest.mark.parametrize(("concurrency", "warned"), [(None, 1), (4, 0)])
def test_a_panel_measures_its_plain_functions(
    concurrency: int | None, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlix.pipeline.sources.judge._LONG_S", 0.0)
    monkeypatch.setattr("rlix.pipeline.sources.judge._IDLE", 1e9)
    judged([reward("length", concurrency=concurrency)], *(asked("12") for _ in range(24)))
    assert sum("run at a time" in record.message for record in caplog.records) == warned
