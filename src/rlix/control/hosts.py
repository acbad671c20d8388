"""Which hosts of a Ray cluster lend devices, and why others do not. Each is asked alone: a bad one is only itself."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from rlix.node.host import Software
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import NodeState, NodeStatus
from rlix.protocol.types import VIRTUAL_DEVICE_RESOURCE

logger = logging.getLogger(__name__)

Keys = tuple[str, ...]
Node = Mapping[str, Any]  # of Ray's node table
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_ASKED_AT_ONCE = 64
START_WITH_GPUS = (
    "start its nodes with GPUs, or with virtual ones: "
    f"ray start --num-gpus=8 --resources='{{\"{VIRTUAL_DEVICE_RESOURCE}\": 1}}'"
)
NO_GPUS = f"the Ray cluster has no GPUs; {START_WITH_GPUS}; or set RAY_ADDRESS=local to start a separate one"
_PENDING = "it has not answered yet"


@dataclass(slots=True)
class _Asked:
    """What a node said, or is being asked. `again_at`: when one that did not answer is asked again."""

    answer: "Future[tuple[Keys, Software]]"
    pause_s: float = _FIRST_PAUSE_S
    again_at: float = 0.0
    why_not: str = _PENDING


class Hosts:
    """Every node that Ray counts.

    Args:
        ask: a node's keys (names of its GPUs) and software, by its id and whether its devices are virtual. May take
            long; runs in a thread of its own.
        head: the head's software, which the others' must equal.
        known: the keys of nodes that lend devices already: one of them that does not answer goes on doing so, as long
            as Ray counts it.
    """

    def __init__(
        self,
        ask: Callable[[str, bool], tuple[Keys, Software]],
        head: Software,
        known: Mapping[str, Keys],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._head, self._clock = ask, head, clock
        self._known = dict(known)
        self._asked: dict[str, _Asked] = {}
        self._threads = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="hosts")
        self.unfit: dict[str, str] = {}  # why they lend nothing, by id

    def lending(self, nodes: Sequence[Node], patience_s: float = 0.0) -> dict[str, Keys]:
        """The keys of those nodes that lend devices, by id. Those that have not been asked are waited for so long."""
        alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
        self._asked = {node_id: asked for node_id, asked in self._asked.items() if node_id in alive}
        for node_id, node in alive.items():
            asked = self._asked.get(node_id)
            if asked is None or (asked.again_at and self._clock() >= asked.again_at):
                answer = self._threads.submit(self._ask, node_id, VIRTUAL_DEVICE_RESOURCE in node["Resources"])
                self._asked[node_id] = _Asked(answer, _FIRST_PAUSE_S if asked is None else asked.pause_s)
        wait([asked.answer for asked in self._asked.values()], timeout=patience_s)
        found = {node_id: keys for node_id, node in alive.items() if (keys := self._keys(node)) is not None}
        unfit = {i: asked.why_not for i, asked in self._asked.items() if asked.why_not and i not in found}
        for node_id, why in unfit.items():
            if why not in (_PENDING, self.unfit.get(node_id)):
                logger.warning(
                    "host %s (%s) lends no devices: %s", _name(alive[node_id]), _address(alive[node_id]), why
                )
        self.unfit = unfit
        return found

    def _keys(self, node: Node) -> Keys | None:
        """None, with the reason noted, of a node that lends nothing."""
        asked, known = self._asked[node["NodeID"]], self._known.get(node["NodeID"])
        if not asked.answer.done():
            return known
        if (error := asked.answer.exception()) is not None:  # whatever is wrong there is wrong only there
            if not asked.again_at:
                asked.again_at = self._clock() + asked.pause_s
                asked.pause_s = min(2 * asked.pause_s, _LONGEST_PAUSE_S)
                asked.why_not = _reason(error)
            return known
        keys, software = asked.answer.result()
        asked.why_not = software.differs(self._head) or _too_few(node, keys)
        if asked.why_not:
            return None
        self._known[node["NodeID"]] = keys
        return keys


def statuses(
    nodes: Sequence[Node], unfit: Mapping[str, str], draining: Set[str], held: Set[str]
) -> tuple[NodeStatus, ...]:
    """The state of every host that is there, and of those that are lost and have not come back.

    Args:
        unfit: why nodes lend nothing, by id.
        draining: the nodes that are drained.
        held: those of which somebody has a device.
    """
    there = {_address(node) for node in nodes if node["Alive"]}
    shown = [node for node in nodes if node["Alive"] or _address(node) not in there]
    lost_last = {_address(node): node["NodeID"] for node in shown if not node["Alive"]}
    return tuple(
        NodeStatus(node["NodeID"], _name(node), _address(node), *_state(node, unfit, draining, held))
        for node in shown
        if node["Alive"] or lost_last[_address(node)] == node["NodeID"]
    )


def _state(node: Node, unfit: Mapping[str, str], draining: Set[str], held: Set[str]) -> tuple[NodeState, str]:
    node_id = node["NodeID"]
    if not node["Alive"]:
        return NodeState.LOST, "Ray has given it up; start Ray there again"
    if node_id in draining and node_id in held:
        return NodeState.DRAINING, "its devices leave the pool as they become free"
    if node_id in draining:
        return NodeState.CORDONED, "it lends no devices, and nobody holds one there"
    if node_id in unfit:
        return NodeState.MISCONFIGURED, f"it lends no devices: {unfit[node_id]}"
    return NodeState.READY, ""


def find(nodes: Sequence[Node], named: str) -> Node:
    """The host that is called `named`: by its name, its address or the first characters of its node id.

    Raises:
        SpecError: there is none, or several; names those there are.
    """
    alive = [node for node in nodes if node["Alive"]]
    exact = [node for node in alive if named in (_name(node), _address(node), node["NodeID"])]
    found = exact or [node for node in alive if named and node["NodeID"].startswith(named)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{_name(node)} ({_address(node)}, node {node['NodeID'][:8]})" for node in found or alive)
    raise SpecError(f"{named}: {'several hosts are called that' if found else 'no such host'}; there are: {there}")


def names(nodes: Sequence[Node]) -> dict[str, str]:
    """What each host that is there can be called, by node id: its name, or the beginning of its id where several have
    that name."""
    alive = [node for node in nodes if node["Alive"]]
    often = Counter(map(_name, alive))
    return {node["NodeID"]: _name(node) if often[_name(node)] == 1 else node["NodeID"][:8] for node in alive}


def _name(node: Node) -> str:
    return str(node.get("NodeManagerHostname") or node["NodeID"][:8])


def _address(node: Node) -> str:
    return str(node["NodeManagerAddress"])


def _too_few(node: Node, keys: Keys) -> str:
    count = int(node["Resources"].get("GPU", 0))
    if VIRTUAL_DEVICE_RESOURCE in node["Resources"] or len(keys) >= count:
        return ""
    return (
        f"Ray was told of {count} GPUs there, but programs may use {len(keys)} ({', '.join(keys) or 'none'}): start "
        f"Ray with --num-gpus={len(keys)}, or change CUDA_VISIBLE_DEVICES"
    )


def _reason(error: BaseException) -> str:
    """Of Ray's pages the line that says what happened."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    missing = [line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError", "AttributeError"))]
    if missing:
        return f"RLix is not there, or another version of it ({missing[-1]}); install what the head has"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
