"""Inject faults into a pool of working jobs, and see whether anything was granted twice, leaked, lost or doubled.

    PYTHONPATH=src python -m benchmarks.faults [--count 200] [--seed 0] [--json FILE] [--only WORD] [--no-training]
        [--pairs] [--minutes M] [--hosts]

    PYTHONPATH=src python -m benchmarks.faults --virtual 1000 [--seed 0] [--only WORD]

With `--hosts` the pool is three hosts (network namespaces: that takes root, iproute2 and nftables), and of every two
faults one is a host's, or the network's.

The second form lives so many lives of a pool on a virtual clock, in each of which two or three faults overlap.

Light jobs (programs with workers that hold device locks) take most of the faults; a tenth go to two real training
jobs, whose metrics must equal those of a run without faults. Exit status 1 when a goal is missed.
"""

import argparse
import json
import logging
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import ray

from benchmarks.faults import cluster, injectors, network, training
from benchmarks.faults.calls import WRONG, harm_of, wrong_call
from benchmarks.faults.campaign import RECOVERY_S, Campaign, Waits, until
from benchmarks.faults.light import JOBS, LightJobs, work_of
from benchmarks.faults.network import HOSTS, jobs_on
from benchmarks.faults.on_host import OVER, jobs_of
from benchmarks.faults.pool import Pool, actor
from benchmarks.faults.table import Fault, table
from benchmarks.faults.virtual.campaign import campaign as virtual
from benchmarks.faults.watcher import Watcher
from benchmarks.faults.worker import Witness
from rlix.control.client import JobClient
from rlix.protocol.errors import RlixError
from rlix.protocol.types import (
    ORCHESTRATOR_ACTOR_NAME,
    RESOURCE_MANAGER_ACTOR_NAME,
    SCHEDULER_ACTOR_NAME,
    Phase,
)

SETTINGS = {
    "shrink_deadline_s": 10.0,
    "stopped_s": 2.0,
    "silent_s": 6.0,
    "idle_job_s": 600.0,
    "abandon_after_s": 20.0,
    "quarantine_retry_s": 1.0,
}
TRAINING_SHARE = 0.1
START_S = 180.0
GOALS = (
    "double grants",
    "leaks",
    "taken for a stranger's word",
    "ended without a fault",
    "waits not explained",
    "wrong rounds",
    "wrong metrics",
)
ALONE = {"full disk", "node killed"}  # one of each at a time
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ACTORS = {
    "scheduler": SCHEDULER_ACTOR_NAME,
    "orchestrator": ORCHESTRATOR_ACTOR_NAME,
    "resource manager": RESOURCE_MANAGER_ACTOR_NAME,
}
Injector = Callable[[Campaign], Fault]


def kinds() -> dict[str, tuple[int, Injector]]:
    """Every injection into light jobs with its share of them."""
    found: dict[str, tuple[int, Injector]] = {}
    for label, name in ACTORS.items():
        scheduler = label == "scheduler"
        found[f"{label} killed"] = (8 if scheduler else 4, partial(injectors.control, label, name, KILL))
        found[f"{label} stopped"] = (3 if scheduler else 2, partial(injectors.control, label, name, STOP))
    for rollout in (True, False):
        name = "replica" if rollout else "trainer"
        found[f"{name} killed"] = (24, partial(injectors.member, rollout, KILL))
        found[f"{name} stopped"] = (5, partial(injectors.member, rollout, STOP))
    found["program killed"] = (10, partial(injectors.program, KILL))
    found["program stopped"] = (4, partial(injectors.program, STOP))
    found["stale epoch"] = (10, injectors.stale)
    found["stranger"] = (5, injectors.standalone)
    found["late heartbeat"] = (2, injectors.silent)
    found["lying client"] = (3, injectors.liar)
    found["full disk"] = (3, injectors.full_disk)
    found["node killed"] = (2, injectors.node)
    return found


def host_kinds() -> dict[str, tuple[int, Injector]]:
    """What happens to hosts and between them, with its share."""
    return {
        "host cut off for 5 s": (4, partial(cluster.cut, seconds=5.0)),
        "head cut off for 5 s": (2, partial(cluster.cut, seconds=5.0, head=True)),
        "host cut off for 30 s": (2, partial(cluster.lost, seconds=30.0)),
        "host lost for ever": (2, partial(cluster.lost, seconds=None)),
        "two hosts apart": (2, partial(cluster.between, seconds=10.0, lossy=False)),
        "packets lost": (2, partial(cluster.between, seconds=10.0, lossy=True)),
        "host drained": (3, cluster.drained),
    }


def plan_of_hosts(count: int, rng: random.Random, only: str) -> list[tuple[str, Injector]]:
    """Of every two one that happens to a host, or between hosts."""
    hosts = {name: kind for name, kind in host_kinds().items() if only in name} or host_kinds()
    others = {name: kind for name, kind in kinds().items() if name not in ALONE}
    others |= {f"nonsense call ({name})": (1, partial(wrong_call, name)) for name in WRONG}
    chosen: list[tuple[str, Injector]] = []
    for each in (hosts, others) * ((count + 1) // 2):
        (name,) = rng.choices(list(each), [share for share, _ in each.values()])
        chosen.append((name, each[name][1]))
    return chosen[:count]


def plan(count: int, rng: random.Random, only: str) -> list[tuple[str, Injector]]:
    """`count` injections in random order: of each kind its share, and of nonsense calls the rest."""
    shares = {name: kind for name, kind in kinds().items() if only in name}
    total = sum(share for share, _ in shares.values()) + (len(WRONG) if only in "nonsense call" else 0)
    chosen = [
        (name, injector)
        for name, (share, injector) in shares.items()
        for _ in range(max(1, round(share * count / total)))
    ]
    rng.shuffle(chosen)
    calls = rng.sample(sorted(WRONG), len(WRONG)) if only in "nonsense call" else []
    chosen = chosen[:count]
    while len(chosen) < count and calls:
        chosen += [(f"nonsense call ({name})", partial(wrong_call, name)) for name in calls[: count - len(chosen)]]
    rng.shuffle(chosen)
    return chosen


def inject(run: Campaign, planned: list[tuple[str, Injector]], until_s: float) -> None:
    """One after the other. `until_s`, of `time.monotonic()`: nothing new after that."""
    for name, injector in planned:
        if time.monotonic() > until_s:
            return
        try:
            fault = injector(run)
        except (TimeoutError, ray.exceptions.RayError, StopIteration) as error:
            fault = Fault(name, None, survived=False, note=f"{type(error).__name__}: {error}")
        _note(run, fault)
        time.sleep(run.rng.uniform(0.0, 0.3))


def inject_pairs(run: Campaign, planned: list[tuple[str, Injector]], until_s: float) -> None:
    """Two at a time, the second while the first is not over.

    Each is observed as if it were alone. What one of them keeps the other's observer from seeing, an actor that does
    not answer or a victim that is dead already, is judged by what holds for both: the pool grants devices again.
    """
    with ThreadPoolExecutor(2) as pool:
        for first, second in zip(planned[::2], planned[1::2], strict=False):
            if time.monotonic() > until_s:
                return
            delay_s = RECOVERY_S if first[0] == second[0] and first[0] in ALONE else run.rng.uniform(0.0, 1.5)
            one = pool.submit(_observed, run, *first, 0.0)
            two = pool.submit(_observed, run, *second, delay_s)
            at = time.time()
            for fault in filter(None, (one.result(), two.result())):
                seen = fault.recovered_s is not None and fault.survived
                _note(run, fault if seen else replace(fault, survived=run.grants_since(at) is not None))


def _observed(run: Campaign, name: str, injector: Injector, delay_s: float) -> Fault | None:
    """None where there was nobody to hit."""
    time.sleep(delay_s)
    try:
        return injector(run)
    except (TimeoutError, ray.exceptions.RayError, RlixError, StopIteration, ProcessLookupError) as error:
        said = f"{type(error).__name__}: {str(error).strip()[:120]}"
        if type(error) in (TimeoutError, ProcessLookupError):
            print(f"     {name}: not injected: {said}", flush=True)
            return None
        return Fault(name, None, survived=False, note=said)


def _note(run: Campaign, fault: Fault) -> None:
    run.faults.append(fault)
    print(f"{len(run.faults):>4} {fault.line()}", flush=True)


def leaks(run: Campaign) -> list[str]:
    """All jobs over: what is still held, registered or locked, and whether the whole pool is granted to one gang."""
    found = []

    def others() -> list[str]:
        return [f"pipeline {p.pipeline_id} ({p.name})" for p in run.pool.status().pipelines if p.name != "probe"]

    until(lambda: not others() and not run.pool.status().leases, 60)
    found += others()
    found += [f"lease {status}" for status in run.pool.status().leases]
    devices = run.pool.status().devices
    whole = JobClient(run.register("whole pool", {"all": [device.id for device in devices]}))
    try:
        whole.release(whole.acquire("all", Phase.INITIALIZATION, 30))
    except TimeoutError as error:
        found.append(f"the whole pool was not granted: {error}")
    whole.unregister("the campaign is over")
    locks = {device.id: run.pool.look(device) for device in devices}
    return [*found, *(f"device {id_} is locked by {record}" for id_, record in locks.items() if record is not None)]


def campaign(options: argparse.Namespace, hosts: network.Network | None) -> tuple[list[Fault], dict[str, object]]:
    rng = random.Random(options.seed)
    trained: dict[str, object] = {}
    with Pool(SETTINGS) if hosts is None else cluster.HostsPool(SETTINGS, hosts) as pool:
        jobs = {pool.folder: JOBS} if hosts is None else {jobs_on(n): jobs_of(n, HOSTS) for n in range(1, HOSTS + 1)}
        devices = pool.status().devices
        watcher = Watcher(pool.journal(), pool.look, devices, ray.get(actor(SCHEDULER_ACTOR_NAME).pool_id.remote()))
        run, waits = Campaign(pool, watcher, rng), Waits(pool)
        for_training = 0 if options.no_training or hosts is not None else round(TRAINING_SHARE * options.count)
        if for_training:
            try:
                trained = training.inject(run, for_training)
            except Exception as error:  # noqa: BLE001 - what has been measured is still shown
                traceback.print_exc()
                trained = {"wrong metrics": [f"the training part failed: {error!r}"]}
        run.light = LightJobs(pool.folder, options.seed, jobs[pool.folder])
        try:
            if hosts is not None:
                for number in range(2, HOSTS + 1):
                    hosts.jobs(number, options.seed + 100 * number)
            if not until(lambda: len(pool.status().pipelines) > sum(map(len, jobs.values())), START_S):
                raise TimeoutError("the light jobs did not start")
            of = plan if hosts is None else plan_of_hosts
            planned = of(options.count - len(run.faults), rng, options.only)
            paired = options.pairs or options.hosts
            (inject_pairs if paired else inject)(run, planned, time.monotonic() + 60.0 * options.minutes)
        finally:
            over = time.time()
            for folder in jobs:
                (folder / OVER).touch()
            run.light.close()
            waits.close()
            works = [work_of(folder, names) for folder, names in jobs.items()]
            if options.keep:
                shutil.copytree(pool.folder, options.keep, dirs_exist_ok=True)
        leaked = leaks(run)
        run.probe.unregister("the campaign is over")  # and beats no more: Ray ends who calls it after `ray.shutdown`
        watcher.close()
        looks, double = watcher.looks, [*watcher.ledger.double, *watcher.violations]
        seen = [line for folder in jobs for line in Witness(folder / "witness").violations()]
        harm = harm_of(run)
    leaked += [f"process {p.pid} {p.cmdline()[:4]}" for p in pool.left()]
    busy = [line for line in seen if '"busy"' in line]
    return run.faults, {
        "double grants": double + [line for line in seen if line not in busy],
        "leaks": leaked,
        "taken for a stranger's word": harm,
        "ended without a fault": run.innocent(over),
        "waits not explained": waits.unexplained,
        "waits looked at": waits.looks,
        "wrong rounds": [line for work in works for line in work.wrong],
        "light work": [asdict(work) for work in works],
        "grants refused by the lock": len(busy),
        "looks at the locks": looks,
        **trained,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="kinds whose name holds this word")
    parser.add_argument("--no-training", action="store_true", help="light jobs only")
    parser.add_argument("--keep", type=Path, help="copy logs and journal here")
    parser.add_argument("--pairs", action="store_true", help="two faults at a time")
    parser.add_argument("--hosts", action="store_true", help="over three hosts, and two faults at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no fault after so long")
    parser.add_argument("--virtual", type=int, default=0, metavar="LIVES", help="on a virtual clock, in this process")
    options = parser.parse_args()
    hosts = network.network() if options.hosts else None
    if options.hosts and hosts is None:
        given = {"--count": options.count, "--seed": options.seed, "--only": options.only, "--minutes": options.minutes}
        return network.run([f"{name}={value}" for name, value in given.items()], options.json, options.keep)
    if options.virtual:
        return virtual(options.virtual, options.seed, options.only)
    logging.basicConfig(level=logging.WARNING)
    start = time.monotonic()
    faults, found = campaign(options, hosts)
    print(table(faults))
    print(json.dumps(found, indent=2, default=str))
    print(f"{time.monotonic() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"faults": [asdict(f) for f in faults], **found}, default=str) + "\n")
    return int(any(found.get(goal) for goal in GOALS) or not all(fault.survived for fault in faults))


if __name__ == "__main__":
    sys.exit(main())
