"""A flow's measurements on one kind of machine, as a file: tables of its parts, and what switching costs."""

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlix.flow.planner import Component, Edge, Graph, Point, Table
from rlix.protocol.errors import SpecError

logger = logging.getLogger(__name__)

FOLDER = "profiles"


@dataclass(frozen=True, slots=True)
class PartProfile:
    """Points of a part's table, and the seconds that its state needs onto its devices and off them.

    `measured`: what they are points of (its class and method, and on what it ran); "": nobody said.
    """

    points: tuple[Point, ...]
    load_s: float = 0.0
    offload_s: float = 0.0
    measured: str = ""

    @property
    def table(self) -> Table:
        return Table(self.points)


@dataclass(frozen=True, slots=True)
class Profile:
    """By part; `transfers` by pair of parts: seconds for a batch, and for each item. `device_bytes`: of a device."""

    flow: str
    machine: str
    parts: Mapping[str, PartProfile]
    transfers: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    device_bytes: float = float("inf")

    def scaled(self, factors: Mapping[str, float]) -> "Profile":
        """The same with some parts' times multiplied: what drifted."""
        parts = {
            name: replace(
                part, points=tuple(replace(p, seconds=p.seconds * factors.get(name, 1.0)) for p in part.points)
            )
            for name, part in self.parts.items()
        }
        return replace(self, parts=parts)

    def describe(self) -> str:
        """Each part's table in a line: what was measured, and how wrong it is between."""
        lines = [f"{self.flow} on {self.machine}"]
        for name, part in self.parts.items():
            table, held = part.table, part.table.hold_out()
            widths = ", ".join(map(str, table.widths))
            loads = sorted({point.load for point in table.points})
            error = f"{held.mean:.1%} mean, {held.worst:.1%} worst" if held else "not known (too few points)"
            lines.append(
                f"  {name}: {len(table.points)} points (ranks {widths}; {loads[0]}–{loads[-1]} items a rank), held-out "
                f"error {error}; load {part.load_s:.3f} s, offload {part.offload_s:.3f} s"
            )
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        value = {
            "flow": self.flow,
            "machine": self.machine,
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "transfers": [[*pair, *cost] for pair, cost in self.transfers.items()],
            "device_bytes": self.device_bytes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(value, indent=1))
        new.replace(path)

    @staticmethod
    def read(path: Path | str, command: str = "rlix profile") -> "Profile":
        """As `write` kept it; of another kind of machine it is logged as a warning.

        Args:
            command: with which a user makes one.

        Raises:
            SpecError: there is none, or the file is no profile.
        """
        try:
            value = json.loads(Path(path).read_text())
            parts = {
                name: PartProfile(**{**part, "points": tuple(Point(**p) for p in part["points"])})
                for name, part in value["parts"].items()
            }
            transfers = {(a, b): (fixed, each) for a, b, fixed, each in value["transfers"]}
            for part in parts.values():
                part.table  # noqa: B018 (points that are no measurements are refused here)
            room = float(value.get("device_bytes", "inf"))
            found = Profile(value["flow"], value["machine"], parts, transfers, room)
        except FileNotFoundError:
            raise SpecError(f"there is no profile {path}: run `{command}` first") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(f"{path} is not a profile ({error}): delete it and run `{command}` again") from error
        if found.machine != (here := machine()):
            logger.warning(
                "%s was measured on %s, and this is %s: by it, plans for here are guesses", path, found.machine, here
            )
        return found


def graph_of(profile: Profile, parts: Mapping[str, Mapping[str, int | None]], edges: list[Edge]) -> Graph:
    """The planner's graph: `parts` are the `Component` arguments of each part that are no costs.

    Raises:
        SpecError: a part was not profiled.
    """
    missing = [name for name in parts if name not in profile.parts]
    if missing:
        raise SpecError(f"the profile of {profile.flow} has no part {', '.join(missing)}: run `rlix profile` again")
    components = []
    for name, shape in parts.items():
        known = profile.parts[name]
        components.append(
            Component(name, known.table, load_s=known.load_s, offload_s=known.offload_s, **shape)  # type: ignore[arg-type]
        )
    moved = []
    for edge in edges:
        fixed, each = profile.transfers.get((edge.source, edge.target), (edge.latency_s, edge.item_s))
        moved.append(Edge(edge.source, edge.target, fixed, each, edge.rounds))
    return Graph(components, moved)


def machine() -> str:
    """What tables are kept apart by: the kind of machine, and the GPUs in it."""
    name = f"{platform.machine()}-{os.cpu_count()}cpu"
    try:
        import torch

        if torch.cuda.is_available():
            return f"{name}-{torch.cuda.device_count()}x{torch.cuda.get_device_name(0)}".replace(" ", "-")
    except ImportError:
        pass
    return name


def path_of(home: Path, flow: str) -> Path:
    return home / FOLDER / machine() / f"{flow}.json"


def halves(most: int, least: int = 1) -> tuple[int, ...]:
    """`most`, its half, and so on down to about `least`."""
    found = [most]
    while found[-1] // 2 >= max(1, least):
        found.append(found[-1] // 2)
    return tuple(sorted(found))
