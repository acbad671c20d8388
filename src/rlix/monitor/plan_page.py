"""The page of a plan: what is to come, drawn as a report draws what was."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlix.monitor.report import embed
from rlix.monitor.tables import TableData

_SCRIPTS = ("common.js", "timeline.js")
_START = "const charts = [];\n"


@dataclass(frozen=True, slots=True)
class PlanPage:
    """`spans`: number of the lane and of the name, from when to when, and of which chunk (None: there is one).
    A name "": states and items are moved."""

    name: str
    subtitle: str
    tiles: tuple[tuple[str, str, str], ...]
    tables: tuple[TableData, ...]
    explanation: str
    end: float
    lanes: tuple[str, ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int, float, float, int | None], ...]


def render_plan(page: PlanPage) -> str:
    """It loads nothing from anywhere: styles, script and data are inside."""
    assets = files("rlix.monitor") / "assets"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    scripts = [(assets / name).read_text() for name in _SCRIPTS]
    return environment.from_string((assets / "plan.html.j2").read_text()).render(
        page=page,
        style=Markup((assets / "report.css").read_text()),
        script=Markup("\n".join([*scripts, _START, (assets / "start.js").read_text()])),
        data=Markup(embed(_data(page))),
    )


def write_plan_page(page: PlanPage, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_plan(page))


def _data(page: PlanPage) -> dict[str, Any]:
    """For the script of the timeline: a name is a phase to it."""
    return {
        "end": page.end,
        "left": 16 + 8 * max(len(lane) for lane in page.lanes),
        "counted": "chunk",
        "devices": [{"id": i, "label": lane, "kind": ""} for i, lane in enumerate(page.lanes)],
        "phases": page.names,
        "spans": [
            [lane, 0, name, "busy" if page.names[name] else "load", round(start, 6), round(end, 6), chunk]
            for lane, name, start, end, chunk in page.spans
        ],
        "jobs": [{"name": page.name, "events": []}],
    }
