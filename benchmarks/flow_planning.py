"""How long planning a flow takes: two to eight parts, up to 4,096 devices, tables of 12 points, no two states fit.

Parts follow each other, or all the others come after the first (a fan).

python -m benchmarks.flow_planning
"""

import time

from rlix.flow.planner import Component, Edge, Graph, Planned, Point, Table, make_plan

REPEATS = 5
ITEMS = 4096


def component(index: int) -> Component:
    """Each part scales a little worse than the one before it."""
    points = [
        Point(width, load * width, (0.2 + 0.01 * load * (1 + index / 2)) * width ** (0.1 * index), 60e9, 40e9)
        for width in (1, 4, 16)
        for load in (1, 8, 64, 512)
    ]
    return Component(f"part{index}", Table(points), load_s=2.0, offload_s=1.0)


def graph(parts: int, fan: bool) -> Graph:
    components = [component(i) for i in range(parts)]
    return Graph(components, [Edge(f"part{0 if fan else i - 1}", f"part{i}", 0.001, 1e-5) for i in range(1, parts)])


def timed(parts: int, devices: int, fan: bool) -> tuple[float, Planned]:
    flow, best = graph(parts, fan), float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        planned = make_plan(flow, ITEMS, devices, device_bytes=80e9)
        best = min(best, time.process_time() - started)
    return best, planned


def main() -> None:
    print("| parts | devices | seconds of CPU | plan |\n|---|---|---|---|")
    chains = ((2, 1024), (3, 64), (3, 1024), (3, 4096), (4, 1024), (5, 1024), (8, 16))
    for parts, devices, fan in (*((parts, devices, False) for parts, devices in chains), (8, 16, True)):
        seconds, planned = timed(parts, devices, fan)
        many, best = f"{parts} (a fan)" if fan else str(parts), planned.best
        print(f"| {many} | {devices:,} | {seconds:.3f} | {best.mode}, {best.seconds:.1f} s a step |")


if __name__ == "__main__":
    main()
