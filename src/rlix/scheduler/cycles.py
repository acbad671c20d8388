"""Parts of jobs that wait for each other in a circle: found when the circle closes, not waited out."""

from collections.abc import Iterator, Mapping

from rlix.protocol.messages import Lease, LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.snapshot import GangRequest


def find_cycle(requests: Mapping[int, GangRequest], leases: Mapping[int, LeaseStatus], last: int) -> str:
    """Says how request `last` closes a circle of hold and wait, link by link; "" when it does not.

    A request is granted its devices once every gang there has ended and every request in front of it there has been
    granted. Its alternatives count only while it stands behind another request, as otherwise it may wait at home.
    Whoever made a request keeps the epochs in its `holding` until it is granted. Rollouts give way, so they block
    nobody.
    """
    asked = requests.get(last)
    if asked is None or not any(request.holding for request in requests.values()):
        return ""
    world = _World(requests, leases)
    if last not in world.stuck:
        return ""
    links, request, seen = [], asked, {last}
    while True:
        why, request = next(world.blockers(request, request.devices, world.stuck))
        links.append(why)
        if request.id in seen:
            return "; ".join(links)
        seen.add(request.id)


class _World:
    """`stuck`: the requests that can never be granted, the largest set that only waits for itself."""

    def __init__(self, requests: Mapping[int, GangRequest], leases: Mapping[int, LeaseStatus]) -> None:
        self._requests = sorted(requests.values(), key=lambda request: (request.phase, request.id))
        self._gangs = [
            s.lease for s in leases.values() if s.lease.phase is not Phase.ROLLOUT and s.state is LeaseState.ACTIVE
        ]
        self._kept_by = {epoch: request for request in self._requests for epoch in request.holding}
        self.stuck = set(requests)
        while moving := [r.id for r in self._requests if r.id in self.stuck and self._can_go(r)]:
            self.stuck.difference_update(moving)

    def _can_go(self, request: GangRequest) -> bool:
        free = [next(self.blockers(request, choice, self.stuck), None) is None for choice in request.choices]
        return free[0] or (any(free) and next(self._ahead(request, request.devices, self.stuck), None) is not None)

    def blockers(
        self, request: GangRequest, choice: tuple[int, ...], among: set[int]
    ) -> Iterator[tuple[str, GangRequest]]:
        """Those of the requests `among` which have to be granted before this one can have these devices, and why."""
        wanted = set(choice)
        for lease in self._gangs:
            keeper = self._kept_by.get(lease.epoch)
            if keeper is not None and keeper.id in among and not wanted.isdisjoint(lease.devices):
                yield _held(request, wanted, lease, keeper), keeper
        for other in self._ahead(request, choice, among):
            yield f"{_name(request)} stands in the queue behind {_name(other)}", other

    def _ahead(self, request: GangRequest, choice: tuple[int, ...], among: set[int]) -> Iterator[GangRequest]:
        for other in self._requests:
            if other.id == request.id:
                return  # those after it are behind it
            if other.id in among and not set(choice).isdisjoint(other.devices):
                yield other


def _held(request: GangRequest, wanted: set[int], lease: Lease, keeper: GangRequest) -> str:
    return (
        f"{_name(request)} waits for devices {sorted(wanted.intersection(lease.devices))} of lease {lease.epoch}, "
        f"which {lease.pipeline_id}/{lease.cluster} keeps while it waits for {_name(keeper)}"
    )


def _name(request: GangRequest) -> str:
    return f"{request.pipeline_id}/{request.cluster} ({request.phase.name})"
