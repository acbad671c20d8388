"""A job's worker on a node of its own."""

from pathlib import Path

from rlix.control.client import JobClient
from rlix.node.device_lock import DeviceLocks
from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase


class NodeJob:
    """Ray actor that holds a gang, with its locks."""

    def __init__(self, pipeline_id: str) -> None:
        self._client = JobClient(pipeline_id)

    def hold(self, cluster: str, locks: str) -> Lease:
        lease = self._client.acquire(cluster, Phase.ACTOR_TRAINING, 30)
        devices = self._client.devices()
        self._locks = DeviceLocks([devices[d].key for d in lease.devices], Path(locks))
        self._locks.acquire(self._client.fence(lease), 10)
        return lease
