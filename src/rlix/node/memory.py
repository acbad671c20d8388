"""The memory of a machine: what there is, what processes use, and who goes first when there is none."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlix.node.process import start_time
from rlix.protocol.messages import Process

_CGROUPS = Path("/sys/fs/cgroup")
KEPT = 0
"""The score of processes on which others depend, for the kernel."""


def set_oom_score(score: int) -> None:
    """How soon the kernel ends this process when memory is short: from 0 to 1000, which is first.

    Ray gives 1000 to whatever it starts, the control plane's actors too.
    """
    with contextlib.suppress(OSError):  # another system, or a container that does not let us
        Path("/proc/self/oom_score_adj").write_text(str(score))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of a machine, or of the container this is: in all, what whoever asks for it gets without taking it from
    others, and of each process, with whatever it has started."""

    total: int
    available: int
    used: Mapping[Process, int] = field(default_factory=dict)


def host_memory(processes: Iterable[Process], proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> HostMemory:
    """What there is now. A page that several processes share counts to each for its part."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    used = {p: _with_descendants(p.pid, children, proc) for p in processes if start_time(p.pid) == p.started}
    info = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(info[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit, folder, usage in memory_groups(read_text(proc / "self" / "cgroup"), cgroups):
        total = min(total, limit)
        available = min(available, limit - int(read_text(folder / usage) or 0) + _reclaimable(folder))
    return HostMemory(total, available, used)


def _with_descendants(pid: int, children: Mapping[int, Sequence[int]], proc: Path) -> int:
    return _proportional(proc / str(pid)) + sum(_with_descendants(c, children, proc) for c in children.get(pid, ()))


def _proportional(folder: Path) -> int:
    """Bytes; 0 of a process that has ended or is another user's."""
    try:
        text = (folder / "smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def _parent(folder: Path) -> int | None:
    try:
        text = (folder / "stat").read_bytes()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[1])  # the command's name before may hold anything


def memory_groups(groups: str | None = None, root: Path = _CGROUPS) -> Iterator[tuple[int, Path, str]]:
    """The control groups (version 1 or 2) with a limit that this process is in: the limit in bytes, the group's folder,
    and the name of the file there that says how much is used.

    Args:
        groups: what /proc/self/cgroup says; default: just that.
    """
    for line in (read_text(Path("/proc/self/cgroup")) if groups is None else groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = mount / path.strip("/")
        for folder in (own, *own.parents):  # in a container, the group's own folder is the root
            if folder.is_relative_to(mount) and (said := read_text(folder / limit).strip()).isdigit():
                yield int(said), folder, usage


def read_text(path: Path) -> str:
    """ "" where there is nothing to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _reclaimable(group: Path) -> int:
    """Pages of files: they count as used, and go when somebody needs the room."""
    stat = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
    return sum(int(stat.get(f"total_{kind}") or stat.get(kind) or 0) for kind in ("inactive_file", "active_file"))
