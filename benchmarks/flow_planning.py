"""How long planning a flow takes: two to five parts, up to 4,096 devices, tables of 12 points, no two states fit.

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


def graph(parts: int) -> Graph:
    components = [component(i) for i in range(parts)]
    return Graph(components, [Edge(f"part{i}", f"part{i + 1}", 0.001, 1e-5) for i in range(parts - 1)])


def timed(parts: int, devices: int) -> tuple[float, Planned]:
    flow, best = graph(parts), float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        planned = make_plan(flow, ITEMS, devices, device_bytes=80e9)
        best = min(best, time.process_time() - started)
    return best, planned


def main() -> None:
    print("| parts | devices | seconds of CPU | plan |\n|---|---|---|---|")
    for parts, devices in ((2, 1024), (3, 64), (3, 1024), (3, 4096), (4, 1024), (5, 1024)):
        seconds, planned = timed(parts, devices)
        print(f"| {parts} | {devices:,} | {seconds:.3f} | {planned.best.mode}, {planned.best.seconds:.1f} s a step |")


if __name__ == "__main__":
    main()
