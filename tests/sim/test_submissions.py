"""People who submit for weeks, through the queue's own decisions."""

import json
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlix.cli.simulate import simulate
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Origin
from rlix.scheduler.queue.jobs import Job
from rlix.sim import submissions
from rlix.sim.submissions import QUEUES, QueueSimulation, read_submissions, simulate_queue

USER = {"name": "ann", "team": "a", "jobs_per_day": 4.0, "gpus": [2, 4], "hours": 3.0}
SMALL: dict[str, Any] = {
    "name": "small",
    "gpus": 8,
    "days": 4,
    "teams": {"a": {"guaranteed": 4}, "b": {"guaranteed": 2, "maximum": 6}},
    "users": [USER, USER | {"name": "bob", "team": "b", "jobs_per_day": 8.0, "from_hour": 9, "to_hour": 17}],
}


def read(**changes: Any) -> submissions.Submissions:
    return read_submissions(SMALL | changes, Origin("small"))


def test_a_borrower_makes_room_for_who_has_a_guarantee_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """b borrows all 8 GPUs for 10 hours at 0; a comes at 1 h with 4 for 2 hours, within its guarantee.

    b is stopped after 60 s, a runs until 3 h and a minute, and b goes on with what is left and 300 s of it again.
    """
    b = Job(1, "b-1", "bob", "b", 8, 0.0, limit_s=80_000.0)
    a = Job(2, "a-2", "ann", "a", 4, 3600.0, limit_s=9000.0)
    monkeypatch.setattr(submissions, "draw", lambda *_: [(b, 36_000.0), (a, 7200.0)])
    simulation = QueueSimulation(read(teams={"a": {"guaranteed": 4}}), QUEUES["rlix"], 0)
    simulation.run()
    first, second = simulation.runs[1], simulation.runs[2]
    assert (second.started, second.ended) == (3660.0, 3660.0 + 7200.0)
    assert first.ended == 3660.0 + 7200.0 + (36_000.0 - 3660.0 + 300.0)
    assert (simulation.preemptions, simulation.lost_s) == (1, 8 * 300.0)
    assert first.gpu_s == 8 * (36_000.0 + 300.0)
    row = simulate_queue(read(), "first-come")
    assert (row.jobs, row.wait_max_h, row.used_share) == (
        2,
        pytest.approx(9.0),
        pytest.approx(316_800 / (8 * 4 * 86400)),
    )


@settings(max_examples=12)
@given(st.integers(0, 1000), st.sampled_from(sorted(QUEUES)))
def test_every_job_ends_and_nothing_is_given_twice(seed: int, policy: str) -> None:
    """Whoever decides: each job has had GPUs for its work and what it lost, and never are more lent than there are."""
    workload = read()
    lent: list[int] = []

    def watched(snapshot: Any) -> Any:
        lent.append(sum(job.gpus for job in snapshot.jobs if job.active))
        return QUEUES[policy](snapshot)

    simulation = QueueSimulation(workload, watched, seed)
    simulation.run()
    for run in simulation.runs.values():
        lost = run.job.requeues * workload.restart_s
        assert run.ended is not None and run.gpu_s == pytest.approx(run.job.gpus * (run.work_s + lost))
    assert policy == "split" or max(lent, default=0) <= workload.gpus


def test_the_command_shows_policies_side_by_side() -> None:
    app = typer.Typer()
    app.command()(simulate)
    found = CliRunner().invoke(app, ["team-month", "--policy", "first-come", "--json"])
    (row,) = json.loads(found.stdout)
    assert (row["policy"], row["jobs"], [team["team"] for team in row["teams"]]) == (
        "first-come",
        2699,
        ["models", "sweeps", "tools"],
    )
    shown = CliRunner().invoke(app, ["team-month", "--policy", "first-come"]).output
    assert "2699 jobs on 64 GPUs" in shown and "By team" in shown
    refused = CliRunner().invoke(app, ["team-month", "--policy", "slots"])
    assert refused.exit_code == 2 and "unknown for people who submit" in refused.output


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"users": [USER | {"gpus": [16]}]}, "users.0.gpus: 16 is more than the 8"),
        ({"users": [USER | {"priority": "urgent"}]}, "users.0.priority"),
        ({"users": [USER | {"from_hour": 9, "to_hour": 8}]}, "users.0.to_hour"),
        ({"teams": {"a": {"guaranteed": 9}}}, "teams: 9 GPUs are guaranteed"),
        ({"users": []}, "users"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_mistake_names_the_field(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError) as error:
        read(**changes)
    assert why in str(error.value)
