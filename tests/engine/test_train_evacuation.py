"""What is done about ranks that wait for one that failed; the ranks are futures."""

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rlix.engine.train.evacuation import evacuate, in_step, settled
from rlix.protocol.errors import WaitTimeoutError


class Ranks:
    """Rank 0 has failed; each other one comes back when the process of the rank before it has ended.

    `stuck` does not, and answers beside that; `mute` answers nobody, and what `broken` holds is lost. `undead` does not
    end when it is killed, or not soon. `dead` has ended; Ray knows that once it has been asked `cut_off` times, and its
    node as soon as it is `seen` there. A living rank that is `cut_off` so often answers then.
    """

    name = "train"

    def __init__(
        self,
        changes: list[int],
        *,
        stuck: int | None = None,
        mute: int | None = None,
        broken: int | None = None,
        undead: int | None = None,
        dead: int | None = None,
        cut_off: tuple[int, int] = (-1, 0),
        seen: bool = False,
    ) -> None:
        self.world_size, self.killed, self._dead = len(changes), [] if dead is None else [dead], dead
        self._changes, self._stuck, self._mute, self._broken = changes, stuck, mute, broken
        self._undead, self._seen = undead, seen
        self._cut_off, self._unheard = cut_off
        self._asked: list[tuple[int, str, bool, Future[Any]]] = []

    def call(self, method: str) -> None:
        assert method == "abort"

    def submit(
        self, method: str, args: Sequence[Any] = (), kwargs: Any = None, *, ranks: Sequence[int], at_once: bool
    ) -> list[Any]:
        lost = [] if self._dead is None else [self._dead]
        expected = {"ping": ((), None), "hand_over": ((), {"undo": 7, "lost": lost}), "changes": ((7,), None)}
        assert (args, kwargs) == expected[method]
        if self._cut_off in ranks:
            self._unheard -= 1
        futures: list[Future[Any]] = [Future() for _ in ranks]
        self._asked += [(rank, method, at_once, future) for rank, future in zip(ranks, futures, strict=True)]
        self._answer()
        return [SimpleNamespace(future=lambda found=future: found) for future in futures]

    def has_ended(self, rank: int, within_s: float) -> bool:
        assert within_s > 0
        return rank == self._dead and self._seen

    def kill(self, rank: int) -> None:
        self.killed.append(rank)
        self._answer()
        if rank == self._undead:
            raise WaitTimeoutError(f"train: rank {rank} did not end within 10 s of being killed")

    def _answer(self) -> None:
        for rank, method, at_once, future in self._asked:
            came_back = rank != self._stuck and (rank == 0 or rank - 1 in self.killed)
            if future.done() or rank == self._mute or not (at_once or came_back):
                continue
            if rank == self._cut_off and self._unheard >= 0:
                future.set_exception(ActorUnavailableError("connection reset", None))
            elif rank == self._dead:
                future.set_exception(ActorDiedError())
            elif (rank, method) == (self._broken, "hand_over"):
                future.set_exception(ValueError("no state"))
            else:
                future.set_result(f"part {rank}" if method == "hand_over" else self._changes[rank])


def test_each_rank_is_ended_once_it_has_handed_over_which_frees_the_next() -> None:
    ranks = Ranks([2, 2, 2, 2])
    state: Any = evacuate(ranks, 5.0, 5.0, since=7, copies=False)  # type: ignore[arg-type]
    assert state.agree
    assert [part.future().result() for part in state.parts] == [f"part {rank}" for rank in range(4)]
    assert ranks.killed == [0, 1, 2, 3]


def test_ranks_that_wrote_differently_do_not_agree() -> None:
    state: Any = evacuate(Ranks([0, 27, 27]), 5.0, 5.0, since=7, copies=False)  # type: ignore[arg-type]
    assert not state.agree


def test_what_a_rank_holds_that_hangs_counts_as_far_as_it_has_not_begun_to_change_it() -> None:
    ranks = Ranks([0, 0, 0], stuck=1)
    state: Any = evacuate(ranks, 0.05, 0.05, since=7, copies=False)  # type: ignore[arg-type]
    assert state.agree
    assert [part.future().result() for part in state.parts] == ["part 0", "part 1", "part 2"]
    assert sorted(ranks.killed) == [0, 1, 2]
    state = evacuate(Ranks([3, 3, 3], stuck=1), 0.05, 0.05, since=7, copies=False)  # type: ignore[arg-type]
    assert not state.agree


def test_nothing_is_left_of_a_state_of_which_a_part_is_missing() -> None:
    assert evacuate(Ranks([0, 0, 0], mute=1), 0.05, 0.05, since=7, copies=False) is None  # type: ignore[arg-type]
    assert evacuate(Ranks([0, 0, 0], broken=2), 5.0, 5.0, since=7, copies=False) is None  # type: ignore[arg-type]


def test_what_a_dead_rank_held_is_left_to_those_with_copies() -> None:
    state: Any = evacuate(Ranks([9, 0, 0], dead=0), 5.0, 5.0, since=7, copies=True)  # type: ignore[arg-type]
    assert state.agree
    assert state.lost == [0]
    assert [part and part.future().result() for part in state.parts] == [None, "part 1", "part 2"]
    state = evacuate(Ranks([9, 9, 9], dead=0), 5.0, 5.0, since=7, copies=True)  # type: ignore[arg-type]
    assert not state.agree, "nobody knows how far it was"
    ranks = Ranks([0, 0, 0], dead=1)
    assert evacuate(ranks, 5.0, 5.0, since=7, copies=False) is None  # type: ignore[arg-type]
    assert evacuate(Ranks([0], dead=0), 5.0, 5.0, since=7, copies=True) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"cut_off": (1, 2)}, {"cut_off": (1, 2**30), "seen": True}])
def test_who_cannot_be_reached_is_dead_once_ray_or_its_node_says_so(how: Any) -> None:
    state: Any = evacuate(Ranks([0, 0, 0], dead=1, **how), 5.0, 5.0, since=7, copies=True)  # type: ignore[arg-type]
    assert state.agree
    assert state.lost == [1]


def test_who_could_not_be_reached_for_a_while_hands_over_what_it_has() -> None:
    ranks = Ranks([0, 0, 0], cut_off=(1, 2))
    state: Any = evacuate(ranks, 5.0, 5.0, since=7, copies=True)  # type: ignore[arg-type]
    assert (state.agree, state.lost) == (True, [])
    assert evacuate(Ranks([0, 0, 0], cut_off=(1, 2**30)), 0.05, 0.05, since=7, copies=True) is None  # type: ignore[arg-type]


def test_a_process_that_does_not_end_is_no_error_of_the_call_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks([0, 0, 0], undead=1)
    state: Any = evacuate(ranks, 5.0, 5.0, since=7, copies=False)  # type: ignore[arg-type]
    assert state.agree
    assert ranks.killed == [0, 1, 2]
    assert "rank 1 did not end within 10 s" in caplog.text


def test_collectives_are_in_step_where_all_members_have_begun_as_many() -> None:
    world, pair = (0, 1, 2), (1, 2)
    assert in_step([{world: [3]}, {world: [3], pair: [1, 7]}, {world: [3], pair: [1, 7]}])
    assert not in_step([{world: [3]}, {world: [4]}, {world: [3]}])
    assert not in_step([{world: [3]}, {world: [3], pair: [1]}, {world: [3], pair: [2]}])
    assert not in_step([{}, {pair: [1]}, {}])


def test_a_device_that_is_not_through_is_not_settled() -> None:
    """A rank whose stream waits in a collective answers nevertheless."""

    def group(*answers: Any) -> Any:
        return SimpleNamespace(run=lambda *_, **__: list(answers))

    def late(*_: Any, **__: Any) -> Any:
        raise WaitTimeoutError("rank 1 did not answer")

    assert settled(group(({(0, 1): [3]}, True), ({(0, 1): [3]}, True)), 1.0)
    assert not settled(group(({(0, 1): [3]}, True), ({(0, 1): [3]}, False)), 1.0)
    assert not settled(group(({(0, 1): [3]}, True), ({(0, 1): [4]}, True)), 1.0)
    assert not settled(SimpleNamespace(run=late), 1.0)  # type: ignore[arg-type]
