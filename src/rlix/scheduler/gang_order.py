"""In which order gangs are served: by phase, but for those that have waited too long."""

from rlix.scheduler.snapshot import GANG_PATIENCE_S, GangRequest, Snapshot

_Place = tuple[int, float, int]


def gang_order(snapshot: Snapshot) -> list[GangRequest]:
    """Strict priority by phase, then arrival, while nobody has waited for `GANG_PATIENCE_S`.

    Else first the requests of callers that hold other leases meanwhile, for whose end others wait: behind anybody who
    was put forward they could wait for each other for ever. Then who has waited for twice that time, by arrival, so
    that only who asked before can be ahead for longer; then who has waited for that time, the job that was given
    least first; then the others.
    """
    now = snapshot.now
    if all(now - request.asked_at < GANG_PATIENCE_S for request in snapshot.requests):
        return sorted(snapshot.requests, key=lambda r: (r.phase, r.id))

    def place(request: GangRequest) -> _Place:
        if request.holding:
            return 0, request.phase, request.id
        if now - request.asked_at >= 2 * GANG_PATIENCE_S:
            return 1, 0.0, request.id
        if now - request.asked_at >= GANG_PATIENCE_S:
            return 2, snapshot.given_gpu_s.get(request.pipeline_id, 0.0), request.id
        return 3, request.phase, request.id

    return sorted(snapshot.requests, key=place)
