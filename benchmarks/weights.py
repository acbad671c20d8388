"""Bytes per second of publishing weights and of pulling them into a model, as a share of a plain memory copy.

    python -m benchmarks.weights [--json]

One Ray actor holds the trainer's weights, another one a replica's, on one node. Three things are timed for a model of
few large tensors and one of many small ones, best of several runs each:

- publish: pack into buckets and put into Ray's object store (`rlix.engine.weights.publication.publish`)
- pull: get the buckets and copy them into the replica's parameters (`rlix.engine.weights.publication.apply`)
- loop: the same by one `ray.put` and one `ray.get` per parameter, which is what buckets are to beat

The memory copy is `destination.copy_(source)` of as many bytes, both touched before, in the process that publishes.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray._private import ray_constants

from rlix.engine.weights import publication
from rlix.engine.weights.publication import PublishedWeights

OBJECT_STORE_BYTES = 1_500_000_000
MODELS = {"few large tensors": (8, 6_250_000), "many small tensors": (8000, 2048)}  # count, float32 elements of each


class Holder:
    """A process with a model's weights."""

    def __init__(self, count: int, size: int, value: float) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.ParameterList(torch.full((size,), value) for _ in range(count))

    def copy_seconds(self, repeat: int) -> float:
        total = sum(p.numel() for p in self.model)
        source, destination = torch.ones(total), torch.zeros(total)
        return best(lambda: destination.copy_(source), repeat)

    def publish(self, version: int) -> tuple[PublishedWeights, float]:
        start = time.perf_counter()
        published = publication.publish(publication.named_weights(self.model).items(), version)
        return published, time.perf_counter() - start

    def pull(self, published: PublishedWeights) -> float:
        start = time.perf_counter()
        publication.apply(self.model, published)
        return time.perf_counter() - start

    def put_each(self) -> tuple[list[Any], float]:
        start = time.perf_counter()
        references = [ray.put(p.detach().numpy()) for p in self.model]
        return references, time.perf_counter() - start

    def get_each(self, references: list[Any]) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            for parameter, reference in zip(self.model, references, strict=True):
                parameter.copy_(torch.from_numpy(ray.get(reference).copy()))
        return time.perf_counter() - start

    def first(self) -> float:
        return float(self.model[0].detach()[0])


def best(action: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(name: str, count: int, size: int, repeat: int) -> dict[str, Any]:
    actor = ray.remote(num_cpus=0)(Holder)
    trainer, replica = actor.remote(count, size, 1.0), actor.remote(count, size, 0.0)
    times: dict[str, list[float]] = {"publish": [], "pull": [], "put_each": [], "get_each": []}
    for version in range(repeat):
        published, seconds = ray.get(trainer.publish.remote(version))
        times["publish"].append(seconds)
        times["pull"].append(ray.get(replica.pull.remote(published)))
        del published
        references, seconds = ray.get(trainer.put_each.remote())
        times["put_each"].append(seconds)
        times["get_each"].append(ray.get(replica.get_each.remote(references)))
        del references
    copy = ray.get(trainer.copy_seconds.remote(repeat))
    assert ray.get(replica.first.remote()) == 1.0
    ray.kill(trainer)
    ray.kill(replica)
    fastest = {key: min(values) for key, values in times.items()}
    nbytes = count * size * 4
    sync, loop = fastest["publish"] + fastest["pull"], fastest["put_each"] + fastest["get_each"]
    return {
        "model": name,
        "tensors": count,
        "bytes": nbytes,
        "copy_bytes_per_s": nbytes / copy,
        "publish_bytes_per_s": nbytes / fastest["publish"],
        "publish_share_of_copy": copy / fastest["publish"],
        "pull_bytes_per_s": nbytes / fastest["pull"],
        "pull_share_of_copy": copy / fastest["pull"],
        "loop_bytes_per_s": nbytes / loop,
        "times_faster_than_loop": loop / sync,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    ray_constants.ENABLE_RAY_CLUSTER = False  # stay on the loopback interface
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )
    try:
        results = [measure(name, count, size, options.repeat) for name, (count, size) in MODELS.items()]
    finally:
        ray.shutdown()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Ray {ray.__version__}"
    if options.json:
        print(json.dumps({"machine": machine, "results": results}, indent=2))
        return
    print(machine)
    print(f"{'model':<20}{'MB':>6}{'copy':>12}{'publish':>20}{'pull':>20}{'loop':>12}{'faster':>9}")
    for r in results:
        publish = f"{r['publish_bytes_per_s'] / 1e9:.2f} GB/s ({r['publish_share_of_copy']:.0%})"
        pull = f"{r['pull_bytes_per_s'] / 1e9:.2f} GB/s ({r['pull_share_of_copy']:.0%})"
        copy, loop = f"{r['copy_bytes_per_s'] / 1e9:.2f} GB/s", f"{r['loop_bytes_per_s'] / 1e9:.2f} GB/s"
        faster = f"{r['times_faster_than_loop']:.1f} x"
        print(f"{r['model']:<20}{r['bytes'] / 1e6:>6.0f}{copy:>12}{publish:>20}{pull:>20}{loop:>12}{faster:>9}")


if __name__ == "__main__":
    main()
