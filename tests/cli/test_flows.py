"""`rlix plan` on tables that are there already; measuring them is what examples/flow.py does."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlix.cli.flows import load_flow
from rlix.cli.main import app
from rlix.cli.plan_picture import Drawn, print_picture
from rlix.control.connect import _job_config
from rlix.flow.planner import PartPlan, Plan, Planned, Point, SegmentPlan, StagePlan
from rlix.flow.profiler.profile import PartProfile, Profile, path_of
from rlix.protocol.errors import SpecError

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "flow.py")


def test_a_flow_is_planned_from_its_tables(rlix_home: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    missing = run(app, ["plan", f"{EXAMPLE}:flow"])
    assert missing.exit_code == 2
    points = tuple(Point(w, w * n, 0.01 * n) for w in (1, 4) for n in (1, 16, 64))
    parts = dict.fromkeys(("guess", "judge", "learn"), PartProfile(points))
    Profile("guess", "here", parts).write(path_of(rlix_home, "guess"))
    planned = run(app, ["plan", EXAMPLE, "--gpus", "4"])
    assert planned.exit_code == 0, planned.output
    assert "collocated: guess on 4 → judge on 4 → learn on 4" in planned.output
    assert "runner-up" in planned.output
    assert "\x1b" not in planned.output  # of no use but to a terminal
    drawn = run(app, ["plan", EXAMPLE, "--html", f"{tmp_path}/plan.html"])
    assert drawn.exit_code == 0, drawn.output
    page = (tmp_path / "plan.html").read_text()
    assert (page.count("src="), page.count("href="), page.count("http")) == (0, 0, 0)  # it loads nothing
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["phases"] == ["guess", "judge", "learn"]
    assert [device["label"] for device in data["devices"]] == ["0–3"]
    assert data["spans"][-1][5] == pytest.approx(data["end"])
    assert run(app, ["plan", EXAMPLE, "--html", f"{tmp_path}/plan.html/there"]).exit_code == 2
    assert "disaggregated: " in run(app, ["plan", EXAMPLE, "--mode", "disaggregated"]).output
    assert run(app, ["plan", EXAMPLE, "--mode", "fast"]).exit_code == 2
    for gib in ("0", "-1", "nan"):
        refused = run(app, ["plan", EXAMPLE, "--memory", gib])
        assert (refused.exit_code, "must be above 0" in refused.output) == (2, True)


def test_a_terminal_shows_the_plan_as_a_picture() -> None:
    first = StagePlan((PartPlan("make", 1, 0, 1, 1.0, 3 * 2**30),), 0, 1, 1.0)
    second = StagePlan((PartPlan("train", 3, 1, 3, 1.0),), 1, 3, 1.0)
    segment = SegmentPlan((first, second), 8, 3.0)
    plan = Plan((segment,), 16, 4, 3.0, 0.0, resident=True)
    drawn = Drawn("mine", Planned(plan, ()), {"train": ("make",)}, {"make": 3 * 2**30})
    console = Console(force_terminal=True, no_color=False, width=72, file=io.StringIO(), record=True)
    print_picture(drawn, console)
    rows = console.export_text().splitlines()
    assert rows[:2] == [
        f"  device 0 {' make':20}{'▏make':20}{'·' * 20}",
        f"device 1–3 {'·' * 20}{' train':20}{'▏train':20}",
    ]
    assert any(row.split()[:1] == ["make"] and "3.00 GiB" in row for row in rows)
    plain = Console(file=io.StringIO(), record=True)
    print_picture(drawn, plain)
    assert plain.export_text() == ""


def test_workers_can_import_the_file_from_wherever_the_command_was_typed(tmp_path: Path) -> None:
    (tmp_path / "far_flow.py").write_text(Path(EXAMPLE).read_text())
    load_flow(f"{tmp_path}/far_flow.py")
    assert str(tmp_path) in _job_config()._py_driver_sys_path


def test_a_flow_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_flow("nowhere.py:flow")
    (tmp_path / "empty_flow.py").write_text("")
    with pytest.raises(SpecError, match="defines no flow 'mine'"):
        load_flow(f"{tmp_path}/empty_flow.py:mine")
    (tmp_path / "broken_flow.py").write_text("import no_such_module\n")
    with pytest.raises(SpecError, match=r"cannot be imported: ModuleNotFoundError: .*broken_flow\.py:1"):
        load_flow(f"{tmp_path}/broken_flow.py")
    (tmp_path / "eager_flow.py").write_text(
        "from rlix.flow import Flow, FlowWorker\nclass A(FlowWorker):\n    def run(self, items): return items\n"
        "flow = Flow('f', [A])\nflow.run([1], gpus=1)\n"
    )
    with pytest.raises(SpecError, match=r"eager_flow\.py cannot be imported: .* under `if __name__ .*_flow\.py:5"):
        load_flow(f"{tmp_path}/eager_flow.py")
