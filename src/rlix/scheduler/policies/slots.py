"""Fixed parts as large as the job's largest gang; jobs queue for a part, first come, first served."""

from rlix.protocol.messages import Registration
from rlix.scheduler.policies.static import Fill, PoolShape, bundle_size, first_free


class Slots(Fill):
    def part(self, registration: Registration, pool: PoolShape) -> tuple[int, ...] | None:
        bundle = bundle_size(registration)
        gang = max(len(c.devices) for c in registration.clusters if not c.elastic)
        size = min(pool.gpus, -(-gang // bundle) * bundle)
        return first_free(size, size, pool)


slots = Slots()
