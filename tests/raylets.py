"""A cluster of two raylets of this machine, each with a store of objects of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster


@contextmanager
def two_raylets(gpus: int) -> Iterator[str]:
    """The cluster's address. `gpus`: virtual ones, of each; Ray and the cluster are shut down at the end."""
    each = {"num_cpus": 8, "num_gpus": gpus, "resources": {"rlix_virtual": 1}, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **each})
    cluster.add_node(**each)
    cluster.wait_for_nodes()
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
