"""A message from one worker to another on one node, against a plain copy and Ray's object store.

    python -m benchmarks.messages [--megabytes 0.01 1 16 128] [--repeats 10]

One worker sends an array to another, which answers with a word: half of a round trip less the half of one with a word
only would be the way there, so what is shown is the whole round trip, the same for all three. `copy` is that of the
array within one process; `object store` is `ray.put` there and `ray.get` of the reference here. Medians, with
the seconds of CPU that both workers spent (what the raylet does is in no row).
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import ray

import rlix
from rlix.flow.workers.group import WorkerGroup
from rlix.flow.workers.worker import Worker
from rlix.protocol.messages import Device, DeviceKind


class End(Worker):
    def made(self, nbytes: int) -> None:
        self.array = np.ones(nbytes // 8)

    def send_and_wait(self, other: str, repeats: int) -> list[float]:
        def once() -> None:
            self.send(self.array, other)
            self.recv(other)

        return self._times(once, repeats)

    def answer(self, other: str, repeats: int) -> float:
        begun = time.process_time()
        for _ in range(repeats):
            assert self.recv(other)[-1] == 1.0  # the last byte is there
            self.send("got it", other)
        return time.process_time() - begun

    def put_and_wait(self, other: Any, repeats: int) -> list[float]:
        return self._times(lambda: ray.get(other.take.remote([ray.put(self.array)])), repeats)

    def take(self, refs: list[Any]) -> str:
        assert ray.get(refs[0])[-1] == 1.0
        return "got it"

    def copy(self, repeats: int) -> list[float]:
        return self._times(self.array.copy, repeats)

    def cpu_s(self) -> float:
        return time.process_time()

    def _times(self, once: Callable[[], object], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            once()
            times.append(time.perf_counter() - begun)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0.01, 1, 16, 128])
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rlix.init(virtual_gpus=2)
    node = ray.get_runtime_context().get_node_id()
    places = [(Device(i, node, "127.0.0.1", i, DeviceKind.CPU),) for i in range(2)]
    with WorkerGroup(End, name="ends", placements=places) as ends:

        def run(method: str, *given: Any) -> tuple[float, float]:
            def spent() -> float:
                return float(sum(ends.run("cpu_s", timeout_s=60)))

            before = spent()
            (times,) = ends.run(method, *given, ranks=[0], timeout_s=600)
            return median(times[1:]), (spent() - before) / args.repeats

        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; milliseconds, of CPU in brackets")
        print("| MB | message | object store | copy |\n|--:|--:|--:|--:|")
        for megabytes in args.megabytes:
            ends.run("made", int(megabytes * 1e6) // 8 * 8, timeout_s=60)
            answering = ends.call("answer", "ends:0", args.repeats, ranks=[1])
            rows = [run("send_and_wait", "ends:1", args.repeats)]
            ends.results("answer", answering, timeout_s=60, ranks=[1])
            rows += [run("put_and_wait", ends.handles[1], args.repeats), run("copy", args.repeats)]
            print(
                f"| {megabytes:g} | {' | '.join(f'{1e3 * s:.2f} ({1e3 * cpu:.2f})' for s, cpu in rows)} |", flush=True
            )
    rlix.shutdown()


if __name__ == "__main__":
    main()
