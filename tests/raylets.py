"""A cluster of two raylets of this machine, each with a store of objects of its own."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.waiting import HANG_S

START_TRIES = 3
T = TypeVar("T")


def started(start: Callable[[], T]) -> T:
    """What `start` starts of Ray, which gives its own processes half a minute: on busy cores that may take a second
    try. What one that failed has left is ended."""
    before = set(psutil.Process().children(recursive=True))
    for tries_left in reversed(range(START_TRIES)):
        try:
            return start()
        except Exception as error:  # Ray raises plain ones
            left = set(psutil.Process().children(recursive=True)) - before
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=HANG_S)
            if not tries_left:
                raise
            logging.getLogger(__name__).warning("Ray did not start, and is tried again: %s", error)
    raise AssertionError


@contextmanager
def two_raylets(gpus: int) -> Iterator[str]:
    """The cluster's address. `gpus`: virtual ones, of each; Ray and the cluster are shut down at the end."""
    each = {"num_cpus": 8, "num_gpus": gpus, "resources": {"rlix_virtual": 1}, "object_store_memory": 100_000_000}
    head = {"include_dashboard": False, **each}
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        started(lambda: cluster.add_node(**each))
        cluster.wait_for_nodes(timeout=HANG_S)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
