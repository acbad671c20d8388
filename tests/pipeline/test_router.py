"""No trajectory is lost, doubled or given to two replicas, whatever happens to the replicas."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlix.engine.inference.requests import DecodingCounters, GenerationRequest
from rlix.pipeline.rollout.router import ReplicaState, Router, Trajectory
from tests.pipeline.rollout_world import chunk, collected, trajectory

SLOTS, SPARE, REPLICAS = 4, 1, 3


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(REPLICAS, SLOTS, spare=SPARE)
        self.running: list[dict[str, tuple[GenerationRequest, int]]] = [
            {} for _ in range(REPLICAS)
        ]  # with tokens drawn
        self.lengths: dict[str, int] = {}
        self.done: list[Trajectory] = []

    @rule(lengths=st.lists(st.integers(1, 6), max_size=6))
    def submit(self, lengths: list[int]) -> None:
        new = [trajectory(f"t{len(self.lengths) + i}", length) for i, length in enumerate(lengths)]
        self.lengths |= {t.id: t.sampling.max_new_tokens for t in new}
        self.router.submit(new)

    @rule(bundle=st.integers(0, REPLICAS - 1))
    def grow(self, bundle: int) -> None:
        if self.router.state(bundle) is ReplicaState.OFF:
            self.router.loading(bundle)

    @rule(bundle=st.integers(0, REPLICAS - 1))
    def loaded(self, bundle: int) -> None:
        if self.router.state(bundle) is ReplicaState.LOADING:
            self.router.ready(bundle)

    @rule()
    def dispatch(self) -> None:
        for bundle, requests in self.router.dispatch():
            assert self.router.state(bundle) is ReplicaState.READY
            assert requests
            self.running[bundle] |= {request.id: (request, 0) for request in requests}

    @precondition(lambda self: any(self.running))
    @rule(data=st.data(), waiting=st.integers(0, 2))
    def a_replica_reports(self, data: st.DataObject, waiting: int) -> None:
        bundle = data.draw(st.sampled_from([b for b in range(REPLICAS) if self.running[b]]))
        chunks = []
        for id, (request, drawn) in list(self.running[bundle].items()):
            piece = chunk(request, drawn, data.draw(st.integers(0, 7)), aborted=data.draw(st.booleans()))
            self.running[bundle][id] = request, drawn + len(piece.token_ids)
            if piece.finish_reason is not None:
                del self.running[bundle][id]
            chunks.append(piece)
        counters = DecodingCounters(running=len(self.running[bundle]), waiting=waiting)
        self.done += self.router.take(bundle, collected(*chunks, counters=counters))
        if self.router.state(bundle) is ReplicaState.DRAINING and not self.router.in_flight(bundle):
            self.router.off(bundle)

    @rule()
    def recall(self) -> None:
        for bundle, ids in self.router.recall():
            assert self.router.state(bundle) is ReplicaState.READY
            assert 0 < len(ids) <= SPARE, "only what waits is asked back"
            assert set(ids) <= self.running[bundle].keys()

    @rule(bundle=st.integers(0, REPLICAS - 1))
    def shrink(self, bundle: int) -> None:
        if self.router.state(bundle) in (ReplicaState.READY, ReplicaState.LOADING):
            self.router.draining(bundle)
            if not self.router.in_flight(bundle):
                self.router.off(bundle)

    @rule(bundle=st.integers(0, REPLICAS - 1))
    def die(self, bundle: int) -> None:
        self.router.off(bundle)
        self.running[bundle].clear()

    @invariant()
    def every_trajectory_is_open_or_done_once(self) -> None:
        done = [t.id for t in self.done]
        assert len(done) == len(set(done))
        assert self.router.demand().trajectories + len(done) == len(self.lengths)

    @invariant()
    def finished_trajectories_have_each_token_once(self) -> None:
        for t in self.done:
            assert t.token_ids == list(range(self.lengths[t.id]))
            assert len(t.token_ids) == len(t.logprobs) == len(t.versions)

    @invariant()
    def slots_are_respected(self) -> None:
        for bundle in range(REPLICAS):
            assert len(self.running[bundle]) == self.router.in_flight(bundle) <= SLOTS + SPARE

    def teardown(self) -> None:
        """From any state, healthy replicas finish everything."""
        for bundle in range(REPLICAS):
            self.router.off(bundle)
            self.router.loading(bundle)
            self.router.ready(bundle)
        for _ in range(1000):
            calls = self.router.dispatch()
            if not calls:
                break
            for bundle, requests in calls:
                self.done += self.router.take(bundle, collected(*(chunk(r, 0, 2, aborted=True) for r in requests)))
        assert self.router.demand().trajectories == 0
        self.every_trajectory_is_open_or_done_once()
        self.finished_trajectories_have_each_token_once()


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_work_is_spread_evenly_over_ready_replicas() -> None:
    router = Router(replicas=2, slots=8)
    for bundle in range(2):
        router.loading(bundle)
        router.ready(bundle)
    router.submit(trajectory(str(i), 3) for i in range(6))
    assert [(bundle, len(requests)) for bundle, requests in router.dispatch()] == [(0, 3), (1, 3)]


def test_a_prefix_stays_cached_while_only_adapters_move() -> None:
    for keeps_cache, again in ((True, 0), (False, 1)):
        router = Router(replicas=2, slots=8, prefix_cache=True)
        for bundle in range(2):
            router.loading(bundle)
            router.ready(bundle)
        router.submit([trajectory("a", 500)])
        ((bundle, (request,)),) = router.dispatch()
        assert bundle == 0
        router.take(0, collected(chunk(request, 0, 400, aborted=True)))
        for number in range(2):
            router.loading(number, keeps_cache=keeps_cache)
            router.ready(number)
        assert router._choose(router._open["a"], least=1) == again


def test_tokens_that_go_on_elsewhere_are_counted_as_read_again() -> None:
    """100 of the prompt and 400 that were generated, unless the replica still has them."""
    for moves, again in ((True, 500), (False, 0)):
        router = Router(replicas=2, slots=8, prefix_cache=True)
        router.loading(0)
        router.ready(0)
        router.submit([replace(trajectory("a", 500), prompt_ids=(1,) * 100)])
        ((_, (request,)),) = router.dispatch()
        assert router.recomputed == 0, "a prompt that is read for the first time"
        router.take(0, collected(chunk(request, 0, 400, aborted=True)))
        if moves:
            router.draining(0)
            router.off(0)
            router.loading(1)
            router.ready(1)
        router.dispatch()
        assert router.recomputed == again


def test_tokens_carry_the_version_that_produced_them() -> None:
    router = Router(1, 4)
    router.loading(0)
    router.ready(0)
    router.submit([trajectory("a", 4)])
    ((_, (first,)),) = router.dispatch()
    assert router.take(0, collected(chunk(first, 0, 2, version=5, aborted=True))) == []
    ((_, (second,)),) = router.dispatch()
    assert second.generated_ids == (0, 1)
    (done,) = router.take(0, collected(chunk(second, 0, 2, version=6)))
    assert done.versions == [5, 5, 6, 6]


def test_dropped_trajectories_are_ignored_when_they_end() -> None:
    router = Router(1, 4)
    router.loading(0)
    router.ready(0)
    router.submit([trajectory("a", 4)])
    ((_, (request,)),) = router.dispatch()
    assert router.drop({"a"}) == {0: ["a"]}
    assert router.in_flight(0) == 1
    assert router.take(0, collected(chunk(request, 0, 4))) == []
    assert router.in_flight(0) == 0


def test_wrong_moves_and_doubled_ids_are_errors() -> None:
    router = Router(1, 4)
    with pytest.raises(RuntimeError, match="replica 0 is off, so it cannot become ready"):
        router.ready(0)
    router.submit([trajectory("a", 1)])
    with pytest.raises(ValueError, match="'a' was submitted twice"):
        router.submit([trajectory("a", 1)])


def full_replica() -> tuple[Router, Sequence[GenerationRequest]]:
    """One of eight slots and two to spare, all taken, while twenty trajectories of three tokens wait."""
    router = Router(1, 8, spare=2)
    router.loading(0)
    router.ready(0)
    router.submit(trajectory(str(i), 3) for i in range(30))
    ((_, requests),) = router.dispatch()
    assert len(requests) == 10
    return router, requests


def test_a_replica_without_memory_is_given_less_and_then_more_again() -> None:
    router, requests = full_replica()
    done = [chunk(request, 0, 3) for request in requests]
    router.take(0, collected(*done[:6], counters=DecodingCounters(running=3, waiting=1)))
    assert [len(requests) for _, requests in router.dispatch()] == [1], "three run, and two may wait"
    router.take(0, collected(counters=DecodingCounters(running=5)))
    assert [len(requests) for _, requests in router.dispatch()] == [2], "none waits: there is room for more"


def test_slots_that_many_leave_at_once_are_all_filled_again() -> None:
    router, requests = full_replica()
    done = [chunk(request, 0, 3) for request in requests[:7]]
    router.take(0, collected(*done, counters=DecodingCounters(running=8, waiting=2)))
    assert [len(requests) for _, requests in router.dispatch()] == [7], "who waits takes two of seven free slots"


def test_what_a_loading_replica_could_begin_is_not_piled_up_on_another() -> None:
    router = Router(replicas=2, slots=8, spare=2)
    router.loading(0)
    router.loading(1)
    router.submit(trajectory(str(i), 3) for i in range(16))
    router.ready(0)
    assert [len(requests) for _, requests in router.dispatch()] == [8]
    router.ready(1)
    assert [(bundle, len(requests)) for bundle, requests in router.dispatch()] == [(1, 8)]
    router.submit(trajectory(str(i), 3) for i in range(16, 20))
    assert sorted((bundle, len(requests)) for bundle, requests in router.dispatch()) == [(0, 2), (1, 2)]


def test_who_waits_for_a_slot_is_asked_back_when_another_replica_has_free_ones() -> None:
    router = Router(replicas=2, slots=8, spare=2)
    for bundle in range(2):
        router.loading(bundle)
        router.ready(bundle)
    router.submit(trajectory(str(i), 3) for i in range(20))
    given = {bundle: [request.id for request in requests] for bundle, requests in router.dispatch()}
    assert router.recall() == [], "all slots are taken"
    requests = [trajectory(id, 3).request() for id in given[1][:3]]
    router.take(1, collected(*(chunk(r, 0, 3) for r in requests), counters=DecodingCounters(running=8, waiting=2)))
    assert router.recall() == [(0, given[0][-1:])], "two follow from those that waited there; one slot is free"
    assert router.recall() == [], "they were asked back already"
    waiting = trajectory(given[0][-1], 3).request()
    router.take(0, collected(chunk(waiting, 0, 0, aborted=True), counters=DecodingCounters(running=8, waiting=1)))
    assert [(bundle, [r.id for r in requests]) for bundle, requests in router.dispatch()] == [(1, [waiting.id])]
    ended = [chunk(trajectory(id, 3).request(), 0, 3) for id in given[0][:2]]
    router.take(1, collected(counters=DecodingCounters(running=7, waiting=1)))
    router.take(0, collected(*ended, counters=DecodingCounters(running=8, waiting=1)))
    assert router.recall() == [], "it waits again, for memory, but is not sent to and fro"
