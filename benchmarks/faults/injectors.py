"""Faults of processes, devices and the disk, each with what it takes to say that it is over."""

import contextlib
import os
import signal
import threading
import time
from functools import partial

import ray

from benchmarks.faults.campaign import RECOVERY_S, STOP_NAMES, Campaign, cleanup, until
from benchmarks.faults.crew import CONTEXT
from benchmarks.faults.node_job import NodeJob
from benchmarks.faults.pool import HOME_BYTES, actor
from benchmarks.faults.table import Fault
from benchmarks.faults.worker import Hold, squat, worker
from rlix.control.gang_queue import Asked
from rlix.node.device_lock import DeviceLocks
from rlix.node.process import describe, state
from rlix.protocol.errors import RlixError, StaleEpochError
from rlix.protocol.events import (
    DevicesDiscovered,
    LeaseGranted,
    LeaseReleased,
    PipelineEnding,
    PipelineUnregistered,
)
from rlix.protocol.messages import Fence, Lease
from rlix.protocol.types import SCHEDULER_ACTOR_NAME, Phase

FULL_S = 6.0


def control(label: str, name: str, number: signal.Signals, run: Campaign) -> Fault:
    """One of the control plane's actors."""
    before = ray.get(actor(name).process.remote(), timeout=60)
    at = time.time()
    os.kill(before.pid, number)
    noticed = 0.0
    if number == signal.SIGSTOP:
        until(lambda: state(before) == "dead", RECOVERY_S)
        noticed = time.time() - at
    answered = run.answers(name, before, at)
    grants = run.grants_since(at)
    survived = answered is not None and grants is not None
    return Fault(f"{label} {STOP_NAMES[number]}", answered, noticed, grants, survived)


def member(rollout: bool, number: signal.Signals, run: Campaign) -> Fault:
    """A worker of a light job, on its device."""
    cluster = "roll" if rollout else "train"
    lease, victim = run.holder_of(lambda lease: lease.cluster == cluster)
    return run.hit("replica" if rollout else "trainer", lease, victim, number)


def program(number: signal.Signals, run: Campaign) -> Fault:
    """A program (`rlix.attach`), in a phase."""
    assert run.light is not None
    name = run.rng.choice(list(run.light.processes))
    pipelines = {}

    def in_a_phase() -> bool:
        pipelines.update({p.name: p.pipeline_id for p in run.pool.status().pipelines if not p.ending})
        phases = {Phase.ROLLOUT} if run.rng.random() < 0.3 else set(Phase) - {Phase.ROLLOUT}
        return any(x.pipeline_id == pipelines.get(name) and x.phase in phases for x in run.watcher.active().values())

    if not until(in_a_phase, 30):
        raise TimeoutError(f"{name} was in no phase")
    process, id_ = run.light.processes[name], pipelines[name]
    at = time.time()
    os.kill(process.pid, number)
    run.blame(id_, at)
    ended = run.watcher.wait(at, lambda e: isinstance(e, PipelineUnregistered) and e.pipeline_id == id_, RECOVERY_S)
    noticed = 0.0
    if number == signal.SIGSTOP:
        is_ending = partial(_is, PipelineEnding, id_)
        noticed = run.watcher.wait(at, is_ending, 0.1) or 0.0
    again = until(lambda: any(p.name == name and p.pipeline_id != id_ for p in run.pool.status().pipelines), RECOVERY_S)
    return Fault(f"program {STOP_NAMES[number]}", ended, noticed, None, ended is not None and again)


def _is(kind: type, pipeline_id: str, event: object) -> bool:
    return isinstance(event, kind) and getattr(event, "pipeline_id", "") == pipeline_id


def standalone(run: Campaign) -> Fault:
    """Somebody of no pool uses a device for a while; recovered when the pool uses it again."""
    device = run.rng.choice(run.pool.here())
    seconds, ready = run.rng.uniform(0.5, 3.0), CONTEXT.Event()
    squatter = CONTEXT.Process(target=squat, args=(device.key, seconds, ready))
    squatter.start()
    with cleanup(squatter.kill):
        if not ready.wait(20):
            return Fault("device used by a stranger", 0.0, note="it never got the device: the pool had it")
        squatter.join(20)
        at = time.time()

        def used() -> bool:
            found = run.pool.look(device)
            return found is not None and found.fence.pool != "standalone"

        ok = until(used, RECOVERY_S)
    return Fault("device used by a stranger", time.time() - at if ok else None, survived=ok)


def stale(run: Campaign) -> Fault:
    """Somebody who comes late, with a lease that ended long ago: the device itself refuses him."""
    device = run.rng.choice(run.pool.here())
    leases = [e.lease for _, e in run.watcher.events_since(0) if isinstance(e, LeaseGranted)]
    epochs = [lease.epoch for lease in leases if device.id in lease.devices]
    epoch = run.rng.choice(epochs[: max(1, len(epochs) // 2)])
    locks = DeviceLocks([device.key], run.pool.locks)
    pool = ray.get(actor(SCHEDULER_ACTOR_NAME).pool_id.remote(), timeout=30)
    at = time.time()
    try:
        locks.acquire(Fence(pool, epoch, "a late process"), 0.05)
    except StaleEpochError:
        return Fault("stale epoch at the device", time.time() - at)
    except RlixError as error:
        return Fault("stale epoch at the device", None, survived=False, note=str(error))
    locks.release()
    return Fault("stale epoch at the device", None, survived=False, note=f"epoch {epoch} was let in to {device.key}")


def silent(run: Campaign) -> Fault:
    """A client that takes a gang, locks it and never beats; recovered when its device is free again."""
    id_ = run.register("silent", {"gang": [run.rng.choice(run.pool.here()).id]})
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=worker, args=(theirs, run.pool.folder / "witness"))
    process.start()
    with cleanup(process.kill):
        scheduler = actor(SCHEDULER_ACTOR_NAME)
        known = describe(process.pid or 0, ray.get_runtime_context().get_node_id())
        asked = Asked(f"silent-{id_}", known)
        at = time.time()
        polled = scheduler.poll_gang.remote(id_, "gang", Phase.ACTOR_TRAINING, asked, 30.0)
        lease: Lease | None = ray.get(polled, timeout=60)
        if lease is None:
            return Fault("late heartbeat", None, survived=False, note="it was not granted")
        keys = {device.id: device.key for device in run.pool.status().devices}
        fence = Fence(ray.get(scheduler.pool_id.remote(), timeout=30), lease.epoch, "silent")
        ours.send(Hold(tuple(keys[d] for d in lease.devices), fence))
        at = time.time()
        epoch = lease.epoch
        ended = run.watcher.wait(at, lambda e: isinstance(e, LeaseReleased) and e.epoch == epoch, RECOVERY_S)
        noticed = 0.0 if ended is None else run.noticed(at, epoch, ended)
        with contextlib.suppress(RlixError):
            ray.get(scheduler.unregister_pipeline.remote(id_, "the fault is over"), timeout=60)
    return Fault("late heartbeat", ended, noticed, None, ended is not None)


def liar(run: Campaign) -> Fault:
    """A client that names a process of another job as its own and leaves: nobody may be ended for that."""
    here = {device.id for device in run.pool.here()}
    lease, victim = run.holder_of(lambda lease: lease.cluster in ("roll", "train") and here.issuperset(lease.devices))
    id_ = run.register("liar", {"gang": [run.rng.choice(list(here))]})
    scheduler, asked = actor(SCHEDULER_ACTOR_NAME), Asked(f"liar-{id_}", victim)
    polled = scheduler.poll_gang.remote(id_, "gang", Phase.ACTOR_TRAINING, asked, 30.0)
    given: Lease | None = ray.get(polled, timeout=60)
    ray.get(scheduler.name_holders.remote(id_, "gang", {0: victim}), timeout=60)
    at = time.time()
    ray.get(scheduler.unregister_pipeline.remote(id_, ""), timeout=60)
    ended = time.time() - at
    hit = any(whom == lease.pipeline_id for whom, _, _ in run.blamed)  # by the other fault of the pair
    spared = hit or run.pool.state(victim) != "dead"
    note = "" if given is not None else "it was not granted"
    return Fault("lying client", ended, 0.0, run.grants_since(at), spared, note if spared else f"{victim} was ended")


def full_disk(run: Campaign) -> Fault:
    """No room for the journal for a while; recovered when there is room, and a device is granted."""
    if not run.pool.small_disk:
        return Fault("full disk", 0.0, note="skipped: no file system may be mounted here")
    filler = run.pool.home / "filler"
    probe = threading.Thread(target=run.grants_since, args=(0.0,), daemon=True)
    with cleanup(lambda: filler.unlink(missing_ok=True)):
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(HOME_BYTES // 4096):
                file.write(bytes(4096))
        probe.start()
        said = until(lambda: bool(run.pool.status().trouble), FULL_S)
        time.sleep(run.rng.uniform(0.2, 1.0))
    at = time.time()
    over = until(lambda: not run.pool.status().trouble, RECOVERY_S)
    recovered = time.time() - at
    grants = run.grants_since(at)
    probe.join(RECOVERY_S)
    note = "" if said else "the journal's files had room left"
    return Fault("full disk", recovered if over else None, 0.0, grants, over and grants is not None, note)


def node(run: Campaign) -> Fault:
    """A second node comes, gets a job, and loses power; recovered when the job's lease has ended."""
    at = time.time()
    node_id = run.pool.add_node(2)
    with cleanup(run.pool.kill_nodes):
        came = run.watcher.wait(
            at, lambda e: isinstance(e, DevicesDiscovered) and any(d.node_id == node_id for d in e.devices), RECOVERY_S
        )
        if came is None:
            return Fault("node killed", None, survived=False, note="its devices were not found")
        mine = [d.id for d in run.pool.status().devices if d.node_id == node_id]
        id_ = run.register("on the second node", {"gang": mine})
        job = (
            ray.remote(num_cpus=0)(NodeJob)
            .options(
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            )
            .remote(id_)
        )
        lease: Lease = ray.get(job.hold.remote("gang", str(run.pool.locks)), timeout=60)
        at = time.time()
    ended = run.watcher.wait(at, lambda e: isinstance(e, LeaseReleased) and e.epoch == lease.epoch, RECOVERY_S)
    noticed = run.watcher.wait(at, lambda e: isinstance(e, DevicesDiscovered), 0.1) or 0.0
    with contextlib.suppress(RlixError):
        ray.get(actor(SCHEDULER_ACTOR_NAME).unregister_pipeline.remote(id_, "the fault is over"), timeout=60)
    return Fault("node killed", ended, noticed, run.grants_since(at), ended is not None)
