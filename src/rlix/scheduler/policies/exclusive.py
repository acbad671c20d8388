"""Jobs one after another, each on the whole pool."""

from rlix.protocol.messages import Registration
from rlix.scheduler.policies.static import Fill, PoolShape, first_free


class Exclusive(Fill):
    def part(self, registration: Registration, pool: PoolShape) -> tuple[int, ...] | None:
        return first_free(pool.gpus, pool.gpus, pool)


exclusive = Exclusive()
