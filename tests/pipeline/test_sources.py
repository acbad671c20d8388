"""Episodes end one by one: what is judged, and what is drawn in place of what teaches nothing, does not wait."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import End, Sample
from rlix.pipeline.sources.base import Seat, Surroundings
from rlix.pipeline.sources.making import chosen, has_spread
from rlix.pipeline.sources.prompts import PromptSource
from rlix.pipeline.sources.tasks.base import Prompt, Task
from rlix.pipeline.tokenizer import character_tokenizer
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import Demand

TOKENIZER = character_tokenizer("0123456789>")
GROUPS, SIZE, STEPS, WAIT_S = 3, 2, 10, 60.0


class Rollouts:
    """Answers when it is told to, with tokens that the reward is made of."""

    devices_s = 0.0

    def __init__(self) -> None:
        self.open: dict[str, tuple[Trajectory, Future[Trajectory]]] = {}
        self.batches: list[list[str]] = []
        self.changed = threading.Condition()

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        with self.changed:
            self.batches.append([trajectory.id for trajectory in trajectories])
            new = {trajectory.id: (trajectory, Future[Trajectory]()) for trajectory in trajectories}
            self.open |= new
            self.changed.notify_all()
        return [done for _, done in new.values()]

    def answer(self, id: str, length: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: id in self.open, WAIT_S), f"{id} was never asked for"
            trajectory, done = self.open.pop(id)
        trajectory.token_ids, trajectory.logprobs, trajectory.versions = [5] * length, [-1.0] * length, [0] * length
        trajectory.finish_reason = "stop"
        if done.set_running_or_notify_cancel():  # its group may have been given up meanwhile
            done.set_result(trajectory)

    def expect(self, demand: Demand, purpose: str = "") -> None: ...

    def abandon(self, reason: Exception, purpose: str | None = "") -> None: ...


class Lengths(Task):
    """The reward is the length; `judging` is told when it is asked for."""

    def __init__(self, may_judge: Callable[[str], None] = lambda _: None) -> None:
        self.judged: list[str] = []
        self._may_judge = may_judge

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        return [Prompt(f"p/{step}/{i}", "1>", (1, 2), "", ()) for i in range(n)]

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float:
        self._may_judge(prompt.id)
        self.judged.append(prompt.id)
        return float(len(completion_ids))


@contextmanager
def source(
    task: Task, rollouts: Rollouts, kind: type[PromptSource] = PromptSource, **changes: Any
) -> Iterator[PromptSource]:
    given: dict[str, Any] = {
        "job": "job",
        "seed": 0,
        "groups": GROUPS,
        "group_size": SIZE,
        "sampling": Sampling(8),
        "context": 100,
        "tokenizer": TOKENIZER,
        "ends": Ends(TOKENIZER, Path("/nowhere")),
        "timeout_s": 5.0,
        "stop": threading.Event(),
        "generator": lambda: rollouts,
        "steps": STEPS,
    }
    made = kind(task, Surroundings(**(given | changes)))
    try:
        yield made
    finally:
        made.close()


def test_what_has_ended_is_judged_while_others_are_generated() -> None:
    rollouts, judged = Rollouts(), threading.Semaphore(0)
    task = Lengths(lambda _: judged.release())
    with source(task, rollouts) as made:
        begun = made.begin(0)
        assert rollouts.batches == [[f"p/0/{i}/{k}" for i in range(GROUPS) for k in range(SIZE)]], "at once, in one"
        rollouts.answer("p/0/1/0", 3)
        assert judged.acquire(timeout=WAIT_S), "nothing is judged before the last has ended"
        for id in list(rollouts.open):
            rollouts.answer(id, 4)
        samples = made.finish(begun)
    assert [s.reward for s in samples.samples] == [4, 4, 3, 4, 4, 4]
    assert [s.id for s in samples.samples] == rollouts.batches[0]


def test_rewards_may_take_longer_than_the_rollout_may() -> None:
    """Devices may be idle meanwhile: it is the rewards' own time that bounds them."""
    rollouts, go_on = Rollouts(), threading.Event()
    with source(Lengths(lambda _: go_on.wait(WAIT_S) or None), rollouts, timeout_s=5.0) as made:
        begun = made.begin(0)
        for id in list(rollouts.open):
            rollouts.answer(id, 4)
        rollouts.devices_s = 50.0
        while begun.looked_at < rollouts.devices_s:
            assert not begun.made.done()
        go_on.set()
        assert len(made.finish(begun)) == GROUPS * SIZE
        begun = made.begin(1)
        rollouts.devices_s = 100.0
        with pytest.raises(WaitTimeoutError, match=r"step 1: 6 episodes .* within 5 s with devices: p/1/0/0, p/1/0/1"):
            made.finish(begun)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_what_is_drawn_in_place_of_a_flat_group_begins_at_once_and_does_not_depend_on_the_order(
    order: tuple[int, ...],
) -> None:
    """Groups 0 and 2 are flat, and of the two drawn for them the second is not: it takes the place of the first."""
    rollouts = Rollouts()
    lengths = {"p/0/0": (2, 2), "p/0/1": (1, 3), "p/0/2": (4, 4), "p/10/0": (5, 5), "p/10/1": (1, 6), "p/20/0": (7, 8)}

    def answer(group: str) -> None:
        for k, length in enumerate(lengths[group]):
            rollouts.answer(f"{group}/{k}", length)

    with source(Lengths(), rollouts, resample_rounds=2) as made:
        begun = made.begin(0)
        spare = iter(["p/10/0", "p/10/1"])
        for group in order[:2]:
            answer(f"p/0/{group}")
            if group != 1:  # what is drawn for it ends before the last group of the step
                answer(next(spare))
        answer(f"p/0/{order[2]}")
        for group in (*spare, "p/20/0"):
            answer(group)
        samples = made.finish(begun)
    assert [s.id.rpartition("/")[0] for s in samples.samples[::SIZE]] == ["p/10/1", "p/0/1", "p/20/0"]
    assert samples.curves["resampled"] == 2
    assert samples.curves["reward"] == 16 / 6, "of the groups of the step"
    assert samples.curves["tokens"] == 16 + 10 + 7 + 15


@given(st.data())
def test_a_group_is_drawn_for_each_that_is_flat_and_takes_a_place_by_its_number(data: st.DataObject) -> None:
    """Against the rounds one after the other: all of a round, then as many as are still flat."""
    flat = st.booleans()
    first = data.draw(st.lists(flat, min_size=1, max_size=6))
    rounds = [first]
    while len(rounds) < 4:
        rounds.append(data.draw(st.lists(flat, min_size=sum(rounds[-1]), max_size=sum(rounds[-1]))))
    groups = [[group(f"{r}/{i}", flat) for i, flat in enumerate(of_one)] for r, of_one in enumerate(rounds)]
    expected = list(groups[0])
    for further in groups[1:]:
        places = [i for i, of_one in enumerate(expected) if not has_spread(of_one)]
        assert len(places) == len(further)
        for place, of_one in zip(places, [g for g in further if has_spread(g)], strict=False):
            expected[place] = of_one
    assert chosen(groups)[0] == expected


def group(name: str, flat: bool) -> list[Sample]:
    return [Sample(f"{name}/{k}", (), 0.0 if flat else float(k), None, End.DONE) for k in range(SIZE)]


LONGEST = 8


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_of_spare_groups_the_longest_are_given_up_whoever_ends_first(data: st.DataObject) -> None:
    """What is learnt from is what would be without an early end; what is too long by then is not generated further."""
    lengths = data.draw(st.lists(st.tuples(*[st.integers(1, LONGEST)] * SIZE), min_size=GROUPS, max_size=GROUPS))
    spare = data.draw(st.integers(1, GROUPS - 1))
    kept = sorted(sorted(range(GROUPS), key=lambda number: (max(lengths[number]), number))[: GROUPS - spare])
    wanted = [f"p/0/{number}/{k}" for number in kept for k in range(SIZE)]
    others = [f"p/0/{number}/{k}" for number in range(GROUPS) if number not in kept for k in range(SIZE)]
    rollouts = Rollouts()
    with source(Lengths(), rollouts, spare=spare) as made:
        begun = made.begin(0)
        unfinished = {id for id in others if data.draw(st.booleans(), label=f"{id} has come so far and goes on")}
        for id in data.draw(st.permutations([*wanted, *others])):
            number, k = (int(part) for part in id.split("/")[2:])
            if id in unfinished:
                rollouts.open[id][0].token_ids = [5] * lengths[number][k]
            else:
                rollouts.answer(id, lengths[number][k])
        samples = made.finish(begun)
    assert [sample.id for sample in samples.samples] == wanted
    assert samples.curves["tokens"] == sum(sum(lengths[number]) for number in kept)
    assert set(rollouts.open) == unfinished
    assert all(done.cancelled() for _, done in rollouts.open.values())


def test_a_straggler_that_may_still_be_short_is_waited_for_and_then_taken() -> None:
    rollouts = Rollouts()
    with source(Lengths(), rollouts, spare=1) as made:
        begun = made.begin(0)
        rollouts.open["p/0/1/0"][0].token_ids = [5] * 3
        for id in ("p/0/0/0", "p/0/0/1", "p/0/2/0", "p/0/2/1"):
            rollouts.answer(id, 4)
        rollouts.devices_s = 1.0
        while begun.looked_at < rollouts.devices_s:
            assert not begun.made.done()
        rollouts.answer("p/0/1/0", 4)
        rollouts.answer("p/0/1/1", 1)
        samples = made.finish(begun)
    assert [s.id.rpartition("/")[0] for s in samples.samples[::SIZE]] == ["p/0/0", "p/0/1"], "as long, and before it"


def test_what_is_given_up_closes_what_it_has_before_the_step_ends() -> None:
    class Closing(PromptSource):
        closed: ClassVar[list[str]] = []

        async def episode(self, seat: Seat) -> Any:
            try:
                return await super().episode(seat)
            finally:
                for _ in range(50 * seat.number):  # turns of the loop, more than the other sample takes
                    await asyncio.sleep(0)
                self.closed.append(seat.id)

    rollouts = Rollouts()
    with source(Lengths(), rollouts, Closing, spare=1) as made:
        begun = made.begin(0)
        for k in range(SIZE):
            rollouts.open[f"p/0/1/{k}"][0].token_ids = [5] * 5
        for id in ("p/0/0/0", "p/0/0/1", "p/0/2/0", "p/0/2/1"):
            rollouts.answer(id, 4)
        made.finish(begun)
        assert {"p/0/1/0", "p/0/1/1"} < set(Closing.closed)


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_nothing_is_generated_for_an_episode_that_is_ended_as_it_asks(turns: int) -> None:
    rollouts = Rollouts()

    async def main(made: PromptSource) -> None:
        asked = asyncio.ensure_future(made.generated(0, Trajectory("late", (1,), 0, Sampling(8))))
        for _ in range(turns):  # of the loop: before it is submitted, with that, and after it
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})

    with source(Lengths(), rollouts) as made:
        made._loop.submit(main(made)).result(WAIT_S)
        made._loop.submit(asyncio.sleep(0)).result(WAIT_S)
        assert rollouts.open["late"][1].cancelled()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_spare_group_takes_the_place_of_a_flat_one_before_another_is_drawn(order: tuple[int, ...]) -> None:
    rollouts = Rollouts()
    lengths = {"p/0/0": (2, 2), "p/0/1": (3, 3), "p/0/2": (4, 8), "p/10/0": (5, 6)}
    with source(Lengths(), rollouts, spare=1, resample_rounds=2) as made:
        begun = made.begin(0)
        for group in [*(f"p/0/{number}" for number in order), "p/10/0"]:
            for k, length in enumerate(lengths[group]):
                rollouts.answer(f"{group}/{k}", length)
        samples = made.finish(begun)
    assert [s.id.rpartition("/")[0] for s in samples.samples[::SIZE]] == ["p/10/0", "p/0/2"]
    assert samples.curves["resampled"] == 1
    assert set(rollouts.open) == set(), "one was enough"


def test_an_episode_that_raises_ends_the_step_and_the_others() -> None:
    class Broken(PromptSource):
        ended = 0

        async def episode(self, seat: Any) -> Any:
            if seat.id == "p/0/1/0":
                raise RuntimeError("no such thing")
            try:
                await asyncio.Event().wait()
            finally:
                self.ended += 1

    rollouts = Rollouts()
    with source(Lengths(), rollouts) as plain:
        broken = Broken(Lengths(), plain.around)
        with pytest.raises(RuntimeError, match="no such thing"):
            broken.finish(broken.begin(0))
        assert broken.ended == GROUPS * SIZE - 1
        broken.close()
