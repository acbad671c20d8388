"""Circles of hold and wait, by hand and against what a pool would really do."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlix.protocol.messages import Lease, LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.cycles import find_cycle
from rlix.scheduler.snapshot import GangRequest


def gang(epoch: int, *devices: int, phase: Phase = Phase.ACTOR_TRAINING) -> LeaseStatus:
    return LeaseStatus(Lease(epoch, "ft_1", f"part{epoch}", phase, devices), LeaseState.ACTIVE)


def wants(
    id: int, *devices: int, holding: Sequence[int] = (), others: Sequence[tuple[int, ...]] = (), phase: int = 1
) -> GangRequest:
    return GangRequest(id, "ft_1", f"wants{id}", Phase(phase), devices, tuple(others), holding=tuple(holding))


def found(requests: Sequence[GangRequest], leases: Sequence[LeaseStatus]) -> str:
    return find_cycle({r.id: r for r in requests}, {s.lease.epoch: s for s in leases}, requests[-1].id)


def test_who_waits_for_what_he_holds_is_told() -> None:
    text = found([wants(1, 0, 1, holding=[7])], [gang(7, 1)])
    assert text.startswith("ft_1/wants1 (ACTOR_TRAINING) waits for devices [1] of lease 7, which ft_1/part7 keeps")


def test_two_that_wait_for_each_other_are_both_named() -> None:
    text = found([wants(1, 1, holding=[7]), wants(2, 0, holding=[8])], [gang(7, 0), gang(8, 1)])
    assert "wants2 (ACTOR_TRAINING) waits for devices [0] of lease 7" in text
    assert "wants1 (ACTOR_TRAINING) waits for devices [1] of lease 8" in text


def test_the_queue_is_a_link_too() -> None:
    # 2 may not pass 1, which waits for what 2's caller keeps.
    text = found([wants(1, 0, 1), wants(2, 1, holding=[7])], [gang(7, 0)])
    assert "wants2 (ACTOR_TRAINING) stands in the queue behind ft_1/wants1" in text


def test_no_circle_no_word() -> None:
    assert not found([wants(1, 0)], [gang(7, 0)])  # whoever holds it waits for nothing
    assert not found([wants(1, 1, holding=[7])], [gang(7, 0), gang(8, 1)])
    assert not found([wants(1, 0, holding=[7])], [gang(7, 0, phase=Phase.ROLLOUT)])
    more_urgent = wants(2, 1, holding=[7], phase=0)  # it passes 1
    assert not found([wants(1, 0, 1), more_urgent], [gang(7, 0)])


def test_an_alternative_helps_who_stands_behind_another_and_nobody_else() -> None:
    assert found([wants(1, 0, holding=[7], others=[(2,)])], [gang(7, 0)])
    assert not found([wants(1, 0, 1), wants(2, 1, holding=[7], others=[(2,)])], [gang(7, 0)])


@given(st.data())
def test_a_circle_is_exactly_what_never_resolves(data: st.DataObject) -> None:
    """Let every lease end whose holder does not wait, and grant from the front, until nothing moves any more."""
    devices = list(range(5))
    leases = [gang(n + 1, d) for n, d in enumerate(data.draw(st.lists(st.sampled_from(devices), unique=True)))]
    free_to_hold = [status.lease.epoch for status in leases]
    requests = []
    for number in range(data.draw(st.integers(1, 5))):
        holding = [free_to_hold.pop()] if free_to_hold and data.draw(st.booleans()) else []
        wanted = data.draw(st.lists(st.sampled_from(devices), min_size=1, max_size=3, unique=True))
        requests.append(wants(number + 1, *wanted, holding=holding, phase=data.draw(st.integers(1, 2))))
    if not any(request.holding for request in requests):
        return
    kept = {epoch: request.id for request in requests for epoch in request.holding}
    waiting = sorted(requests, key=lambda request: (request.phase, request.id))
    held = {status.lease.epoch: status.lease.devices[0] for status in leases}
    while True:
        held = {epoch: d for epoch, d in held.items() if kept.get(epoch) in {request.id for request in waiting}}
        claimed: set[int] = set()
        granted = None
        for request in waiting:
            if claimed.isdisjoint(request.devices) and not set(held.values()).intersection(request.devices):
                granted = request
                break
            claimed.update(request.devices)
        if granted is None:
            break
        waiting.remove(granted)
    stuck = {request.id for request in waiting}
    for request in requests:
        text = find_cycle({r.id: r for r in requests}, {s.lease.epoch: s for s in leases}, request.id)
        assert bool(text) == (request.id in stuck)
