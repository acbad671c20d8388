"""The bundles of elastic clusters: what a rollout has been told, and what it has to answer in time."""

from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from rlix.control.ports import Timer
from rlix.protocol.messages import Lease, LeaseState, RolloutAnswer
from rlix.protocol.types import Phase

if TYPE_CHECKING:
    from rlix.control.core import Core

_Key = tuple[str, str]  # (pipeline_id, cluster)


class Rollouts:
    """A rollout asks, again and again, what has changed about its bundles, and says which it knows of. Nothing is kept
    of what it was told: a lost answer is given again, and a control plane that was restarted needs to ask nobody.
    """

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._watchers: dict[_Key, list[Callable[[], None]]] = {}
        self._deadlines: dict[int, tuple[float, Timer]] = {}  # by epoch: of noting the bundle, or of giving it back

    def poll(self, pipeline_id: str, cluster: str, held: Set[int], draining: Set[int]) -> RolloutAnswer:
        """What a rollout that knows of the epochs `held`, and is giving back those in `draining`, does not know yet."""
        granted, taken, deadlines, existing = [], [], [], set()
        now = self._core.clock.time()
        for status in self._core.state.leases_of(pipeline_id):
            lease = status.lease
            if lease.cluster != cluster or lease.phase is not Phase.ROLLOUT:
                continue
            if status.state is LeaseState.ACTIVE:
                existing.add(lease.epoch)
                if lease.epoch not in held:
                    granted.append(lease)
                else:
                    self._noted(lease)
            elif status.state is LeaseState.DRAINING:
                existing.add(lease.epoch)
                if lease.epoch not in held:
                    self._core.endings.given_back(lease)  # it never heard of it
                elif lease.epoch not in draining:
                    taken.append(lease)
                    at = self._deadlines.get(lease.epoch)
                    deadlines.append(0.0 if at is None else max(0.0, at[0] - now))
        return RolloutAnswer(tuple(granted), tuple(taken), tuple(deadlines), tuple(sorted(held - existing)))

    def watchers(self, pipeline_id: str, cluster: str) -> list[Callable[[], None]]:
        """What is called, once, when a later `poll` may have something new to say."""
        return self._watchers.setdefault((pipeline_id, cluster), [])

    def granted(self, lease: Lease) -> None:
        """A bundle became active: the rollout has to note it in time."""
        limit_s = self._core.settings.grow_timeout_s
        self._set_deadline(lease, limit_s, f"the job did not take it up within {limit_s:g} s")
        self.wake(lease.pipeline_id, lease.cluster)

    def draining(self, lease: Lease) -> None:
        """A bundle has to be given back in time."""
        limit_s = self._core.settings.shrink_deadline_s
        self._set_deadline(lease, limit_s, f"the job did not give it back within {limit_s:g} s")
        self.wake(lease.pipeline_id, lease.cluster)

    def ended(self, lease: Lease, *, wake: bool = True) -> None:
        """The lease is over, or somebody else ends it. `wake`: it is news to the rollout."""
        self._stop_deadline(lease)
        if wake:
            self.wake(lease.pipeline_id, lease.cluster)

    def recover(self) -> None:
        """After a restart every rollout has its time again."""
        for status in self._core.state.leases.values():
            if status.lease.phase is Phase.ROLLOUT:
                if status.state is LeaseState.ACTIVE:
                    self.granted(status.lease)
                elif status.state is LeaseState.DRAINING and not status.reason:
                    self.draining(status.lease)

    def wake(self, pipeline_id: str, cluster: str) -> None:
        for changed in self._watchers.pop((pipeline_id, cluster), []):
            changed()

    def _noted(self, lease: Lease) -> None:
        if self._stop_deadline(lease):
            self._core.jobs[lease.pipeline_id].succeeded()

    def _stop_deadline(self, lease: Lease) -> bool:
        """Whether there was one."""
        at = self._deadlines.pop(lease.epoch, None)
        if at is not None:
            at[1].cancel()
        return at is not None

    def _set_deadline(self, lease: Lease, limit_s: float, why: str) -> None:
        self._stop_deadline(lease)
        when = self._core.clock.time() + limit_s
        timer = self._core.clock.call_later(limit_s, lambda: self._late(lease, why))
        self._deadlines[lease.epoch] = when, timer

    def _late(self, lease: Lease, why: str) -> None:
        self._deadlines.pop(lease.epoch, None)
        if lease.epoch in self._core.state.leases:
            self._core.endings.take(lease, why)
