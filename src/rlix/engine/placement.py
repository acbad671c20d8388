"""Which devices an engine gets when its user does not name them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol
from weakref import WeakKeyDictionary

import ray

from rlix.control.rpc import get
from rlix.node.device_lock import holder
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus, Device
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME
from rlix.workers.worker import program_fence

_POOL_TIMEOUT_S = 30.0
_STRANGERS = 1000  # how loaded a device with another program's bytes counts: more than engines of this one make it


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
    bundle: int = 1,
    devices: Sequence[Device] | None = None,
    colocate_with: Engines = None,
    not_colocate_with: Engines = None,
    acceptable_node_ips: Sequence[str] | None = None,
) -> tuple[Device, ...]:
    """`count` devices: those named, else those of `colocate_with`, else from the pool, free ones first.

    Devices from the pool, unless they are those of `colocate_with`, are never under a job's lease; those that another
    program of this machine has bytes on come last. They come in groups of `bundle`, each on one node where that can be,
    else in equal shares on as few nodes as can be.

    Raises:
        ValueError: no such choice; the message says how many devices each condition leaves. Or an engine that is
            named has no devices.
    """
    beside = None if colocate_with is None else _devices_of("colocate_with", colocate_with)
    avoid = _devices_of("not_colocate_with", not_colocate_with)
    load: Counter[Device] = Counter()
    leased: frozenset[Device] = frozenset()
    if devices is None:
        pool, leased = _pool()
        load.update(device for used in _occupied.values() for device in used)
        load.update(dict.fromkeys(_held_by_others(pool), _STRANGERS))
    else:
        if wrong := [device for device in devices if not isinstance(device, Device)]:
            raise ValueError(f"devices: {wrong[0]!r} is no device: choose from rlix.pool_devices()")
        pool, bundle = tuple(devices), 1  # in the order in which they are named
    return select(
        count,
        pool,
        bundle=bundle,
        beside=beside,
        avoid=avoid,
        leased=leased if beside is None else frozenset(),
        acceptable_node_ips=acceptable_node_ips,
        load=load,
    )


def select(
    count: int,
    pool: Sequence[Device],
    *,
    bundle: int = 1,
    beside: frozenset[Device] | None = None,
    avoid: frozenset[Device] = frozenset(),
    leased: frozenset[Device] = frozenset(),
    acceptable_node_ips: Sequence[str] | None = None,
    load: Counter[Device],
) -> tuple[Device, ...]:
    """The pure choice: least loaded devices, in pool order, preferring one node, else one node for each bundle.

    Where a bundle fits on no node, it takes as many devices of each of several.
    """
    left = list(pool)
    conditions = [f"{len(pool)} in the pool"]

    def keep(condition: str, allowed: Callable[[Device], bool]) -> None:
        left[:] = [device for device in left if allowed(device)]
        conditions.append(f"{len(left)} {condition}")

    if acceptable_node_ips is not None:
        keep(f"on nodes {', '.join(acceptable_node_ips) or '(none)'}", lambda d: d.node_ip in acceptable_node_ips)
    if beside is not None:
        keep("of colocate_with", lambda d: d in beside)
    if avoid:
        keep("outside not_colocate_with", lambda d: d not in avoid)
    if leased:
        keep("under no job's lease", lambda d: d not in leased)
    if len(left) < count:
        raise ValueError(f"{count} device(s) wanted, but there are {', '.join(conditions)}")
    order = {device: place for place, device in enumerate(left)}
    free = sorted(left, key=lambda device: (load[device], order[device]))
    nodes: dict[str, list[Device]] = {}
    for device in free:
        nodes.setdefault(device.node_id, []).append(device)
    bundles = _on_one_node(nodes, count, load) or _on_one_node(nodes, bundle, load, count // bundle)
    in_order = [sorted(chosen, key=lambda device: order[device]) for chosen in bundles]
    in_order = in_order or _in_shares(nodes, order, bundle, load, count // bundle)
    in_order = in_order or [sorted(free[:count], key=lambda device: order[device])]
    return tuple(device for chosen in sorted(in_order, key=lambda chosen: order[chosen[0]]) for device in chosen)


def by_node(bundle: Sequence[Device]) -> tuple[tuple[Device, ...], ...]:
    """A bundle's devices, cut wherever the next one is on another node."""
    return tuple(tuple(share) for _, share in groupby(bundle, key=lambda device: device.node_id))


def bundles_of(devices: Sequence[Device], size: int, *, spans: bool) -> list[tuple[Device, ...]]:
    """Each `size` devices, in this order. Raises ValueError unless one replica can be on them.

    That is on one node, or, where the backend `spans` nodes, in equal shares, one node's after the other's.
    """
    bundles = [tuple(devices[first : first + size]) for first in range(0, len(devices), size)]
    for bundle in bundles:
        shares = by_node(bundle)
        if len(shares) == 1:
            continue
        on = ", ".join(f"{device.id} on {device.node_ip}" for device in bundle)
        if not spans:
            raise ValueError(
                f"tensor_parallel_size={size}: the devices of a replica must be on one node, but these are {on}; "
                'take a smaller one, a smaller dtype where the weights do not fit then, or executor="vllm"'
            )
        if len(set(map(len, shares))) > 1 or len({share[0].node_id for share in shares}) < len(shares):
            raise ValueError(
                f"tensor_parallel_size={size}: a replica over several nodes takes as many devices of each, one node's "
                f"after the other's, but these are {on}; name others, or take another size"
            )
    return bundles


def _on_one_node(
    nodes: Mapping[str, Sequence[Device]], size: int, load: Counter[Device], count: int = 1
) -> list[Sequence[Device]]:
    """The `count` least loaded groups of `size` devices, each on one node; none when there are not so many."""
    groups = [
        devices[first : first + size] for devices in nodes.values() for first in range(0, len(devices) - size + 1, size)
    ]
    groups.sort(key=lambda group: sum(load[device] for device in group))
    return groups[:count] if len(groups) >= count else []


def _in_shares(
    nodes: Mapping[str, Sequence[Device]], order: Mapping[Device, int], size: int, load: Counter[Device], count: int
) -> list[list[Device]]:
    """`count` groups of `size` devices, each with as many on each of its nodes, which are as few as can be."""
    left, groups = [list(devices) for devices in nodes.values()], list[list[Device]]()
    for span in (span for span in range(1, len(nodes) + 1) if size % span == 0):
        share = size // span
        while len(groups) < count:
            # Those with most left, so that as many groups are found as there are; among these the least loaded.
            left.sort(key=lambda free: (-(len(free) // share), sum(load[device] for device in free[:share])))
            if len(left[span - 1]) < share:
                break
            shares = [sorted(free[:share], key=lambda device: order[device]) for free in left[:span]]
            groups.append([device for own in sorted(shares, key=lambda own: order[own[0]]) for device in own])
            left[:span] = [free[share:] for free in left[:span]]
    return groups if len(groups) == count else []


def pool_devices() -> tuple[Device, ...]:
    """The devices of the running control plane, whoever uses them, in the order of their numbers.

    Raises:
        RlixError: there is none, because nobody called `rlix.init`.
    """
    return _pool()[0]


def _pool() -> tuple[tuple[Device, ...], frozenset[Device]]:
    """The devices of the running control plane, and those of them that jobs hold leases of."""
    if not ray.is_initialized():
        raise RlixError("no Ray, and so no devices to choose from: call rlix.init() first")
    try:
        orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)
    except ValueError:
        raise RlixError("no control plane to choose devices from: call rlix.init() first, or pass devices") from None
    status: ControlStatus = get(
        orchestrator.status.remote(), what="the orchestrator's list of devices", timeout_s=_POOL_TIMEOUT_S
    )
    leased = {number for held in status.leases for number in held.lease.devices}
    return status.devices, frozenset(device for device in status.devices if device.id in leased)


def _held_by_others(pool: Iterable[Device]) -> list[Device]:
    """Devices of this machine that another program has bytes on."""
    here, mine = ray.get_runtime_context().get_node_id(), program_fence()
    records = [(device, holder(device.key)) for device in pool if device.key and device.node_id == here]
    return [device for device, record in records if record is not None and record.fence != mine]


def _devices_of(condition: str, engines: Engines) -> frozenset[Device]:
    if engines is None:
        return frozenset()
    each: Iterable[Placed] = engines if isinstance(engines, Sequence) else (engines,)
    found: set[Device] = set()
    for engine in each:
        if not engine.devices:
            name = getattr(engine, "name", type(engine).__name__)
            raise ValueError(f"{condition} names {name}, which has no devices: it is not built, or was closed")
        found.update(engine.devices)
    return frozenset(found)
