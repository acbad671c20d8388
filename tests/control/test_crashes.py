"""The scheduler and one client end at every event there is: nothing is given twice, kept for ever, or taken from the
innocent, and every wait says what it waits for."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlix.control.gang_queue import Asked
from rlix.control.status import status_of
from rlix.protocol.errors import RlixError
from rlix.protocol.events import Event
from rlix.protocol.messages import Demand, Lease, Process
from rlix.protocol.types import Phase
from rlix.sim.books import Forgetful
from tests.control.world import INFER, TRAIN, World, process

STEPS = 2
AWAY_S = 0.7  # until a scheduler that ended has been started again
END_S = 200.0


class CrashError(Exception):
    """The scheduler's process is gone, wherever it was."""


class CrashingJournal(Forgetful):
    """Ends its scheduler at event number `at`: `written`, or just before that."""

    def __init__(self, at: int, written: bool) -> None:
        self.events: list[tuple[float, Event]] = []
        self.at, self.written = at, written
        self.now: Callable[[], float] = lambda: 1e9

    def append(self, events: Sequence[Event]) -> None:
        for event in events:
            here = len(self.events) == self.at
            if here and not self.written:
                self.at = -1
                raise CrashError
            self.events.append((self.now(), event))
            if here:
                self.at = -1
                raise CrashError


class Client:
    """A program of one process, which takes the locks of what it holds. While nobody answers it asks again."""

    def __init__(self, pool: "Pool", job: str, pid: int) -> None:
        self.pool, self.job, self.process = pool, job, process(pid)
        self.held: dict[int, Lease] = {}
        self.alive, self.done = True, False
        self.later(0.0, self.beat)

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        self.pool.world.clock.call_later(seconds, self._live, call, *args)

    def _live(self, call: Callable[..., object], *args: Any) -> None:
        if self.alive:
            call(*args)

    def say(self, call: Callable[..., Any], *args: Any) -> Any:
        """None while nobody answers."""
        return self.pool.ask(call, *args)

    def beat(self) -> None:
        self.say(lambda core: core.watch.beat(self.job, self.process, frozenset(self.held)))
        self.later(1.0, self.beat)

    def lock(self, lease: Lease) -> None:
        self.held[lease.epoch] = lease
        self.pool.world.machine.lock(lease, self.process)

    def unlock(self, lease: Lease) -> None:
        machine = self.pool.world.machine
        for device in lease.devices:
            if device in machine.locks and self.process in machine.locks[device].processes:
                del machine.locks[device]

    def die(self) -> None:
        self.alive = False
        self.pool.world.machine.unlock(self.process)
        self.pool.world.machine.states_[self.process] = "dead"


class Trainer(Client):
    """So many steps, each with the gang's devices."""

    def __init__(self, pool: "Pool", job: str, pid: int) -> None:
        super().__init__(pool, job, pid)
        self.step = 0
        self.later(0.1 * pid, self.ask)

    def ask(self) -> None:
        key = f"{self.job}-{self.step}"

        def poll(core: Any) -> Any:
            ticket = core.known.gangs.find(self.job, key)
            if ticket is None:
                ticket = core.request(self.job, TRAIN, Phase.ACTOR_TRAINING, Asked(key, self.process))
            core.not_asked(ticket)
            return ticket.outcome

        outcome = self.say(poll)
        assert not isinstance(outcome, RlixError), outcome
        if outcome is None:
            self.later(0.4, self.ask)
            return
        self.lock(outcome)
        self.later(1.3, self.finish, outcome)

    def finish(self, lease: Lease) -> None:
        self.unlock(lease)
        self.give_back(lease)

    def give_back(self, lease: Lease) -> None:
        def release(core: Any) -> bool:
            status = core.state.leases.get(lease.epoch)
            if status is not None:
                core.given_back(status.lease)
            return True

        if not self.say(release):
            self.later(0.4, self.give_back, lease)
            return
        del self.held[lease.epoch]
        self.step += 1
        self.done = self.step == STEPS
        if not self.done:
            self.later(0.5, self.ask)


class Sampler(Client):
    """Rolls out on whatever it is given, until `STEPS` times ten bundle-turns are done."""

    def __init__(self, pool: "Pool", job: str, pid: int) -> None:
        super().__init__(pool, job, pid)
        self.left = STEPS * 10
        self.giving: set[int] = set()
        self.later(0.0, self.poll)

    def poll(self) -> None:
        answer = self.say(self._ask)
        if answer is not None:
            for lease in answer.granted:
                self.lock(lease)
            for lease in answer.taken:
                self.giving.add(lease.epoch)
                self.later(0.3, self.give_back, lease)
            for epoch in answer.lost:
                self.unlock(self.held.pop(epoch))
                self.giving.discard(epoch)
            self.left -= min(self.left, len(self.held) - len(self.giving))
        if not self.left:
            for epoch, lease in list(self.held.items()):
                if epoch not in self.giving:
                    self.giving.add(epoch)
                    self.give_back(lease)
            self.done = not self.held
        self.later(0.25, self.poll)

    def _ask(self, core: Any) -> Any:
        core.report(self.job, INFER.name, Demand(self.left))
        return core.poll(self.job, INFER.name, set(self.held), set(self.giving))

    def give_back(self, lease: Lease) -> None:
        if lease.epoch not in self.held:
            return
        self.unlock(lease)

        def release(core: Any) -> bool:
            status = core.state.leases.get(lease.epoch)
            if status is not None:
                core.given_back(status.lease)
            return True

        if self.say(release):
            del self.held[lease.epoch]
            self.giving.discard(lease.epoch)
        else:
            self.later(0.4, self.give_back, lease)


class Pool:
    """Two trainers and a rollout on four devices; the scheduler ends at one event, and one client with it."""

    def __init__(self, at: int = -1, *, written: bool = True, victim: int | None = None) -> None:
        self.journal = CrashingJournal(-1, written)
        self.world = World(3, journal=self.journal)
        self.journal.now = lambda: 1e9 + self.world.clock.time()
        self.first = len(self.journal.events)
        self.journal.at = at if at < 0 else self.first + at
        self.victim, self.away = victim, False
        self.clients = [Trainer(self, "ft_1", 1), Trainer(self, "ft_2", 2), Sampler(self, "ft_3", 3)]
        self.world.core.start()
        self.dead: set[Process] = set()

    def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.away:
            return None
        try:
            return call(self.world.core, *args)
        except CrashError:
            self.crash()
            return None

    def crash(self) -> None:
        self.away = True
        self.world.core.known.closed = True
        if self.victim is not None:
            client = self.clients[self.victim]
            self.dead.add(client.process)
            client.die()
        self.world.clock.call_later(AWAY_S, self.comes_back)

    def comes_back(self) -> None:
        self.away = False
        self.world.restart(list(self.journal.events))
        self.world.core.start()

    def run(self) -> None:
        clock, steps = self.world.clock, 0
        while clock.time() < END_S and not all(client.done or not client.alive for client in self.clients):
            try:
                clock.step()
            except CrashError:
                self.crash()
            steps += 1
            if not self.away and steps % 10 == 0:
                assert all(w.behind for w in status_of(self.world.core).waiting)
        self.world.run(30.0)


def events_of_a_quiet_run() -> int:
    pool = Pool()
    pool.run()
    return len(pool.journal.events) - pool.first


EVENTS = events_of_a_quiet_run()


@pytest.mark.parametrize("victim", [None, 0, 1, 2])
@pytest.mark.parametrize("written", [True, False])
def test_an_end_at_every_event_leaves_everything_as_it_should_be(written: bool, victim: int | None) -> None:
    assert EVENTS > 25
    for at in range(EVENTS):
        pool = Pool(at, written=written, victim=victim)
        pool.run()
        where = f"event {at}: {pool.journal.events[pool.first + at]}"
        world = pool.world
        assert len(pool.dead) == (victim is not None), where
        assert all(client.done for client in pool.clients if client.alive), where
        assert world.machine.locks == {}, where
        assert set(world.machine.killed) <= pool.dead, where
        assert not world.core.state.leases, where
        assert not world.core.state.requests, where
        assert world.core.known.holds == {}, where
