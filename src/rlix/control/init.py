"""Attaching to, or starting, Ray and the control plane, and ending both."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._private.node import Node
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rlix.control import setup_worker
from rlix.control.announcement import Announcement, DeathNotice, read_announcement
from rlix.control.connect import authentication, connect_to_cluster, connect_to_daemon, loopback_kept, sigterm_kept
from rlix.control.home import check_folders
from rlix.control.ray_processes import RayProcesses
from rlix.control.rpc import comes_back, get
from rlix.control.settings import Settings
from rlix.node.device_lock import remove_unheld
from rlix.node.devices import VIRTUAL_KEYS, virtual_key
from rlix.node.process import this_process
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.types import (
    HEAD_RESOURCE,
    MOST_VIRTUAL_GPUS,
    NAMESPACE,
    ORCHESTRATOR_ACTOR_NAME,
    RESOURCE_MANAGER_ACTOR_NAME,
    SCHEDULER_ACTOR_NAME,
    VIRTUAL_DEVICE_RESOURCE,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
_START_TRIES = 3  # Ray gives its own processes half a minute, which on busy cores are few
STOP_TIMEOUT_S = 15.0
_STARTUP_CONCURRENCY = 8  # workers are forked, not started from nothing: more at a time than there are cores is fine
_LOGICAL_CPUS = 256  # control and worker processes claim devices, not cores: Ray must never queue one for lack of a CPU
_NICENESS = 0  # of the control plane's actors: at Ray's 15, busy cores silence it for longer than its callers wait
# A node that is gone refuses each question at once, and is known to be within 3 s instead of Ray's 15. One that is slow
# has Ray's 10 s for each answer, so that busy cores raise no false alarm.
_HEALTH_PERIOD_MS, _HEALTH_FAILURES = 1000, 3
_OLD_LOCK_S = 7 * 86_400.0  # a virtual device that nobody has used for so long is not there any more
_VIRTUAL_OBJECT_STORE_BYTES = 300_000_000
_SCHEDULER_CALLS = 10_000  # that wait inside the scheduler at the same time; they cost it no thread
_THREADS = 16  # of the orchestrator and of the resource manager: calls that they carry out at the same time


class _Session:
    started_ray = False  # by `init` in this process, so that `shutdown` here ends it
    death_notice: DeathNotice | None = None  # of the daemon that this process is connected to


def init(
    *,
    create_if_missing: bool = True,
    address: str | None = None,
    virtual_gpus: int | None = None,
    num_cpus: int | None = None,
    log_level: int | str = logging.INFO,
    settings: Settings | None = None,
) -> Any:
    """Attaches to the control plane, starting Ray and it where they do not run yet. Calling it again is fine.

    Which one: that of the Ray cluster at `address` or RAY_ADDRESS; without either, that of the daemon of RLIX_HOME
    (which `rlix run` starts); where there is none, or for the address "local", Ray is started on the loopback interface
    and lives as long as this process: with this machine's GPUs, or with virtual ones when it has none; `virtual_gpus`
    says how many of those.

    Returns:
        The handle of the orchestrator actor.

    Raises:
        RlixError: there is nothing to attach to and `create_if_missing` is false, the address cannot be reached or does
            not take our token, Ray does not start, or the pool has no devices.
        SpecError: the daemon's pool has another number of virtual GPUs than `virtual_gpus`, or no control plane can be
            started with this RLIX_HOME.
        WaitTimeoutError: the control plane did not start within three minutes.
    """
    settings = Settings.from_env() if settings is None else settings
    level = _level(log_level)
    logging.getLogger("rlix").setLevel(level)
    if virtual_gpus is not None and not 1 <= virtual_gpus <= MOST_VIRTUAL_GPUS:
        raise SpecError(f"rlix.init: virtual_gpus must be from 1 to {MOST_VIRTUAL_GPUS}, got {virtual_gpus}")
    if not ray.is_initialized() and not _connect_ray(address or settings.ray_address, settings.home, virtual_gpus):
        if not create_if_missing:
            raise RlixError("rlix.init: no Ray cluster to attach to; start one or pass create_if_missing=True")
        check_folders(settings.home)
        _start_ray(settings, virtual_gpus, num_cpus)
    if not create_if_missing:
        with contextlib.suppress(ValueError):
            return ray.get_actor(ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
        raise RlixError("rlix.init: no control plane in this Ray cluster; pass create_if_missing=True to start one")
    return _start_control_plane(settings, level)


def shutdown() -> None:
    """Ends the control plane and, where `init` started it, Ray. Returns when their processes are gone."""
    if not ray.is_initialized():
        return
    with contextlib.suppress(ValueError, RayError, RlixError):
        scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE)
        me = this_process(ray.get_runtime_context().get_node_id())
        get(scheduler.close.remote(me), what="closing the scheduler", timeout_s=STOP_TIMEOUT_S)
    ours = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
    ]
    handles = []
    # Whoever starts others again goes first.
    for name in sorted(ours, key=lambda name: (name != RESOURCE_MANAGER_ACTOR_NAME, name)):
        with contextlib.suppress(ValueError):
            handles.append(ray.get_actor(name, NAMESPACE))
    for handle in handles:
        ray.kill(handle)
    if _Session.started_ray:
        _Session.started_ray = False
        nodes = [node["NodeID"] for node in ray.nodes()]
        _stop_ray(STOP_TIMEOUT_S)
        for node_id in nodes:  # which never come back, nor their virtual devices
            remove_unheld(virtual_key(node_id))
        authentication.restore()
    else:
        for handle in handles:
            _await_death(handle)


def detach() -> None:
    """Leaves Ray, and with it the control plane, to the others."""
    ray.shutdown()
    if _Session.death_notice is not None:
        _Session.death_notice.cancel()
        _Session.death_notice = None
    authentication.restore()


def _connect_ray(address: str, home: Path, virtual_gpus: int | None) -> bool:
    """Connects to the Ray at `address`, or to that of the home's daemon; false when a new one must be started."""
    if address == "local":
        return False
    if address:
        connect_to_cluster(address)
        return True
    found = read_announcement(home)
    if found is None:
        return False
    check_size(found, virtual_gpus, "virtual_gpus")
    _Session.death_notice = DeathNotice(home, found)
    connect_to_daemon(found)
    return True


def check_size(found: Announcement, wanted: int | None, option: str) -> None:
    """Raises SpecError when a pool that is there has another number of virtual GPUs than `option` asks for."""
    if wanted is not None and found.kind == "cpu" and found.devices != wanted:
        raise SpecError(
            f"{option}={wanted}: the control plane of process {found.pid} runs already and has {found.pool}; leave "
            "that out, end the control plane with `rlix down`, or use one of your own (`rlix run --private`, from "
            "Python RAY_ADDRESS=local)"
        )


def new_pool_size(settings: Settings, virtual_gpus: int | None = None) -> int:
    """How many devices a Ray that `init` starts here has: this machine's GPUs, or virtual ones."""
    return _real_gpus() or virtual_gpus or settings.virtual_gpus


def _real_gpus() -> int:
    """Raises SpecError where CUDA_VISIBLE_DEVICES names others than this machine's."""
    found = int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    if visible is None:
        return found
    if wrong := [name for name in visible if not found or (name.isdecimal() and int(name) >= found)]:
        raise SpecError(
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} names {', '.join(wrong)}, which this machine has not (its GPUs: "
            f"{found}): unset it"
        )
    return len(visible)


def _start_ray(settings: Settings, virtual_gpus: int | None, num_cpus: int | None) -> None:
    real = _real_gpus()
    if real and virtual_gpus:
        logger.info("this machine has %d GPUs: virtual_gpus=%d is ignored", real, virtual_gpus)
    devices: dict[str, Any] = {"num_gpus": real}
    if not real:
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            raise SpecError("CUDA_VISIBLE_DEVICES shows no GPU, and hides Ray's virtual ones, too: unset it")
        devices = {
            "num_gpus": virtual_gpus or settings.virtual_gpus,
            "resources": {VIRTUAL_DEVICE_RESOURCE: 1},
            "object_store_memory": _VIRTUAL_OBJECT_STORE_BYTES,
        }
    # Where token authentication is on, Ray says so at every start; it is what we want on a machine with other users.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    remove_unheld(VIRTUAL_KEYS, older_than_s=_OLD_LOCK_S)  # of pools that were killed
    options = {
        "address": "local",
        "num_cpus": num_cpus or _LOGICAL_CPUS,
        "include_dashboard": False,
        "logging_level": logging.WARNING,
        "_node_ip_address": "127.0.0.1",
        "_system_config": {
            "worker_maximum_startup_concurrency": _STARTUP_CONCURRENCY,
            "worker_niceness": _NICENESS,
            "prestart_worker_first_driver": False,  # plain workers, more than anybody uses
            "health_check_period_ms": _HEALTH_PERIOD_MS,
            "health_check_failure_threshold": _HEALTH_FAILURES,
            "memory_monitor_refresh_ms": 0,  # it ends first what Ray can start again: our control plane
        },
        **devices,
    }
    with loopback_kept(), _own_session(), _bare(), sigterm_kept():
        _try_to_start(options)
    _Session.started_ray = True


def _try_to_start(options: dict[str, Any]) -> None:
    for left in reversed(range(_START_TRIES)):
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises plain ones where its own processes were late, and leaves them
            _stop_ray(0.0)
            if not left:
                raise RlixError(f"rlix.init: Ray did not start ({_START_TRIES} tries): {error}") from error
            logger.warning("Ray did not start, and is tried again: %s", error)
        else:
            return


@contextlib.contextmanager
def _own_session() -> Iterator[None]:
    """What Ray starts is in no process group of ours: a signal to that is for us, who end Ray when we are ready."""
    before = services.ConsolePopen
    services.ConsolePopen = partial(before, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = before


@contextlib.contextmanager
def _bare() -> Iterator[None]:
    """Ray without its autoscaler, with a lighter script to start workers with, and without the process of a dashboard
    that is not included: Ray starts that all the same and waits for it, for its telemetry alone."""
    setups = {str(Path(ray.__file__).with_name("_private") / "workers" / "setup_worker.py"): setup_worker.__file__}

    def start_raylet(before: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return before(*(setups.get(arg, arg) if isinstance(arg, str) else arg for arg in args), **named)

    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (services, "start_api_server", lambda *_, **__: ("", None)),
        (Node, "start_monitor", lambda *_, **__: None),
        (services, "start_raylet", start_raylet),
    )
    with contextlib.ExitStack() as patched:
        for owner, name, instead in patches:
            if hasattr(owner, name):  # a Ray that calls it otherwise starts more slowly
                before = getattr(owner, name)
                patched.callback(setattr, owner, name, before)
                setattr(owner, name, partial(instead, before))
        yield


def _start_control_plane(settings: Settings, log_level: int) -> Any:
    from rlix.control.hosts import NO_GPUS
    from rlix.control.orchestrator import Orchestrator  # what only joins need not load them
    from rlix.control.resource_manager import ResourceManager
    from rlix.control.scheduler_service import Scheduler

    def start(actor_class: type, name: str, calls: int, *args: object) -> Any:
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",
            "max_restarts": -1,  # each comes back by itself, with what it was made with
            "max_concurrency": calls,
            "resources": {HEAD_RESOURCE: 0.001},
        }
        return ray.remote(num_cpus=0)(actor_class).options(**options).remote(*args)

    gpus = any(node["Alive"] and node["Resources"].get("GPU") for node in ray.nodes())
    if not gpus and not comes_back(ORCHESTRATOR_ACTOR_NAME):
        raise RlixError(NO_GPUS)  # before anything is started that would be left behind
    start(Scheduler, SCHEDULER_ACTOR_NAME, _SCHEDULER_CALLS, settings, _pool_id(), log_level)
    start(ResourceManager, RESOURCE_MANAGER_ACTOR_NAME, _THREADS, log_level)
    orchestrator = start(Orchestrator, ORCHESTRATOR_ACTOR_NAME, _THREADS, log_level, settings.stopped_s)
    get(orchestrator.ready.remote(), what="start of the control plane's actors", timeout_s=START_TIMEOUT_S)
    return orchestrator


def _pool_id() -> str:
    """The head node's id: no other Ray cluster ever has it."""
    head = next(node for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"])
    return str(head["NodeID"])


def _stop_ray(grace_s: float) -> None:
    processes = RayProcesses(psutil.Process())
    ray.shutdown()
    processes.end(grace_s)


def _await_death(handle: Any) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            ray.get(handle.__ray_ready__.remote(), timeout=STOP_TIMEOUT_S)
        except ActorUnavailableError:
            time.sleep(0.1)
        except RayActorError:
            return
    raise WaitTimeoutError(f"the control-plane actor {handle} did not end within {STOP_TIMEOUT_S:.0f} s")


def _level(log_level: int | str) -> int:
    if isinstance(log_level, int):
        return log_level
    levels = logging.getLevelNamesMapping()
    if log_level.upper() not in levels:
        raise SpecError(f"rlix.init: unknown log_level {log_level!r}; levels are: {', '.join(levels)}")
    return levels[log_level.upper()]
