"""What a flow's job holds of the pool during a step: the devices of the segment that runs, and no others."""

import contextlib
from collections.abc import Sequence
from typing import Self

from rlix.control.client import JobClient
from rlix.protocol.errors import StaleEpochError
from rlix.protocol.messages import Fence, Lease
from rlix.protocol.types import Phase


class StepLease:
    """Between two segments others have their turn. A context manager; what it holds at the end it gives back.

    That costs a round trip between two segments and no load: a part belongs to one segment, and leaves after it anyway.
    """

    def __init__(self, client: JobClient, cluster: str) -> None:
        self._client, self._cluster = client, cluster
        self._held: tuple[Lease, ...] = ()

    def change(self, devices: Sequence[int]) -> Fence | None:
        """Give back what is held, on which there is no byte any more, and wait for these devices, as long as it takes.

        Raises what `JobClient.acquire` raises.
        """
        if not devices:
            self._end()
            return None
        lease = self._client.acquire(self._cluster, Phase.ACTOR_TRAINING, devices=devices, giving=self._held)
        self._held = (lease,)
        return self._client.fence(lease)

    def _end(self) -> None:
        held, self._held = self._held, ()
        if held:
            self._client.release(*held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the lease may be gone, because the job was ended or it was given back already.
        with contextlib.suppress(*([] if kind is None else [StaleEpochError])):
            self._end()
