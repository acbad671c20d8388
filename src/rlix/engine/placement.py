"""Which devices an engine gets when its user does not name them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import ray

from rlix.control.rpc import get
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Device
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME

_POOL_TIMEOUT_S = 30.0


class Placed(Protocol):
    """Anything that sits on devices: an engine."""

    devices: tuple[Device, ...]


Engines = Placed | Sequence[Placed] | None

# Engines of this process and the devices they are on; an engine that is forgotten frees its devices.
_occupied: WeakKeyDictionary[Placed, tuple[Device, ...]] = WeakKeyDictionary()


def occupy(engine: Placed, devices: tuple[Device, ...]) -> None:
    """Record that an engine sits on devices, so that later ones prefer others."""
    _occupied[engine] = devices


def vacate(engine: Placed) -> None:
    _occupied.pop(engine, None)


def choose(
    count: int,
    *,
    devices: Sequence[Device] | None = None,
    colocate_with: Engines = None,
    not_colocate_with: Engines = None,
    acceptable_node_ips: Sequence[str] | None = None,
) -> tuple[Device, ...]:
    """`count` devices: those named, else those of `colocate_with`, else from the pool, free ones first.

    Raises:
        ValueError: no such choice; the message says how many devices each condition leaves.
    """
    pool = tuple(devices) if devices is not None else pool_devices()
    return select(
        count,
        pool,
        beside=None if colocate_with is None else _devices_of(colocate_with),
        avoid=_devices_of(not_colocate_with),
        acceptable_node_ips=acceptable_node_ips,
        load=Counter() if devices is not None else Counter(d for used in _occupied.values() for d in used),
    )


def select(
    count: int,
    pool: Sequence[Device],
    *,
    beside: frozenset[Device] | None,
    avoid: frozenset[Device],
    acceptable_node_ips: Sequence[str] | None,
    load: Counter[Device],
) -> tuple[Device, ...]:
    """The pure choice: least loaded devices, in pool order, preferring to stay on one node."""
    left = [device for device in pool if acceptable_node_ips is None or device.node_ip in acceptable_node_ips]
    conditions = [f"{len(pool)} in the pool"]
    if acceptable_node_ips is not None:
        conditions.append(f"{len(left)} on nodes {', '.join(acceptable_node_ips) or '(none)'}")
    if beside is not None:
        left = [device for device in left if device in beside]
        conditions.append(f"{len(left)} of colocate_with")
    if avoid:
        left = [device for device in left if device not in avoid]
        conditions.append(f"{len(left)} outside not_colocate_with")
    if len(left) < count:
        raise ValueError(f"{count} device(s) wanted, but there are {', '.join(conditions)}")
    order = {device: place for place, device in enumerate(left)}
    nodes: dict[str, list[Device]] = {}
    for device in sorted(left, key=lambda device: (load[device], order[device])):
        nodes.setdefault(device.node_id, []).append(device)
    fitting = [chosen[:count] for chosen in nodes.values() if len(chosen) >= count]
    if fitting:
        best = min(fitting, key=lambda chosen: sum(load[device] for device in chosen))
    else:
        best = sorted(left, key=lambda device: (load[device], order[device]))[:count]
    return tuple(sorted(best, key=lambda device: order[device]))


def common_address(devices: Iterable[Device]) -> str:
    """An address of this process's node that workers on all these devices reach."""
    here = ray.get_runtime_context().get_node_id()
    alone = all(device.node_id == here for device in devices)
    return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())


def pool_devices() -> tuple[Device, ...]:
    """The devices of the running control plane."""
    try:
        orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)
    except ValueError:
        raise RlixError("no control plane to choose devices from: call rlix.init() first, or pass devices") from None
    devices: tuple[Device, ...] = get(
        orchestrator.devices.remote(), what="the orchestrator's list of devices", timeout_s=_POOL_TIMEOUT_S
    )
    return devices


def _devices_of(engines: Engines) -> frozenset[Device]:
    if engines is None:
        return frozenset()
    each: Iterable[Placed] = engines if isinstance(engines, Sequence) else (engines,)
    return frozenset(device for engine in each for device in engine.devices)
