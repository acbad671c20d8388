"""Episodes end, in time, whatever their environments do; and a retry is invisible."""

import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlix.pipeline.sources.environments import Action, EnvironmentFailedError, Instance, Toolbox, ToolCall, Transition
from rlix.pipeline.sources.environments.base import EnvironmentFactory, Observation
from rlix.pipeline.sources.environments.episode import Answer, End, Episode, Outstanding, Room, play
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, InProcessRunner, Limits, Tally
from rlix.pipeline.sources.environments.latency import Lognormal
from rlix.pipeline.sources.environments.lookup import DigitLookup
from rlix.pipeline.sources.environments.tools import ToolError
from rlix.protocol.messages import Demand
from tests.pipeline.virtual_time import run

END_TOKEN = 3
LIMITS = Limits(reset_timeout_s=60.0, step_timeout_s=30.0, attempts=3, backoff_s=1.0)
ROOM = Room(turns=8, answer_tokens=4, tokens=200)


class Characters:
    """A token is a character's code; the end token stands for nothing."""

    def encode(self, observation: Observation, before: Sequence[int]) -> tuple[int, ...]:
        assert isinstance(observation, str)
        return tuple(map(ord, observation))

    def action(self, token_ids: Sequence[int], before: Sequence[int]) -> Action:
        return Action(self.decode(token_ids), tuple(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(id) for id in token_ids if id != END_TOKEN)


async def right(id: str, tokens: tuple[int, ...], limit: int) -> Answer:
    """Does what the last observation ("37>") asks for."""
    left, digit = chr(tokens[-3]), tokens[-2]
    ids = (digit, END_TOKEN) if left != "0" else (ord("="), digit, END_TOKEN)
    return Answer(ids[:limit], (-0.5,) * len(ids[:limit]), (0,) * len(ids[:limit]))


def guarded(factory: EnvironmentFactory, limits: Limits = LIMITS, seed: int = 0) -> GuardedEnvironment:
    return GuardedEnvironment(
        InProcessRunner(factory), Instance("t", seed), limits, lambda: asyncio.get_running_loop().time()
    )


def episode(
    factory: EnvironmentFactory,
    limits: Limits = LIMITS,
    seed: int = 0,
    room: Room = ROOM,
    outstanding: Outstanding | None = None,
) -> Episode:
    async def main() -> Episode:
        environment = guarded(factory, limits, seed)
        return await play("t", 7, environment, right, Characters(), room, outstanding or Outstanding())

    return run(main())


# ---- the shipped task ------------------------------------------------------------------------------------------------


def test_the_right_actions_earn_the_whole_reward() -> None:
    played = episode(partial(DigitLookup, failure_rate=0.0))
    assert (played.end, played.reward, played.exact, len(played.turns)) == (End.DONE, 1.0, True, 4)
    shown = [(Characters().decode(t.observation_ids), Characters().decode(t.answer.token_ids)) for t in played.turns]
    assert tuple(shown) == DigitLookup.demonstrate(7, hops=3)
    assert played.from_policy[:5] == (False, False, False, True, True)
    assert len(played.from_policy) == len(played.token_ids)
    assert sum(played.from_policy) == played.generated == 2 * 3 + 3


def test_a_wrong_digit_costs_its_share_and_nonsense_ends_the_trajectory() -> None:
    async def main() -> tuple[Transition, Transition]:
        lookup = DigitLookup(Instance("t", 0), hops=2, failure_rate=0.0)
        digit = (await lookup.reset(7))[1]
        wrong = await lookup.step(Action(str((int(digit) + 1) % 10), ()))
        return wrong, await lookup.step(Action("=", ()))

    wrong, nonsense = run(main())
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert nonsense.done
    assert nonsense.reward in (0.0, 0.25)  # the wrong path may lead back onto the chain


def test_latencies_have_the_median_and_the_tail_they_were_given() -> None:
    source = random.Random(0)
    drawn = sorted(Lognormal(0.16, 2.7).draw(source) for _ in range(20_000))
    assert statistics.median(drawn) == pytest.approx(0.16, rel=0.05)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(2.7, rel=0.15)
    assert Lognormal(0.0, 0.0).draw(source) == 0.0
    with pytest.raises(ValueError, match="p50 2 s and p99 1 s"):
        Lognormal(2.0, 1.0)


def test_as_many_instances_fail_as_asked_for() -> None:
    once = replace(LIMITS, attempts=1)
    ends = [episode(partial(DigitLookup, failure_rate=0.1), once, seed=seed).end for seed in range(300)]
    assert 15 <= ends.count(End.FAILED) <= 45


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Transition("", reward=math.nan), "the reward nan, which is no finite number"),
        (Transition("", reward="1"), "the reward '1', which is no finite number"),  # type: ignore[arg-type]
        (Transition(None), "step gave None to read"),  # type: ignore[arg-type]
        (("", 1.0, True), "which is no Transition"),
        (None, "step returned None, which is no Transition"),
    ],
)
def test_what_cannot_be_learnt_from_costs_its_trajectory(found: Any, said: str) -> None:
    class Wrong(DigitLookup):
        async def step(self, action: Action) -> Transition:
            return found  # type: ignore[no-any-return]

    played = episode(partial(Wrong, failure_rate=0.0))
    assert played.end is End.FAILED
    assert said in str(played.error)


def test_numbers_of_other_libraries_are_numbers_and_the_last_observation_may_be_missing() -> None:
    class Numpy(DigitLookup):
        async def step(self, action: Action) -> Transition:
            return Transition(None, np.float32(0.5), np.bool_(True), np.bool_(True))  # type: ignore[arg-type]

    played = episode(partial(Numpy, failure_rate=0.0))
    assert (played.end, played.reward, played.exact) == (End.DONE, 0.5, True)
    assert type(played.reward) is float


def test_methods_that_are_no_coroutines_cost_their_trajectory() -> None:
    class Plain(DigitLookup):
        def reset(self, seed: int) -> str:  # type: ignore[override]
            return ">"

    assert "write 'async def reset'" in str(episode(partial(Plain, failure_rate=0.0)).error)


def test_an_episode_that_begins_with_nothing_has_failed() -> None:
    class Silent(DigitLookup):
        async def reset(self, seed: int) -> str:
            return ""

    played = episode(Silent)
    assert (played.end, played.turns) == (End.FAILED, ())
    assert "began with no tokens" in str(played.error)


# ---- failing and retrying --------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    hops=st.integers(1, 6),
    failure_rate=st.floats(0, 1),
    hang_share=st.floats(0, 1),
    attempts=st.integers(1, 4),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_retry_is_invisible_and_a_failure_is_bounded(
    seed: int, hops: int, failure_rate: float, hang_share: float, attempts: int
) -> None:
    limits = replace(LIMITS, attempts=attempts)
    outstanding = Outstanding()
    faulty = partial(DigitLookup, hops=hops, failure_rate=failure_rate, hang_share=hang_share)
    played = episode(faulty, limits, seed, outstanding=outstanding)
    untroubled = episode(partial(DigitLookup, hops=hops, failure_rate=0.0), limits, seed)
    assert outstanding.demand() == Demand(0, 0)
    assert played.tally.failures == played.tally.retries + played.failed
    assert played.tally.retries < attempts
    # a replay may repeat every call of the trajectory, once per attempt, each bounded
    assert played.tally.seconds <= attempts * (60.0 + (hops + 1) * 30.0) + 2.0**attempts
    if played.failed:
        assert played.turns == untroubled.turns[: len(played.turns)]
        assert played.error is not None
    else:
        assert (played.turns, played.reward, played.exact) == (untroubled.turns, untroubled.reward, untroubled.exact)


class Stubborn:
    """Hangs, and does not let itself be cancelled."""

    def __init__(self, instance: Instance) -> None:
        self.closed = False

    async def reset(self, seed: int) -> str:
        return "0"

    async def step(self, action: Action) -> Transition:
        while True:
            try:
                await asyncio.sleep(100.0)
                return Transition("too late")
            except asyncio.CancelledError:
                continue

    async def close(self) -> None:
        raise AssertionError("a hanging environment must not be asked for anything")


class Forgetful(Stubborn):
    """Fails once, and is another world the second time."""

    def __init__(self, instance: Instance) -> None:
        self.attempt = instance.attempt

    async def reset(self, seed: int) -> str:
        return f"world {self.attempt}"

    async def step(self, action: Action) -> Transition:
        raise ValueError("no such thing")


def test_one_that_ignores_its_cancellation_costs_its_timeout_only() -> None:
    async def main() -> float:
        environment = guarded(Stubborn, replace(LIMITS, attempts=1))
        await environment.reset(0)
        with pytest.raises(EnvironmentFailedError, match=r"failed 1 time.*step did not return within 30 s"):
            await environment.step(Action("x", ()))
        return environment.tally.seconds

    assert run(main()) == pytest.approx(30.0)


def test_a_replay_that_differs_is_a_failure_that_says_so() -> None:
    played = episode(Forgetful, replace(LIMITS, attempts=2))
    assert played.failed
    assert played.error is not None
    assert "reset(7) gave 'world 1', and 'world 0' before" in played.error


def test_an_environment_that_cannot_be_built_fails_its_trajectory() -> None:
    played = episode(partial(DigitLookup, tool_p50_s=2.0, tool_p99_s=1.0))
    assert played.error is not None
    assert "p50 2 s and p99 1 s" in played.error
    assert played.tally.failures == LIMITS.attempts


def test_a_cancelled_episode_closes_its_environment_and_its_demand() -> None:
    async def main() -> Demand:
        outstanding = Outstanding()
        environment = guarded(partial(DigitLookup, failure_rate=1.0, hang_share=1.0))
        task = asyncio.ensure_future(play("t", 7, environment, right, Characters(), ROOM, outstanding))
        await asyncio.sleep(0.01)
        assert outstanding.demand() == Demand(1, 32)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return outstanding.demand()

    assert run(main()) == Demand(0, 0)


# ---- room and demand -------------------------------------------------------------------------------------------------


def test_an_episode_ends_when_no_turn_or_no_room_is_left() -> None:
    factory = partial(DigitLookup, failure_rate=0.0, hops=6)
    assert episode(factory, room=Room(turns=2, answer_tokens=4, tokens=200)).end is End.TURNS
    short = episode(factory, room=Room(turns=8, answer_tokens=4, tokens=13))
    assert short.end is End.LENGTH
    assert len(short.token_ids) <= 13


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 99), st.integers(0, 9), st.integers(0, 120))
def test_what_may_come_next_never_exceeds_what_is_outstanding(
    turns: int, answer: int, tokens: int, played: int, used: int
) -> None:
    room = Room(turns, answer, tokens)
    assert 0 <= room.answer(played, used) <= room.outstanding(played, used)
    assert room.outstanding(played + 1, used + room.answer(played, used)) <= room.outstanding(played, used)


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_the_agent_reads_why_a_tool_said_nothing() -> None:
    async def refuse(argument: str) -> str:
        raise ToolError(f"no entry for {argument}")

    async def hang(_: str) -> str:
        await asyncio.Event().wait()
        return ""

    async def main() -> list[tuple[bool, str]]:
        toolbox = Toolbox({"refuse": refuse, "hang": hang}, timeout_s=5.0)
        calls = [ToolCall("refuse", "x"), ToolCall("hang", ""), ToolCall("fly", "")]
        return [(r.ok, r.text) for r in [await toolbox.call(call) for call in calls]]

    assert run(main()) == [
        (False, "no entry for x"),
        (False, "hang did not answer within 5 s"),
        (False, "no tool 'fly'; there are: hang, refuse"),
    ]


def test_tallies_are_not_shared() -> None:
    assert Tally() is not guarded(Stubborn).tally
