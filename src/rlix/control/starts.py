"""Jobs start when the memory of their hosts suffices, and one ends when it does not: what `admission` decides, done."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlix.control.admission import Load, admit, overload
from rlix.control.core import Core
from rlix.node.memory import HostMemory
from rlix.protocol.messages import Process, StartNeed
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_SHARE = 0.1  # of the time: most that looking takes, for the kernel counts every page of every process
_LONGEST_S = 10.0  # from a look to the next all the same
_ANSWER_S = 30.0  # for every node to say what it has; then they are asked again
_RELIEVED_S = 8.0  # until the memory of a job that was ended is there
_FORGOTTEN_S = 15.0  # without a question: who waits asks once a second


class MemoryOf(Protocol):
    """Asks nodes for their memory, and what these processes use of it. Those that do not answer are left out."""

    def __call__(
        self,
        nodes: Sequence[str],
        processes: Sequence[Process],
        done: Callable[[Mapping[str, HostMemory]], None],
    ) -> None: ...


@dataclass(slots=True)
class _Waiting:
    need: StartNeed
    asked_at: float


class Starts:
    """Belongs to the thread of the core's clock.

    What a process of a cluster needs is what its user states, until a job of the same kind has trained: then it is what
    was measured there. A restarted control plane has forgotten that, and measures again.
    """

    def __init__(self, core: Core, memory_of: MemoryOf) -> None:
        self._core = core
        self._memory_of = memory_of
        self._hosts: dict[str, HostMemory] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._needs: dict[str, StartNeed] = {}  # of those that have started
        self._loads: dict[str, Mapping[str, int]] = {}  # what jobs use, by host
        self._found: dict[str, Mapping[str, int]] = {}  # what jobs used that did not ask, when they were first seen
        self._learnt: dict[tuple[str, str], int] = {}  # bytes of a process, by kind of job and cluster
        self._trained: set[str] = set()
        self._asked_at: float | None = None
        self._took_s = 0.0  # the latest look
        self._relieved_until = 0.0

    def watch(self) -> None:
        """From now on, look at the hosts' memory."""
        if not self._core.known.closed:
            pause_s = min(_LONGEST_S, max(_EVERY_S, self._took_s / _SHARE))
            self._core.clock.call_later(pause_s, self.watch)
            self._look()

    def _look(self) -> None:
        core = self._core
        now = core.clock.time()
        if self._asked_at is not None and now - self._asked_at < _ANSWER_S:
            return
        nodes = tuple(dict.fromkeys(device.node_id for device in core.state.devices))
        if nodes:
            self._asked_at = now
            processes = tuple(p for job in core.known.jobs for p in self._processes(job).values())
            self._memory_of(nodes, processes, self._seen)

    def may_start(self, pipeline_id: str, need: StartNeed) -> str:
        """ "" when the job may start; else why it waits. Who waits must ask again, or loses its place."""
        now = self._core.clock.time()
        if pipeline_id in self._needs:
            return ""
        self._waiting.setdefault(pipeline_id, _Waiting(need, now)).asked_at = now
        self._waiting = {
            job: waiting
            for job, waiting in self._waiting.items()
            if job in self._core.known.jobs and now - waiting.asked_at <= _FORGOTTEN_S
        }
        if not self._hosts:
            self._look()
            return "the memory of the hosts is not known yet"
        order = list(self._waiting)
        loads = [Load(job, self._expected(job, self._waiting[job].need)) for job in order]
        decided = admit(self._hosts, self._started(), loads)
        if pipeline_id in decided.admitted:
            self._needs[pipeline_id] = self._waiting.pop(pipeline_id).need
            return ""
        ahead = order.index(pipeline_id) - len(decided.admitted)
        if ahead <= 0:
            return decided.why
        return f"{ahead} job{'s' if ahead > 1 else ''} before it wait{'' if ahead > 1 else 's'} for memory"

    def _seen(self, found: Mapping[str, HostMemory]) -> None:
        core, cap = self._core, self._core.settings.host_memory
        if self._asked_at is not None:
            self._took_s, self._asked_at = core.clock.time() - self._asked_at, None
        processes = {job: self._processes(job) for job in core.known.jobs}
        used = {process: count for memory in found.values() for process, count in memory.used.items()}
        self._loads = {job: _by_host(named.values(), used) for job, named in processes.items()}
        self._needs = {job: need for job, need in self._needs.items() if job in core.known.jobs}
        self._trained &= core.known.jobs.keys()
        self._found = {
            job: self._found.get(job, load)
            for job, load in self._loads.items()
            if job not in self._needs and (load or job in self._found)
        }
        self._hosts = dict(found)
        if cap is not None:
            for name, host in found.items():
                left = cap - sum(load.get(name, 0) for load in self._loads.values())
                self._hosts[name] = HostMemory(min(host.total, cap), min(host.available, left))
        for job in self._needs:
            self._learn(job, processes[job], used)
        self._relieve()

    def _learn(self, job: str, processes: Mapping[tuple[str, int], Process], used: Mapping[Process, int]) -> None:
        """Once it has trained: before that, a job has not used yet what it will."""
        if job not in self._trained:
            trained = any(
                record.event == "released" and record.lease.phase not in (Phase.INITIALIZATION, Phase.ROLLOUT)
                for record in self._core.known.log.since(job, 0)
            )
            if not trained:
                return
            self._trained.add(job)
        for (cluster, _), process in processes.items():
            key = (self._needs[job].kind, cluster)
            self._learnt[key] = max(self._learnt.get(key, 0), used.get(process, 0))

    def _relieve(self) -> None:
        core = self._core
        if core.clock.time() < self._relieved_until:
            return
        going = {job for job, known in core.known.jobs.items() if known.ending is not None}
        found = overload(self._hosts, [load for load in self._started() if load.job not in going])
        if found is not None:
            self._relieved_until = core.clock.time() + _RELIEVED_S
            core.end(found[0], found[1])

    def _started(self) -> list[Load]:
        """In the order in which they started; those that did not ask, such as attached programs, came first."""
        others = [Load(job, found, self._loads.get(job, {})) for job, found in self._found.items()]
        asked = [Load(job, self._expected(job, n), self._loads.get(job, {})) for job, n in self._needs.items()]
        return others + asked

    def _expected(self, job: str, need: StartNeed) -> dict[str, int]:
        """Bytes by host: of a process for each device of each cluster, and of the job's program."""
        expected: dict[str, int] = {}
        state = self._core.state
        for cluster in state.registrations[job].clusters if job in state.registrations else ():
            for device in (state.device(number) for number in cluster.devices):
                if device is not None:
                    if not expected:  # where its first device is, its program is counted
                        expected[device.node_id] = self._of_process(need, "")
                    expected[device.node_id] = expected.get(device.node_id, 0) + self._of_process(need, cluster.name)
        return expected

    def _of_process(self, need: StartNeed, cluster: str) -> int:
        return self._learnt.get((need.kind, cluster)) or need.stated.get(cluster, 0)

    def _processes(self, job: str) -> dict[tuple[str, int], Process]:
        """The job's program (its cluster is "") and workers, by cluster and rank."""
        state = self._core.state
        names = ["", *(c.name for c in state.registrations[job].clusters)] if job in state.registrations else []
        return {(name, rank): p for name in names for rank, p in state.holders(job, name).items()}


def _by_host(processes: Iterable[Process], used: Mapping[Process, int]) -> dict[str, int]:
    loads: dict[str, int] = {}
    for process in dict.fromkeys(processes):
        if process in used:
            loads[process.node_id] = loads.get(process.node_id, 0) + used[process]
    return loads
