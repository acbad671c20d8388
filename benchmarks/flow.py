"""Flows on devices of declared cost: predicted against measured step times of every mode, and what planning is worth.

    python -m benchmarks.flow [hybrid|scales|switches|reasoning|agentic ...] [--steps N]

`reasoning` (answers of lognormal lengths that stream on to be scored) and `agentic` (a policy that waits for tools,
eight times a step) also run in plain Ray: all devices for each part in turn, items to whoever is free, and a circle in
two halves.

A device that declares its cost sleeps until its deadline, with the collective of its ranks inside, so that four of them
keep time on any machine. Parts are profiled on 1, 2 and 4 ranks and on some batch sizes; plans use others too. Profiles
are kept in RLIX_HOME.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from statistics import median
from typing import Any

import ray
from ray.util import ActorPool

import rlix
from rlix.control.settings import Settings
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Mode
from rlix.flow.profiler.measure import Grid, profile
from rlix.flow.profiler.profile import Profile, path_of
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Circle, Part
from rlix.protocol.messages import Device, DeviceKind

DEVICES, ITEMS = 4, 32
GRID = Grid(widths=(1, 2, 4), batches=(1, 4, 12, 32), repeats=2)
ROUNDS, SEED = 8, 0
BY_HAND = ("reasoning", "agentic")


class Declared(FlowWorker):
    """Costs `fixed` seconds a call and `each` an item, which is how many it counts as, and `switch` to come or go; its
    state takes `held` bytes. `alone`: its ranks do not meet.
    """

    def __init__(self, fixed: float, each: float, switch: float = 0.0, held: float = 0.0, alone: bool = False) -> None:
        self.fixed, self.each, self.switch, self.held = fixed, each, switch, held
        self.alone = alone or self.ctx.world_size == 1
        if not self.alone:
            self.ctx.init_process_group()

    def run(self, items: list[Any]) -> list[Any]:
        import torch
        import torch.distributed as dist

        deadline = time.monotonic() + self.fixed + self.each * sum(items)
        if not self.alone:
            dist.all_reduce(torch.ones(1))
        time.sleep(max(0.0, deadline - time.monotonic()))
        return items

    def onload(self) -> None:
        time.sleep(self.switch)

    def offload(self) -> None:
        time.sleep(self.switch)

    def memory(self) -> tuple[float, float]:
        return self.held, self.held


def part(name: str, after: tuple[str, ...], most: int | None = None, **costs: float) -> Part:
    return Part(name, Declared, "run", after, costs, most=most)


def alone(name: str, fixed: float, item_s: float, **how: Any) -> Part:
    return Part(name, Declared, kwargs={"fixed": fixed, "each": item_s, "alone": True}, **how)


def lengths(count: int) -> list[float]:
    """Of answers, whose mean is about 1: the longest of 32 is 5 times as long."""
    random = Random(SEED)
    return [min(5.0, random.lognormvariate(-0.72, 1.2)) for _ in range(count)]


def flow(name: str) -> tuple[Flow, float]:
    """A flow, and the bytes of a device."""
    parts = {
        # One slow rank, work for many, and a step that is bad at small batches: a hybrid is right.
        "hybrid": [
            part("generate", (), most=1, fixed=0.04, each=0.08),
            part("score", ("generate",), fixed=0.02, each=0.2),
            part("train", ("score",), fixed=0.6, each=0.1),
        ],
        # Everything scales and fits: in turn on all devices.
        "scales": [
            part("generate", (), fixed=0.12, each=0.1),
            part("score", ("generate",), fixed=0.12, each=0.05),
            part("train", ("score",), fixed=0.12, each=0.1),
        ],
        # Only one state fits on a device, and switching costs: each on devices of its own.
        "switches": [
            part("generate", (), fixed=0.03, each=0.1, switch=0.6, held=60.0),
            part("score", ("generate",), fixed=0.03, each=0.1, switch=0.6, held=60.0),
            part("train", ("score",), fixed=0.03, each=0.2, switch=0.6, held=60.0),
        ],
        # Long answers hold generation open: whoever scores takes what is there.
        "reasoning": [
            alone("generate", 0.02, 0.3, each=1),
            alone("score", 0.02, 0.1, each=1),
            alone("train", 0.3, 0.05, chunk=None),
        ],
        # Tools keep the policy waiting: another part of the batch goes on meanwhile.
        "agentic": [
            alone("act", 0.02, 0.04),
            alone("tools", 0.2, 0.0, cpu_ranks=2),
            alone("train", 0.3, 0.1, chunk=None),
        ],
    }[name]
    circles = [Circle(("act", "tools"), ROUNDS)] if name == "agentic" else []
    return Flow(name, parts, ITEMS, lengths if name == "reasoning" else lambda count: [1.0] * count, circles), 80.0


def plain_ray(name: str) -> Callable[[list[Any]], list[Any]]:
    """A step as one writes it by hand, with an actor for each part on each device."""
    actor = ray.remote(num_cpus=0)(Declared)
    ranks = {p.name: [actor.remote(**p.kwargs) for _ in range(p.cpu_ranks or DEVICES)] for p in flow(name)[0].parts}

    def call(part: str, items: list[Any]) -> list[Any]:
        calls = [rank.run.remote(items[i :: len(ranks[part])]) for i, rank in enumerate(ranks[part])]
        return [item for made in ray.get(calls) for item in made]

    def streamed(part: str, items: list[Any]) -> list[Any]:
        made = ActorPool(ranks[part]).map_unordered(lambda rank, item: rank.run.remote([item]), items)
        return [item for each in made for item in each]

    def rounds(items: list[Any]) -> list[Any]:
        for _ in range(ROUNDS):
            items = call("tools", call("act", items))
        return items

    def step(items: list[Any]) -> list[Any]:
        if name == "reasoning":
            return call("train", streamed("score", streamed("generate", items)))
        with ThreadPoolExecutor(2) as threads:
            return call("train", [item for half in threads.map(rounds, (items[::2], items[1::2])) for item in half])

    return step


def measure(name: str, steps: int) -> None:
    this, room = flow(name)
    devices = [Device(i, _node(), "127.0.0.1", i, DeviceKind.CPU, f"flow-{i}") for i in range(DEVICES)]
    path = path_of(Settings.from_env().home, f"benchmark-{name}")
    if not path.exists():
        profile(this, devices, GRID).write(path)
    known = Profile.read(path)
    print(known.describe(), flush=True)
    best = this.plan(known, DEVICES, device_bytes=room)
    plans = [plan for mode in Mode if (plan := best.of(mode)) is not None]
    times: dict[Mode, float] = {}
    items = list(this.sample(ITEMS))
    with Running(this, devices, plan=plans[0]) as running:
        for plan in plans:
            if plan is not running.plan:
                running.switch(plan)
            for _ in range(steps + 1):
                assert sorted(running.step(items)) == sorted(items)
            times[plan.mode] = measured = median(running.step_s[-steps:])
            off, chosen = measured / plan.seconds - 1, "planned" if plan is best.best else ""
            row = [name, str(plan.mode), chosen, plan.shape, f"{plan.seconds:.2f}", f"{measured:.2f}", f"{off:+.1%}"]
            print(f"| {' | '.join(row)} |", flush=True)
    if name in BY_HAND:
        step = plain_ray(name)
        step(items)
        began = time.monotonic()
        for _ in range(steps):
            assert sorted(step(items)) == sorted(items)
        taken = (time.monotonic() - began) / steps
        print(f"| {name} | plain Ray | | | | {taken:.2f} | |")
        print(f"{name}: plain Ray takes {taken / times[best.best.mode]:.2f} times as long", flush=True)
    others = [seconds for mode, seconds in times.items() if mode is not best.best.mode]
    print(f"{name}: the best other mode takes {min(others) / times[best.best.mode]:.2f} times as long", flush=True)


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["hybrid", "scales", "switches", *BY_HAND])
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    rlix.init(virtual_gpus=DEVICES)
    print("| workload | mode | | plan | predicted s | measured s | off |\n|---|---|---|---|---|---|---|")
    for name in args.workloads:
        measure(name, args.steps)


if __name__ == "__main__":
    main()
