"""The manual says what the code does."""

import json
import re
import runpy
from pathlib import Path

import pytest

from rlix.pipeline.spec.file import read_yaml
from rlix.pipeline.spec.job import JobSpec

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_job_spec_reference_is_current() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "job_spec.py"))
    assert script["TARGET"].read_text() == script["reference"](), "run `python docs/job_spec.py`"


@pytest.mark.parametrize("name", ["algorithms", "data", "environments", "custom-pipelines"])
def test_what_the_manual_shows_of_a_job_is_one(name: str, tmp_path: Path) -> None:
    whole = {"name": "shown", "steps": 1, "clusters": {"actor_train": {"gpus": 2}}, "rollout": {"max_new_tokens": 5}}
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "job.yaml").write_text(block)
        shown, _ = read_yaml(tmp_path / "job.yaml")
        values = {**whole, **shown, "rollout": {**whole["rollout"], **shown.get("rollout", {})}}
        JobSpec.model_validate_json(json.dumps({"source": {"task": "sort_digits"}, **values}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_in_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+)", (ROOT / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked
