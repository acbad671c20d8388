import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlix.cli.jobs import select
from rlix.cli.programs import find_programs
from rlix.control.announcement import python_path
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Cluster, Demand, PipelineStatus
from rlix.protocol.types import Phase
from tests.cli.fakes import FakeJob, control, job_status, lease


def job(name: str, pipeline_id: str, state: str = "running", run_dir: str | None = None) -> Any:
    made = FakeJob(name, [job_status(name, pipeline_id, state)])
    made.pipeline_id = pipeline_id  # type: ignore[attr-defined]
    made.run_dir = run_dir  # type: ignore[attr-defined]
    return made


SORT, ENDED, OTHER = job("sort", "ft_1"), job("copy", "ft_2", "stopped"), job("copy", "ft_4")
COPY = job("copy", "ft_3", run_dir="/a/copy")


def test_jobs_are_named_by_name_or_id() -> None:
    jobs = [SORT, ENDED, COPY]
    assert select(jobs, ["copy", "ft_1", "ft_3"]) == [COPY, SORT]  # each once, and of one name the one that runs
    assert select(jobs, ["ft_2"]) == [ENDED]
    assert select(jobs, []) == [SORT, COPY]


def test_a_name_that_does_not_say_which_job_is_refused_with_those_there_are() -> None:
    said = (
        "copy: several jobs have that name, name one by its id; there are: ft_3 (copy, step 3/10, in /a/copy), "
        "ft_4 (copy, step 3/10)"
    )
    with pytest.raises(SpecError, match=re.escape(said)):
        select([SORT, COPY, OTHER], ["copy"])
    with pytest.raises(SpecError, match=r"up: no such job runs here; there are: ft_1 \(sort, step 3/10\)"):
        select([SORT], ["up"])
    with pytest.raises(SpecError, match="there are: none"):
        select([], ["up"])


def test_an_attached_program_is_a_job_for_as_long_as_it_is_registered() -> None:
    train = Cluster("actor_train", 1, (0, 1))
    pipelines = (
        PipelineStatus("ft_1", (train,), (), Demand(0), name="sort"),
        PipelineStatus("job_2", (train,), ("actor_train",), Demand(0), name="script"),
        PipelineStatus("job_3", (train,), (), Demand(0)),
    )
    holds = lease(7, "job_3", (0, 1), phase=Phase.ACTOR_TRAINING)
    now = [replace(control(holds), pipelines=pipelines), control()]
    why = {"job_2": "its program ended", "job_3": "its program, process 5, died"}
    script, nameless = find_programs(lambda: now[0], {"ft_1"}, lambda _, pipeline_id: why[pipeline_id])
    assert select([script, nameless], ["script", "job_3"]) == [script, nameless]
    assert (script.status().state, script.status().phase) == ("running", "waiting for actor_train")
    assert (nameless.name, nameless.status().phase) == ("job_3", "actor_training")
    now.pop(0)
    assert script.status().state == "finished"
    assert (nameless.status().state, nameless.status().error) == ("failed", why["job_3"])
    why["job_2"] = "stopped by `rlix stop`"
    assert (script.status().state, script.status().error) == ("stopped", why["job_2"])


def test_python_path_is_meant_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["examples", "", "/elsewhere"]))
    assert python_path() == [str(tmp_path / "examples"), "/elsewhere"]
