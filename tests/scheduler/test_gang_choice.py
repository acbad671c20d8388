"""Where and how wide a gang runs: prices by hand. Loads take 2 s, so a stopped bundle costs 8 GPU-seconds."""

import pytest

from rlix.protocol.events import DevicesReleased, GangRequested, LeaseReleased
from rlix.protocol.messages import Demand, Lease, LeaseState, LeaseStatus, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.image import image
from rlix.scheduler.planner import plan
from rlix.scheduler.policies.rlix import rlix
from rlix.scheduler.snapshot import GangRequest, RolloutState, Snapshot
from rlix.scheduler.state import State
from rlix.scheduler.validate import check
from tests.scheduler.world import INFER, TRAIN, World, devices

HOME, HALF, ALONE = (0, 1, 2, 3), (0, 1), (7,)


def granted(
    work_gpu_s: float,
    jobs: int,
    *,
    gang_at_home: bool = False,
    left_s: float | None = None,
    load_s: float = 2.0,
    move_s: float = 0.0,
) -> tuple[int, ...] | None:
    """On 8 GPUs, all but the last of which rollouts of so many jobs hold; the gang's own job is one more."""
    request = GangRequest(
        1, "me", TRAIN, Phase.ACTOR_TRAINING, HOME, (HALF, ALONE), work_gpu_s=work_gpu_s, move_s=move_s
    )
    leases = [Lease(n + 1, f"p{n % jobs}", INFER, Phase.ROLLOUT, (n,), n) for n in range(7)]
    if gang_at_home:
        leases[0] = Lease(1, "p0", TRAIN, Phase.ACTOR_TRAINING, (0,))
    bundles = tuple((n,) for n in range(8))
    rollouts = tuple(RolloutState(f"p{n}", INFER, bundles, Demand(99, load_s=load_s)) for n in range(jobs))
    statuses = tuple(LeaseStatus(lease, LeaseState.ACTIVE) for lease in leases)
    left = {} if left_s is None else {1: left_s}
    snapshot = Snapshot(devices(8), (request,), rollouts, statuses, gang_left_s=left)
    decided = plan(snapshot, rlix)
    check(snapshot, decided)
    return decided.grants[0].devices if decided.grants else None


@pytest.mark.parametrize(
    ("work_gpu_s", "jobs", "expected"),
    [
        (0.0, 1, HOME),  # length not known: at home
        (400.0, 1, HOME),  # share 4: 4 * 100 + 4 * 8 = 432 against 4 * 200 + 2 * 8, and 4 * 400
        (4.0, 7, ALONE),  # share 1: 1 + 32 against 2 + 16, and 4
        (40.0, 7, HOME),  # 10 + 32 against 20 + 16: 36 is not below 0.85 * 42 = 35.7, nor is 40
        (20.0, 7, ALONE),  # 5 + 32 against 10 + 16, and 20
    ],
)
def test_the_cheapest_choice_is_granted(work_gpu_s: float, jobs: int, expected: tuple[int, ...]) -> None:
    assert granted(work_gpu_s, jobs) == expected


def test_a_gang_waits_at_home_or_runs_on_less_whichever_ends_it_sooner() -> None:
    """Share 1. At home somebody trains: the wait, 40 / 4 and 8 * 3 (three bundles to stop), against 40 alone; HALF is
    not to be had. Where the end is not known, nobody waits for it."""
    assert granted(40.0, 7, gang_at_home=True, left_s=5.0) is None  # 39
    assert granted(40.0, 7, gang_at_home=True, left_s=14.0) == ALONE  # 40 < 0.85 * 48
    assert granted(20.0, 7, gang_at_home=True, left_s=2.5) == ALONE
    assert granted(40.0, 7, gang_at_home=True) == ALONE
    assert granted(0.0, 7, gang_at_home=True) == ALONE


def test_what_a_state_takes_to_other_devices_counts_against_them() -> None:
    """Share 1: at home it waits and runs for 7.5 + 24 = 31.5; alone for 20 and the move, its own and its GPU's."""
    assert granted(20.0, 7, gang_at_home=True, left_s=2.5, move_s=3.0) == ALONE  # 26 < 0.85 * 31.5 = 26.8
    assert granted(20.0, 7, gang_at_home=True, left_s=2.5, move_s=4.0) is None
    assert granted(20.0, 7, move_s=1e9) == HOME


def test_short_phases_of_a_range_do_not_wait_for_a_long_one_of_another_job() -> None:
    """Phases of 3 s beside those of 39 s on half the pool. At the first its end is not known; then 2 s of it are worth
    waiting for: share 4, 4 * 12 / 4 against 0.85 * 4 * (12 / 8 + 2)."""
    world = World(8, rlix)
    world.register("long", [0], [0, 1, 2, 3])
    world.register("b", [0], range(8), alternatives=[(0, 1, 2, 3), (4, 5, 6, 7)])

    def b_is_granted() -> tuple[int, ...] | None:
        world.request("b")
        world.cycle()
        held = [status.lease for status in world.leases(LeaseState.ACTIVE) if status.lease.pipeline_id == "b"]
        return held[0].devices if held else None

    for end in 39.0, 78.0:
        world.request("long")
        world.cycle()
        while world.now < end:
            assert b_is_granted() == (4, 5, 6, 7)
            world.now += 3.0
            world.apply(LeaseReleased(world.leases(LeaseState.ACTIVE)[-1].lease.epoch, ReleaseReason.RELEASED))
        world.release_gangs()
    world.request("long")
    world.cycle()
    world.now = 116.0
    assert b_is_granted() is None
    world.release_gangs()
    world.cycle()
    assert [len(status.lease.devices) for status in world.leases(LeaseState.ACTIVE)] == [8]


def test_where_the_state_lies_is_what_its_client_says() -> None:
    """Whatever the scheduler remembers; and from devices that it may not have it moves in any case."""
    world = World(6)
    world.register("a", [0], [0, 1], alternatives=[(2, 3), (4, 5)])

    def asked(home: tuple[int, ...], move_s: float) -> GangRequest:
        number = world.state.next_request_id
        world.apply(GangRequested(number, "a", TRAIN, Phase.ACTOR_TRAINING, first=home, move_s=move_s))
        again = State()
        for event in image(world.state, world.now):
            again.apply(event, world.now)
        assert again.requests == world.state.requests
        return world.state.requests[number]

    there = asked((4, 5), 3.0)
    assert (there.devices, there.alternatives, there.move_s) == ((4, 5), ((0, 1), (2, 3)), 3.0)
    lost = asked((6, 7), 3.0)
    assert (lost.devices, lost.move_s) == ((0, 1), 0.0)


def test_what_a_gang_takes_is_learnt_without_its_move() -> None:
    world = World(4)
    world.register("a", [0], [0, 1], alternatives=[(2, 3)])
    world.register("b", [0], [0, 1])
    world.request("b")
    world.cycle()
    world.apply(GangRequested(world.state.next_request_id, "a", TRAIN, Phase.ACTOR_TRAINING, first=(0, 1), move_s=4.0))
    world.cycle()
    assert world.state.leases[2].lease.devices == (2, 3)
    world.now = 10.0
    world.release_gangs()
    world.request("a")
    (request,) = world.snapshot().requests
    assert (request.devices, request.work_gpu_s) == ((2, 3), 12.0)


def test_a_job_cannot_make_itself_unstoppable_by_what_it_says_of_its_loads() -> None:
    assert granted(4000.0, 1, load_s=1e9) == granted(4000.0, 1, load_s=60.0) == HOME


def test_the_state_learns_how_long_a_gang_is() -> None:
    world = World(4)
    world.register("a", [0, 1, 2, 3], [0, 1, 2, 3], alternatives=[(0, 1)])
    world.request("a")
    world.cycle()
    world.now = 20.0
    world.apply(DevicesReleased(1, (0, 3)))
    world.now = 40.0
    world.release_gangs()
    world.request("a")
    world.request("a", Phase.OLD_LOG_PROBS)
    assert [request.work_gpu_s for request in world.snapshot().requests] == [120.0, 0.0]


def test_deciding_changes_no_state_and_numbers_grants_from_the_next_epoch() -> None:
    world = World(2)
    world.register("a", [0, 1])
    world.demand("a", 9)
    before = world.snapshot()
    events = decide(before, world.state, rlix)
    assert world.snapshot() == before
    assert [event.lease.epoch for event in events] == [1, 2]  # type: ignore[union-attr]
    assert decide(Snapshot(devices(2)), State(), rlix) == ()
