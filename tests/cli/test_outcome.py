"""What is said of runs when they have ended."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rlix.cli.outcome import print_json, print_report
from tests.cli.fakes import job_status


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"state": "finished"}, "{runs}/sort"),
        ({"state": "stopped"}, "{runs}/sort; `rlix run --resume` goes on from its newest checkpoint, after step 7"),
        (
            {"state": "stopped", "moved_to": "{runs}/sort-20260101-000000"},
            "{runs}/sort-20260101-000000; it did no step, so the run before it is in {runs}/sort again: "
            "`rlix run --resume` goes on from its newest checkpoint, after step 7",
        ),
        ({"state": "stopped", "error": "stopped by `rlix stop`"}, "{runs}/sort"),  # which says it
    ],
)
def test_the_end_says_where_a_stopped_run_goes_on(fields: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "sort" / "checkpoints" / "step_7").mkdir(parents=True)
    status = job_status("sort", **{name: value.format(runs=tmp_path) for name, value in fields.items()})
    out = StringIO()
    folder = Path(status.moved_to or tmp_path / "sort")
    print_report(None, [status], [folder], tmp_path, Console(file=out, width=200))
    assert out.getvalue() == f"sort: {status.state}, {said.format(runs=tmp_path)}\n"


def test_two_jobs_of_one_name_are_two_in_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    statuses = [job_status(pipeline_id="ft_1", state="finished"), job_status(pipeline_id="ft_2", state="failed")]
    print_json(None, statuses, Path())
    states = json.loads(capsys.readouterr().out)["states"]
    assert [(each["name"], each["pipeline_id"], each["state"]) for each in states] == [
        ("sort", "ft_1", "finished"),
        ("sort", "ft_2", "failed"),
    ]
