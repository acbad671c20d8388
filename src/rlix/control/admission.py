"""Which jobs may start, and which must end, by the memory of their hosts. Pure: bytes in, decisions out.

The first part of a queue: submitted, admitted, running, ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlix.node.memory import HostMemory

RESERVE = 0.10
"""Of a host's memory, what no job is admitted to: for what grows beyond what was expected, and for everybody else."""
LEAST = 0.05
"""Of a host's memory: when less is available a job must end, before the kernel ends whatever it likes."""


@dataclass(frozen=True, slots=True)
class Load:
    """A job, with the bytes that it is expected to use at most, and those that it uses now, by host."""

    job: str
    expected: Mapping[str, int]
    used: Mapping[str, int] = field(default_factory=dict)

    def over(self, host: str) -> int:
        """By how much it uses more than was expected; below 0, what it may still come to use."""
        return self.used.get(host, 0) - self.expected.get(host, 0)


@dataclass(frozen=True, slots=True)
class Admission:
    """The jobs that may start now, and why the first of the others waits ("" when none does)."""

    admitted: tuple[str, ...] = ()
    why: str = ""


def admit(hosts: Mapping[str, HostMemory], started: Sequence[Load], waiting: Sequence[Load]) -> Admission:
    """In the order in which they wait: nobody overtakes one for whom there is not enough yet.

    What started jobs may still come to use is spoken for. When none has started the first one may, whatever is expected
    of it: it will not find more. Of a host that says nothing nothing is known, and nobody waits for it.
    """
    free = {
        name: host.available - int(RESERVE * host.total) + sum(min(0, load.over(name)) for load in started)
        for name, host in hosts.items()
    }
    admitted: list[str] = []
    for load in waiting:
        short = [name for name, wanted in load.expected.items() if name in free and wanted > free[name]]
        if short and (started or admitted):
            return Admission(
                tuple(admitted), _short_of(load.expected[short[0]], free[short[0]], len(hosts) > 1, short[0])
            )
        admitted.append(load.job)
        for name, wanted in load.expected.items():
            if name in free:
                free[name] -= wanted
    return Admission(tuple(admitted))


def overload(hosts: Mapping[str, HostMemory], started: Sequence[Load]) -> tuple[str, str] | None:
    """The job that must end because a host has hardly any memory left, and why; None while all have enough.

    It is the one furthest above what was expected of it; where none is above, the last of those that started.
    """
    for name, host in hosts.items():
        there = [load for load in started if load.used.get(name, 0) > 0]
        if host.available >= LEAST * host.total or not there:
            continue
        worst = max(enumerate(there), key=lambda pair: (max(0, pair[1].over(name)), pair[0]))[1]
        used, expected = gigabytes(worst.used[name]), gigabytes(worst.expected.get(name, 0))
        left = f"its host had {gigabytes(max(0, host.available))} of {gigabytes(host.total)} of memory left"
        return worst.job, f"{left}, and it used {used} (expected: {expected})"
    return None


def gigabytes(count: int) -> str:
    """ "1.5 GB"."""
    return f"{count / 1e9:.1f} GB"


def _short_of(wanted: int, free: int, several: bool, host: str) -> str:
    where = f" on node {host[:12]}" if several else ""
    return f"needs about {gigabytes(wanted)} of memory{where}, {gigabytes(max(0, free))} are free"
