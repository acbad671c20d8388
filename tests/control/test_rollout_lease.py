"""A rollout's lease against a control plane made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control.rollout_lease import LOCK_TIMEOUT_S, Granted, RolloutLease, Taken
from rlix.protocol.errors import DeviceBusyError, RlixError
from rlix.protocol.messages import Demand, Lease, LeaseState, LeaseStatus, RolloutAnswer
from rlix.protocol.types import Phase


def bundle(epoch: int) -> Lease:
    return Lease(epoch, "ft_1", "infer", Phase.ROLLOUT, (epoch,), epoch)


class Client:
    """Holds what the control plane would: leases by epoch, of which some are pending until somebody polls."""

    def __init__(self, *states: LeaseState) -> None:
        self.state = dict(enumerate(states, 1))
        self.demand = -1
        self.noted: set[int] = set()
        self.heartbeat = SimpleNamespace(holds=lambda _: None, gave_back=lambda _: None)

    def report_demand(self, _cluster: str, demand: Demand | int) -> None:
        assert isinstance(demand, int)
        self.demand = demand

    def poll_rollout(
        self, _cluster: str, held: tuple[int, ...], draining: tuple[int, ...], _wait_s: float
    ) -> RolloutAnswer:
        granted, taken = [], []
        self.noted |= set(held)
        for epoch, state in list(self.state.items()):
            if state is LeaseState.PENDING:
                self.state[epoch] = LeaseState.ACTIVE  # its devices are free now: it is told at the next poll
            elif state is LeaseState.ACTIVE and epoch not in held:
                granted.append(bundle(epoch))
            elif state is LeaseState.DRAINING and epoch not in held:
                del self.state[epoch]
            elif state is LeaseState.DRAINING and epoch not in draining:
                taken.append(bundle(epoch))
        return RolloutAnswer(tuple(granted), tuple(taken), (30.0,) * len(taken))

    def release(self, *leases: Lease) -> None:
        for lease in leases:
            del self.state[lease.epoch]

    def leases(self) -> tuple[LeaseStatus, ...]:
        return tuple(LeaseStatus(bundle(epoch), state) for epoch, state in self.state.items())


class Locks:
    """Bundles whose devices a stranger locks cannot be locked; nobody waits for them before they are noted."""

    def __init__(self, client: Client, *strangers: int) -> None:
        self._client = client
        self.strangers = set(strangers)
        self.held: set[int] = set()

    def take(self, lease: Lease, timeout_s: float) -> None:
        assert timeout_s == 0
        assert lease.epoch in self._client.noted
        if lease.epoch in self.strangers:
            raise DeviceBusyError(f"device {lease.epoch} is in use by a stranger")
        self.held.add(lease.epoch)

    def drop(self, lease: Lease) -> None:
        self.held.discard(lease.epoch)


def lease_of(client: Client, locks: Locks | None = None, now: list[float] | None = None) -> RolloutLease:
    made: Any = client
    return RolloutLease(made, "infer", locks, clock=lambda: now[0] if now else 0.0)


def test_what_was_granted_or_is_on_its_way_at_the_end_is_given_back_too() -> None:
    client = Client(LeaseState.ACTIVE)
    with lease_of(client) as rollout:
        assert rollout.poll() == [Granted(bundle(1))]
        client.state |= {2: LeaseState.ACTIVE, 3: LeaseState.PENDING, 4: LeaseState.DRAINING}
    assert client.state == {}
    assert client.demand == 0


def test_the_end_does_not_wait_for_a_quarantine() -> None:
    client = Client(LeaseState.QUARANTINED, LeaseState.ACTIVE)
    with lease_of(client) as rollout:
        rollout.poll()
    assert client.state == {1: LeaseState.QUARANTINED}


def test_a_bundle_is_asked_back_once_and_no_longer_offered() -> None:
    client = Client(LeaseState.ACTIVE)
    rollout = lease_of(client)
    rollout.poll()
    client.state[1] = LeaseState.DRAINING
    assert rollout.poll() == [Taken(bundle(1), 30.0)]
    assert rollout.poll() == []
    assert rollout.leases == ()
    rollout.give_back(bundle(1))
    assert client.state == {}


def test_nothing_is_asked_for_after_the_end() -> None:
    client = Client(LeaseState.ACTIVE)
    with lease_of(client) as rollout:
        rollout.poll()
    for call in (lambda: rollout.report(3), rollout.poll):
        with pytest.raises(RlixError, match="this rollout of infer has ended"):
            call()
    assert (client.demand, list(rollout.changes())) == (0, [])


def test_a_strangers_lock_is_an_error_and_costs_nothing_else() -> None:
    client, now = Client(*[LeaseState.ACTIVE] * 3), [0.0]
    locks = Locks(client, 1, 2)
    rollout = lease_of(client, locks, now)
    assert rollout.poll() == [Granted(bundle(3))]
    assert rollout.leases == (bundle(3),)
    client.state[3] = LeaseState.DRAINING  # while others' locks are waited for
    assert rollout.poll() == [Taken(bundle(3), 30.0)]
    rollout.give_back(bundle(3))
    now[0] = LOCK_TIMEOUT_S
    locks.strangers = {2}
    client.state[4] = LeaseState.ACTIVE
    with pytest.raises(DeviceBusyError, match="device 2 is in use by a stranger"):
        rollout.poll()
    assert set(client.state) == {1, 4}
    assert rollout.poll() == [Granted(bundle(1)), Granted(bundle(4))]
    assert locks.held == {1, 4}


def test_a_bundle_that_is_asked_back_before_its_lock_is_had_just_goes() -> None:
    client = Client(LeaseState.ACTIVE, LeaseState.ACTIVE)
    rollout = lease_of(client, Locks(client, 1, 2))
    assert rollout.poll() == []
    client.state[1] = LeaseState.DRAINING
    assert rollout.poll() == []
    assert client.state == {2: LeaseState.ACTIVE}
    rollout.__exit__(None, None, None)
    assert client.state == {}
