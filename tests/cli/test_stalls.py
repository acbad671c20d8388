from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rlix.cli.stalls import Stalls
from rlix.monitor.waits import waits
from rlix.protocol.messages import Cluster, ControlStatus, Demand, LeaseState, LeaseStatus, PipelineStatus, Waiting
from rlix.protocol.types import Phase
from tests.cli.fakes import control, job_status, lease

TRAIN = Cluster("actor_train", 2, (0, 1))
INFER = Cluster("actor_infer", 1, (0, 1, 2, 3), elastic=True)
SORT, COPY = job_status("sort", "ft_1"), job_status("copy", "ft_2")
CALLED = {"ft_1": "sort", "ft_2": "copy"}


def pipeline(
    name: str, *waiting: str, clusters: tuple[Cluster, ...] = (TRAIN, INFER), demand: int = 0
) -> PipelineStatus:
    return PipelineStatus(name, clusters, waiting, Demand(demand))


def pool(*pipelines: PipelineStatus, leases: tuple[LeaseStatus, ...] = ()) -> ControlStatus:
    return replace(control(*leases), pipelines=pipelines)


def test_who_waits_for_what_and_on_whom() -> None:
    status = pool(
        pipeline("ft_1", "actor_train"),
        pipeline("ft_2", "actor_train"),
        leases=(
            lease(1, "ft_2", (0,), LeaseState.DRAINING),
            lease(2, "ft_3", (1, 2), phase=Phase.CRITIC_TRAINING),
            lease(3, "ft_2", (3,)),
        ),
    )
    first, second = waits(status, CALLED)
    assert first.sentence("0:01:10") == (
        "sort waits since 0:01:10 for devices 0–1 (actor train): copy holds 0 for rollout, giving way; "
        "ft_3 holds 1 for critic training; copy waits for 0–1, too"
    )
    assert second.sentence().startswith("copy waits for devices 0–1 (actor train): ")
    asked = Waiting("ft_1", "actor_train", Phase.ACTOR_TRAINING, 1e9, "", ((1,),))  # a part of its devices
    first, _ = waits(replace(status, waiting=(asked,)), CALLED)
    held, rival = "sort waits for devices 1 (actor train): ft_3 holds 1 for critic training", "copy waits for 0–1, too"
    assert first.sentence() == f"{held}; {rival}"
    others = [Waiting("ft_2", "actor_train", Phase.ACTOR_TRAINING, 1e9, "", c) for c in (((0,),), ((1,), (0,)))]
    elsewhere, perhaps_there = (waits(replace(status, waiting=(asked, other)), CALLED)[0] for other in others)
    assert elsewhere.sentence() == held
    assert perhaps_there.sentence() == f"{held}; copy waits for 1, too"


def test_a_wait_says_since_when_the_control_plane_knows_of_it() -> None:
    asked = Waiting("ft_1", "actor_train", Phase.ACTOR_TRAINING, 1e9, "")
    status = replace(pool(pipeline("ft_1", "actor_train"), pipeline("ft_2", demand=5)), waiting=(asked,))
    assert [wait.since for wait in waits(status, CALLED)] == [1e9, None]


def test_its_own_rollout_may_be_in_the_way_but_not_the_lease_it_is_about_to_get() -> None:
    own = LeaseStatus(replace(lease(1, "ft_1", (0, 1)).lease, cluster="actor_train"), LeaseState.PENDING)
    status = pool(pipeline("ft_1", "actor_train"), leases=(own, lease(2, "ft_1", (1,), LeaseState.DRAINING)))
    (wait,) = waits(status, CALLED)
    assert wait.reasons == ("sort itself holds 1 for rollout, giving way",)


def test_a_rollout_without_any_device_waits() -> None:
    holder = lease(1, "ft_2", (0, 1, 2, 3), phase=Phase.ACTOR_TRAINING)
    (wait,) = waits(pool(pipeline("ft_1", demand=5), leases=(holder,)), CALLED)
    assert wait.sentence() == (
        "sort waits for a rollout device out of 0–3 (actor infer): copy holds 0–3 for actor training"
    )
    assert waits(pool(pipeline("ft_1", demand=0)), CALLED) == ()
    assert waits(pool(pipeline("ft_1", demand=5), leases=(lease(1, "ft_1", (3,)),)), CALLED) == ()


def test_nobody_in_the_way_is_said_too() -> None:
    (wait,) = waits(pool(pipeline("ft_1", "actor_train")), CALLED)
    assert wait.reasons == ("nobody holds them: the scheduler has not come to it",)


def test_that_its_hosts_are_drained_is_said_with_what_brings_them_back() -> None:
    drained = {"draining": {"node": "node3"}, "cordoned": frozenset({"node"})}
    back = "host node3 is cordoned: `rlix uncordon node3` brings it back"
    left = replace(pool(pipeline("ft_1", demand=5), pipeline("ft_2", "actor_train")), devices=(), **drained)
    assert [wait.reasons[-1] for wait in waits(left, CALLED)] == [back, back]
    elsewhere = replace(left, draining={"other": "node3"}, devices=control().devices)
    assert [back in wait.reasons for wait in waits(elsewhere, CALLED)] == [False, False]
    held = replace(left, devices=control().devices[:1], leases=(lease(1, "ft_2", (0,)),))
    assert waits(held, CALLED)[0].reasons == ("copy holds 0 for rollout", "copy waits for 0–1, too", back)
    assert replace(left, cordoned=frozenset()).drained == "host node3 lends no devices: Ray drains it"


def test_a_rollout_that_does_not_take_up_what_it_is_granted_is_said() -> None:
    deaf = replace(pipeline("ft_1", demand=5), deaf=("actor_infer",))
    said = "it did not take up what it was granted, and has not asked for news of its rollout since"
    assert [wait.reasons for wait in waits(pool(deaf), CALLED)] == [(said,)]


def test_only_long_waits_are_mentioned_with_the_time_at_which_they_began() -> None:
    stalls, waiting, fine = Stalls(after_s=30.0), pool(pipeline("ft_1", "actor_train")), pool(pipeline("ft_1"))
    assert stalls.sentences(fine, [SORT], 0.0) == ()
    assert stalls.sentences(waiting, [SORT], 10.0) == ()
    assert stalls.sentences(waiting, [SORT], 39.9) == ()
    (sentence,) = stalls.sentences(waiting, [SORT], 40.0)
    assert sentence.startswith("sort waits since 0:00:10 for devices 0–1")
    assert stalls.sentences(waiting, [SORT], 900.0) == (sentence,)
    assert stalls.sentences(fine, [SORT], 901.0) == ()
    assert stalls.sentences(waiting, [SORT], 902.0) == ()  # another wait


@given(st.lists(st.booleans(), max_size=40))
def test_a_wait_is_mentioned_exactly_while_it_has_lasted_long_enough(looks: list[bool]) -> None:
    stalls, lasted = Stalls(after_s=3.0), -1
    for now, waits_now in enumerate(looks):
        lasted = lasted + 1 if waits_now else -1
        said = stalls.sentences(pool(pipeline("ft_1", *["actor_train"] * waits_now)), [SORT], float(now))
        assert bool(said) == (lasted >= 3)
