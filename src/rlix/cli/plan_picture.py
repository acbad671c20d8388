"""A plan as a picture: devices as rows, parts as blocks in the order of time, in the terminal and as a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlix.cli.view import JOB_STYLES
from rlix.flow.planner import Mode, PartPlan, Plan, Planned
from rlix.flow.planner.plan import SLACK
from rlix.flow.planner.timeline import After, Block, blocks, lanes
from rlix.monitor.plan_page import PlanPage, write_plan_page
from rlix.monitor.tables import TableData, duration, percent, render_text
from rlix.protocol.errors import SpecError

_MOVING, _IDLE = "grey50", "grey23"
_LEAST_WIDTH = 48


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plan to draw. `need`: bytes of each part on its fullest device, where they are known."""

    name: str
    planned: Planned
    after: After
    need: Mapping[str, float]

    @property
    def plan(self) -> Plan:
        return self.planned.best


def print_picture(drawn: Drawn, console: Console) -> None:
    """Nothing where colours cannot be told apart: there the words say it."""
    plan, found = drawn.plan, blocks(drawn.plan, drawn.after)
    if not console.is_terminal or console.no_color or not plan.seconds:
        return
    rows = lanes(plan.devices, found)
    margin = max(len(label) for label, _ in rows) + len("device ")
    width = max(_LEAST_WIDTH, console.width - margin - 2)
    styles = _styles(found)
    for label, on in rows:
        name = label if label == "CPU" else f"device {label}"
        console.print(Text(f"{name:>{margin}} ").append(_row(on, plan.seconds, width, styles)), soft_wrap=True)
    scale = f"0{'':>{width}}"
    for share in (0.25, 0.5, 0.75, 1.0):
        mark, at = _seconds(share * plan.seconds), round(share * width)
        at = at - len(mark) if share == 1.0 else at - len(mark) // 2
        scale = f"{scale[:at]}{mark}{scale[at + len(mark) :]}"
    console.print(Text(f"{'':>{margin}} {scale.rstrip()}", style="dim"), soft_wrap=True)
    legend = Text(" " * (margin + 1))
    for name, style in styles.items():
        legend.append("  ", style=f"on {style}").append(f" {name or 'moving states and items'}   ")
    console.print(legend, soft_wrap=True)
    console.print()
    console.print(render_text([part_table(drawn)]))


def write_page(drawn: Drawn, explanation: str, path: Path) -> None:
    """Raises SpecError: the file cannot be written."""
    plan, found = drawn.plan, blocks(drawn.plan, drawn.after)
    names = list(_styles(found))
    rows = lanes(plan.devices, found)
    page = PlanPage(
        name=drawn.name,
        subtitle=f"{plan.mode}: {plan.shape}",
        tiles=_tiles(drawn),
        tables=(part_table(drawn), _mode_table(drawn.planned)),
        explanation=explanation,
        end=plan.seconds,
        lanes=tuple(label for label, _ in rows),
        names=tuple(names),
        spans=tuple(
            (i, names.index(b.name), b.start, b.end, None if b.chunk is None else b.chunk + 1)
            for i, (_, on) in enumerate(rows)
            for b in sorted(on, key=lambda block: block.start)
        ),
    )
    try:
        write_plan_page(page, path)
    except OSError as error:
        raise SpecError(f"--html {path}: cannot be written ({error.strerror})") from error


def part_table(drawn: Drawn) -> TableData:
    """What each part takes of a step, and of its devices."""
    rows = []
    for part, calls in _calls(drawn.plan):
        last, need = part.first + part.devices - 1, drawn.need.get(part.name, 0.0)
        where = f"{part.first}–{last}" if part.devices > 1 else f"{part.first}" if part.devices else "CPU"
        times = _seconds(part.seconds), _seconds(part.seconds * calls)
        memory = f"{need / 2**30:.2f} GiB" if need else "–"
        rows.append((part.name, where, f"{part.ranks}", f"{calls}", *times, memory))
    columns = ("part", "devices", "ranks", "calls", "a call", "a step", "memory a device")
    return TableData("Parts", columns, tuple(rows))


def _calls(plan: Plan) -> Iterator[tuple[PartPlan, int]]:
    """Every part, and how often it is called in a step."""
    for segment in plan.segments:
        for stage in segment.stages:
            rounds = {name: loop.rounds * loop.slices for loop in stage.loops for name in loop.parts}
            for part in stage.parts:
                yield part, plan.items // segment.chunk * rounds.get(part.name, 1)


def _mode_table(planned: Planned) -> TableData:
    best, found = planned.best.seconds, [(mode, planned.of(mode)) for mode in Mode]
    rows = [(str(mode), _seconds(p.seconds), f"{p.seconds / best:.2f}", p.shape) for mode, p in found if p is not None]
    return TableData("Fastest of each mode", ("mode", "a step", "times the plan", "how"), tuple(rows))


def _tiles(drawn: Drawn) -> tuple[tuple[str, str, str], ...]:
    plan, other = drawn.plan, drawn.planned.runner_up
    busy = sum(part.devices * part.seconds * calls for part, calls in _calls(plan)) / (plan.seconds * plan.devices)
    tiles = [
        ("A step", duration(plan.seconds), f"of {plan.items} items"),
        ("Devices at work", percent(busy), f"of {plan.devices}, moving not counted"),
    ]
    if other is not None:
        times, how = other.seconds / plan.seconds, f"{other.mode}, {duration(other.seconds)}"
        tiles.append(("Runner-up" if times >= 1 - SLACK else "In any mode", f"{times:.2f} ×", how))
    return tuple(tiles)


def _row(on: Sequence[Block], end: float, width: int, styles: Mapping[str, str]) -> Text:
    """Each cell is what works at its middle; a block that has room begins with a line and its name."""
    row, at, cells = Text(), 0, [_at(on, (cell + 0.5) * end / width) for cell in range(width)]
    while at < width:
        block, size = cells[at], 1
        while at + size < width and cells[at + size] is block:
            size += 1
        if block is None:
            row.append("·" * size, style=_IDLE)
        else:
            label = f"{'▏' if block.chunk and size > 1 else ' '}{block.name}"
            label = label if len(label) <= size else label[:size] if size > 3 else label[:1]
            row.append(f"{label:<{size}}"[:size], style=f"bold white on {styles[block.name]}")
        at += size
    return row


def _at(on: Sequence[Block], time: float) -> Block | None:
    return next((block for block in on if block.start <= time < block.end), None)


def _styles(found: Sequence[Block]) -> dict[str, str]:
    """By name; a circle's parts are named together."""
    names = list(dict.fromkeys(block.name for block in found if block.name))
    styles = {name: JOB_STYLES[i % len(JOB_STYLES)] for i, name in enumerate(names)}
    return styles | ({"": _MOVING} if any(not block.name for block in found) else {})


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)
