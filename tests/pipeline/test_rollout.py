"""The rollout manager against replicas and a control plane that a test moves step by step, in any order."""

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlix.pipeline.rollout.rollout import RolloutError
from rlix.pipeline.rollout.router import ReplicaState, Trajectory
from rlix.pipeline.rollout.shares import Share
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.messages import Demand
from tests.pipeline.rollout_world import ActorDiedError, Call, Weights, World, trajectory

REPLICAS = 3
FAULTS = 8  # nine in a row without a result end a rollout of three replicas, by design


class RolloutMachine(RuleBasedStateMachine):
    """Grants, shrinks, forced ends, crashes, failing calls, weights and work, with every delivery order possible."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(REPLICAS)
        self.asked: list[tuple[str, Future[Trajectory]]] = []
        self.names = 0
        self.versions = 0
        self.faults = 0

    @initialize()
    def first_weights(self) -> None:
        self.publish()

    @rule()
    def publish(self) -> None:
        self.world.manager.publish(Weights(self.versions))  # type: ignore[arg-type]
        self.versions += 1
        self.world.manager.handle_posted()

    @rule(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6))
    def submit(self, lengths: list[int]) -> None:
        new = [trajectory(f"t{self.names + i}", length) for i, length in enumerate(lengths)]
        self.names += len(new)
        self.asked += zip([t.id for t in new], self.world.manager.submit(0, new), strict=True)
        self.world.manager.handle_posted()

    @rule(bundle=st.integers(0, REPLICAS - 1))
    def grant(self, bundle: int) -> None:
        if bundle not in self.world.held:
            self.world.grant(bundle)

    @rule(bundle=st.integers(0, REPLICAS - 1))
    def shrink(self, bundle: int) -> None:
        if bundle in self.world.held and bundle not in self.world.draining:
            self.world.ask_back(bundle)

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data())
    def message_arrives(self, data: st.DataObject) -> None:
        self.world.deliver(data.draw(st.integers(0, len(self.world.messages) - 1)))

    @precondition(lambda self: self.world.background.jobs)
    @rule(data=st.data())
    def background_work_ends(self, data: st.DataObject) -> None:
        self.world.background.run(data.draw(st.integers(0, len(self.world.background.jobs) - 1)))
        self.world.manager.handle_posted()

    @precondition(lambda self: self.world.calls)
    @rule(data=st.data())
    def call_returns(self, data: st.DataObject) -> None:
        call = self.world.calls[data.draw(st.integers(0, len(self.world.calls) - 1))]
        self.world.finish(call, data.draw(st.none() | st.lists(st.integers(0, 6), max_size=3)))
        self.world.manager.handle_posted()

    @precondition(lambda self: self.world.calls and self.faults < FAULTS)
    @rule(data=st.data())
    def call_raises(self, data: st.DataObject) -> None:
        self.faults += 1
        call = self.world.calls[data.draw(st.integers(0, len(self.world.calls) - 1))]
        self.world.fail(call, RuntimeError("out of memory"))
        self.world.manager.handle_posted()

    @precondition(lambda self: self.faults < FAULTS)
    @rule(bundle=st.integers(0, REPLICAS - 1))
    def crash(self, bundle: int) -> None:
        self.faults += 1
        self.world.kill(bundle)
        self.world.manager.handle_posted()

    @precondition(lambda self: self.faults < FAULTS)
    @rule(bundle=st.integers(0, REPLICAS - 1))
    def deadline(self, bundle: int) -> None:
        if bundle in self.world.held:
            self.faults += 1
            self.world.take_by_force(bundle)
            self.world.manager.handle_posted()

    @invariant()
    def what_is_finished_has_each_token_once(self) -> None:
        for name, done in self.asked:
            if done.done():
                t = done.result()
                assert t.id == name
                assert t.token_ids == list(range(t.sampling.max_new_tokens))
                assert len(t.logprobs) == len(t.versions) == len(t.token_ids)
                assert t.versions == sorted(t.versions)
                assert t.versions[-1] < self.versions

    def teardown(self) -> None:
        """From any state: what was asked back is given back, and healthy replicas finish everything."""
        for _ in range(20):
            self.world.settle()
            for bundle in range(REPLICAS):
                if bundle not in self.world.held:
                    self.world.grant(bundle)
            if not self.world.messages:
                break
        assert all(ack.done() for ack in self.world.acks.values()), "a shrink was never acknowledged"
        assert all(done.done() for _, done in self.asked), "trajectories were lost"
        self.what_is_finished_has_each_token_once()
        assert self.world.router.bundles(ReplicaState.READY) == list(range(REPLICAS))
        for bundle in range(REPLICAS):
            self.world.ask_back(bundle)
        self.world.settle()
        assert not self.world.held
        assert not any(self.world.resident)


TestRollout = RolloutMachine.TestCase
TestRollout.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.fixture
def world() -> World:
    made = World(REPLICAS)
    made.manager.publish(Weights(0))  # type: ignore[arg-type]
    made.manager.handle_posted()
    return made


def ready(world: World, *bundles: int) -> None:
    for bundle in bundles:
        world.grant(bundle)
    world.settle(calls=False)
    while loads := [c for c in world.calls if c.method == "load"]:
        world.finish(loads[0])
        world.manager.handle_posted()


def collect(world: World, bundle: int) -> Call:
    """The call by which the manager listens to a replica."""
    (call,) = [c for c in world.calls if c.rank == bundle and c.method == "collect"]
    return call


def test_a_shrunk_trajectory_goes_on_elsewhere_from_its_prefix(world: World) -> None:
    ready(world, 0)
    (done,) = world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    world.finish(collect(world, 0), [2])
    world.ask_back(0)
    world.settle(calls=False)
    assert world.running[0]["a"].aborted
    world.finish(collect(world, 0), [1])
    world.settle()
    assert world.acks[1].done()
    assert not done.done()
    ready(world, 2)
    assert world.running[2]["a"].request.generated_ids == (0, 1, 2)
    world.settle()
    assert done.result().token_ids == [0, 1, 2, 3, 4]


def test_a_shrink_while_loading_waits_for_the_load_then_offloads(world: World) -> None:
    world.grant(0)
    world.ask_back(0)
    world.deliver()
    world.deliver()
    assert [c.method for c in world.calls] == ["load"]
    assert not world.acks[1].done()
    world.finish(world.calls[0])
    world.manager.handle_posted()
    assert [c.method for c in world.calls] == ["offload"]
    world.settle()
    assert world.acks[1].done()


def test_a_shrink_that_overtakes_its_grow_is_acknowledged_and_nothing_is_loaded(world: World) -> None:
    world.grant(0)
    world.ask_back(0)
    world.deliver(1)
    assert world.acks[1].done()
    world.deliver()
    assert not world.calls


def test_a_shrink_while_the_actor_is_replaced_needs_not_wait(world: World) -> None:
    ready(world, 0)
    world.take_by_force(0)
    world.grant(0)
    world.deliver()
    world.deliver()
    (restart,) = world.background.jobs
    world.ask_back(0)
    world.deliver()
    assert world.acks[2].done()
    assert restart in world.background.jobs
    world.settle()
    assert not world.calls


def test_the_loss_of_a_bundle_may_be_heard_after_its_next_grant(world: World) -> None:
    ready(world, 0)
    world.take_by_force(0)
    world.grant(0)
    world.deliver(1)
    world.deliver(0)
    world.settle()
    assert world.router.state(0) is ReplicaState.READY
    assert world.resident[0]


def test_a_failed_replica_is_killed_before_its_lease_is_given_back(world: World) -> None:
    ready(world, 0)
    world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    world.fail(world.calls[0], RuntimeError("out of memory"))
    world.manager.handle_posted()
    assert world.router.state(0) is ReplicaState.DEAD
    assert 0 in world.held
    world.settle()
    assert not world.alive[0]
    assert 0 not in world.held


def test_replicas_that_never_generate_end_the_rollout(world: World) -> None:
    (done,) = world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    for _ in range(3 * REPLICAS):
        assert not done.done()
        ready(world, 0)
        world.fail(world.calls[0], ActorDiedError("gone"))
        world.settle()
    with pytest.raises(RolloutError, match=r"9 replica failures in a row.*replica 0.*gone"):
        done.result(timeout=0)


def test_a_refused_request_ends_the_rollout_and_not_the_replica(world: World) -> None:
    ready(world, 0)
    (done,) = world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    world.refuse(0, "token 99 is not in 0..15")
    world.manager.handle_posted()
    with pytest.raises(RolloutError, match="refused a request: token 99"):
        done.result(timeout=0)
    (again,) = world.manager.submit(0, [trajectory("a", 5)])
    world.settle()
    assert again.result(timeout=0).token_ids == [0, 1, 2, 3, 4]
    world.ask_back(0)
    world.settle()
    assert not world.held


def test_requests_in_flight_survive_new_weights_and_nothing_new_starts_before_them(world: World) -> None:
    ready(world, 0)
    (first,) = world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    world.manager.publish(Weights(1))  # type: ignore[arg-type]
    (second,) = world.manager.submit(0, [trajectory("b", 5)])
    world.manager.handle_posted()
    (update,) = [call for call in world.calls if call.method == "update"]
    assert list(world.running[0]) == ["a"]
    assert not world.running[0]["a"].aborted
    world.finish(update)
    world.settle()
    assert (first.result(timeout=0).versions, second.result(timeout=0).versions) == ([1] * 5, [1] * 5)


def test_growth_takes_work_over_when_that_pays(world: World) -> None:
    ready(world, 0)
    world.manager.submit(0, [trajectory(f"w{i}", 10) for i in range(4)])
    world.manager.handle_posted()
    world.now = 10.0  # ten tokens took ten seconds: moving costs little against that
    world.settle()
    world.manager.submit(0, [trajectory(f"t{i}", 10) for i in range(4)])
    world.manager.handle_posted()
    ready(world, 1)
    assert sum(running.aborted for running in world.running[0].values()) == 2
    world.finish(collect(world, 0), [4, 4])
    world.manager.handle_posted()
    assert [len(running) for running in world.running] == [2, 2, 0]


def test_a_killed_replica_costs_the_tokens_since_its_last_report(world: World) -> None:
    ready(world, 0)
    world.manager.submit(0, [trajectory("a", 9)])
    world.manager.handle_posted()
    world.finish(collect(world, 0), [4])
    world.manager.handle_posted()
    world.kill(0)
    world.settle()
    ready(world, 1)
    assert world.running[1]["a"].request.generated_ids == (0, 1, 2, 3)


def test_a_finished_trajectory_is_followed_at_once(world: World) -> None:
    ready(world, 0)
    done = world.manager.submit(0, [trajectory(f"t{i}", 4) for i in range(8)])
    world.manager.handle_posted()
    assert len(world.running[0]) == 5, "four slots, and one that waits for the first to be free"
    world.finish(collect(world, 0), [4])
    world.manager.handle_posted()
    assert len(world.running[0]) == 5
    assert [one.done() for one in done] == [True] + [False] * 7


def test_demand_is_what_is_expected_of_which_some_is_submitted(world: World) -> None:
    world.manager.expect(Demand(2, 20))
    (done,) = world.manager.submit(0, [trajectory("a", 5)])
    world.settle()
    ready(world, 0)
    world.settle()
    assert done.done()
    assert [(d.trajectories, d.tokens) for d in world.demands] == [(2, 20)]
    world.manager.submit(0, [trajectory(id, 5) for id in "bcd"])
    world.now = 1.0
    world.manager.handle_posted()
    world.settle()
    assert (world.demands[1].trajectories, world.demands[1].tokens) == (3, 20)
    world.now = 2.0
    world.manager.expect(Demand(0))
    world.settle()
    assert world.demands[-1].trajectories == 0


def test_what_one_adapter_expects_hides_nothing_of_the_others(world: World) -> None:
    world.manager.expect(Demand(6, 60), adapter="a")
    world.manager.submit(0, [replace(trajectory(f"a{i}", 5), adapter="a") for i in range(2)])
    world.manager.submit(0, [replace(trajectory(f"b{i}", 5), adapter="b") for i in range(3)])
    world.settle()
    world.now = 2.0  # the next heartbeat is due, with whatever happens next
    world.manager.expect_gpu_s(0.0)
    world.settle()
    assert (world.demands[-1].trajectories, world.demands[-1].tokens) == (6 + 3, 60 + 15)
    ready(world, 0)
    world.now = 4.0
    world.manager.expect_gpu_s(0.0)
    world.manager.handle_posted()
    assert [world.manager.share(owner) for owner in "abc"] == [Share(6, 2), Share(3, 3), Share(0, 0)]


def test_heartbeats_tell_what_a_load_takes_and_what_the_job_still_needs(world: World) -> None:
    world.grant(0)
    world.settle(calls=False)
    world.now = 3.0
    world.manager.expect_gpu_s(70.0)
    world.manager.submit(0, [trajectory("a", 5)])
    world.settle()
    assert (world.demands[-1].load_s, world.demands[-1].left_gpu_s) == (3.0, 70.0)


def test_abandoned_work_ends_with_an_error_and_frees_the_replica(world: World) -> None:
    ready(world, 0)
    (done,) = world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    world.manager.abandon(RolloutError("enough"))
    world.manager.handle_posted()
    assert str(done.exception(timeout=0)) == "enough"
    assert world.running[0]["a"].aborted
    world.settle()
    world.ask_back(0)
    world.settle()
    assert not world.held


def test_waiting_is_bounded_and_says_on_what(world: World) -> None:
    ready(world, 1)
    done = world.manager.submit(7, [trajectory("a", 5)])
    world.manager.handle_posted()
    with pytest.raises(
        WaitTimeoutError, match=r"step 7: 1 trajectories .* within -1 s with devices; replicas hold \{1: \(1,\)\}"
    ):
        world.manager.wait(done, -1.0, threading.Event())


def test_what_is_for_another_purpose_is_expected_and_given_up_apart(world: World) -> None:
    ready(world, 0)
    world.manager.expect(Demand(6, 60))
    world.manager.expect(Demand(4, 40), "evaluation")
    learnt = world.manager.submit(0, [trajectory("a", 5), trajectory("b", 5)])
    asked = world.manager.submit(0, [replace(trajectory("e", 5), purpose="evaluation")])
    world.settle(calls=False)
    world.now = 2.0  # the next heartbeat is due, with whatever happens next
    world.manager.expect_gpu_s(0.0)
    world.settle(calls=False)
    assert (world.demands[-1].trajectories, world.demands[-1].tokens) == (10, 100)
    world.manager.abandon(late := WaitTimeoutError("not finished"), "evaluation")
    world.manager.handle_posted()
    assert asked[0].exception(timeout=0) is late
    assert not any(one.done() for one in learnt)
    assert {id: running.aborted for id, running in world.running[0].items()} == {"a": False, "b": False, "e": True}
    world.settle()
    assert [len(one.result(timeout=0).token_ids) for one in learnt] == [5, 5]
    world.now = 4.0
    world.manager.expect_gpu_s(0.0)
    world.settle()
    assert world.demands[-1].trajectories == 6


def test_time_without_devices_does_not_count(world: World) -> None:
    (done,) = world.manager.submit(0, [trajectory("a", 5)])
    world.manager.handle_posted()
    world.now = 1000.0
    assert world.manager.devices_s == 0
    lease = world.grant(0)
    world.settle(calls=False)
    world.now = 1003.0
    assert world.manager.devices_s == 3
    world.take_by_force(lease.bundle or 0)
    world.settle(calls=False)
    world.now = 2000.0
    assert world.manager.devices_s == 3
    ready(world, 0)
    world.settle()
    assert len(done.result(timeout=0).token_ids) == 5


def test_once_closed_nobody_waits_for_a_shrink(world: World) -> None:
    ready(world, 0)
    world.manager.close()
    with pytest.raises(RlixError, match="closed"):
        world.manager.request_shrink([world.held[0]])


def test_nothing_starts_without_weights() -> None:
    bare = World(1)
    bare.grant(0)
    (done,) = bare.manager.submit(0, [trajectory("a", 1)])
    bare.settle()
    assert not bare.calls
    with pytest.raises(RolloutError, match="no weights were published"):
        done.result(timeout=0)
    bare.manager.publish(Weights(0))  # type: ignore[arg-type]
    bare.manager.handle_posted()
    assert [c.method for c in bare.calls] == ["load"]
