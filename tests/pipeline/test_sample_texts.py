"""Sample texts: what is written of a step, and that the report shows it."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.monitor.report import build_report, render_html
from rlix.pipeline.sample_texts import spread
from tests.monitor.synthetic import job_event
from tests.pipeline.in_process import InProcess
from tests.pipeline.test_composition import job
from tests.pipeline.training_jobs import rows


@given(st.integers(0, 200), st.integers(0, 20))
def test_as_far_apart_as_they_can_be(length: int, count: int) -> None:
    chosen = spread(length, count)
    assert len(chosen) == min(length, count)
    assert all(0 <= i < length for i in chosen)
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("source", ["task", "environment"])
def test_a_few_samples_of_every_other_step_and_of_evaluations(source: str, tmp_path: Path) -> None:
    given = {"evaluation": {"every": 4, "prompts": 2}, "logging": {"samples": 3, "samples_every": 2}}
    pipeline = InProcess(job(source, "on_policy", "grpo", tmp_path, **given), tmp_path)
    pipeline.run_steps()
    found = rows(tmp_path / "samples.jsonl")
    assert [(row["step"], row["evaluation"]) for row in found] == [(0, False)] * 3 + [(2, False)] * 3 + [(3, True)] * 2
    assert all(row["prompt"] and row["completion"] and row["end"] for row in found)
    if source == "task":
        assert all(row["prompt"].startswith("<bos>") and row["prompt"].endswith(">") for row in found)

    pipeline.folder.event(job_event("started", 0))
    pipeline.folder.write_spec("name: tiny\n")
    page = render_html(build_report([tmp_path]))
    assert "What tiny said" in page
    assert page.count("3, evaluation") == 2
    assert "&lt;bos&gt;" in page or source == "environment"


def test_none_are_written_when_none_are_wanted(tmp_path: Path) -> None:
    InProcess(job("task", "on_policy", "grpo", tmp_path, logging={"samples": 0}), tmp_path).run_steps()
    assert not (tmp_path / "samples.jsonl").exists()
