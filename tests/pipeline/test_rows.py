"""Rows that a job cannot use, said by file and line before anything starts."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.sources.data import DataTask
from rlix.pipeline.sources.look import look_at_rows
from rlix.pipeline.sources.tables import load_tables
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.spec.rows import broken_lines, lines_of, place, row_problems
from rlix.pipeline.spec.source import RewardSpec
from rlix.pipeline.tokenizer import character_tokenizer, load_tokenizer
from rlix.protocol.errors import SpecError

runner = CliRunner()
CELLS = st.text(st.sampled_from('ab,"\n \r;é'), min_size=1, max_size=5)


def job(folder: Path, rows: str, name: str = "rows.jsonl", **changes: Any) -> Path:
    (folder / name).write_text(rows, encoding="latin-1")
    values = {
        "name": "mine",
        "steps": 1,
        "source": {"data": {"path": name}, "rewards": "exact_match"},
        "model": {"alphabet": "0123456789+=\n"},
        "rollout": {"max_new_tokens": 5},
        "clusters": {"actor_train": {"gpus": 2}},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump({**values, **changes}))
    return folder / "job.yaml"


def said(spec: JobSpec, folder: Path) -> list[str]:
    return [f"{p.field}: {p.message}".replace(f"{folder}/", "") for p in row_problems(spec)]


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("rows.jsonl", '{"prompt": "1"\n', ":1: is no JSON object: Expecting ',' delimiter (column 15)"),
        ("rows.jsonl", '\n\n{"prompt": "1", "answer": "1"}\n[1]\n', ":4: is a list, no JSON object"),
        ("rows.jsonl", '{"prompt": "", "answer": "1"}\n', ":1: column 'prompt' is empty"),
        ("rows.jsonl", '\n{"prompt": "1", "answer": null}\n', ":2: column 'answer' is empty"),
        ("rows.jsonl", '{"prompt": "1+x", "answer": "1"}\n', ":1: model.alphabet does not have 'x' of '1+x'"),
        ("rows.jsonl", '{"prompt": ["1"], "answer": "1"}\n', ":1: column 'prompt' holds a list"),
        ("rows.jsonl", '{"prompt": "1", "answer": "1"}\n{"prompt": "\xe9"}\n', ":2: is not UTF-8"),
        ("rows.json", '{"prompt": "1", "answer": "1"}\n{"prompt": \n', ":2: is no JSON object"),
        (
            "rows.json",
            '[{"prompt": "1", "answer": "1"},\n{"prompt": "", "answer": "1"}]',
            ": row 2: column 'prompt' is",
        ),
        ("rows.json", '[{"prompt": "1", "answer": "1"}, 3]', ": row 2: is a int, no JSON object"),
        ("rows.json", '[{"prompt": "1", "answer": "1"},\n{"prompt": ]', ":2: is no JSON: Expecting value (column 12)"),
        ("rows.csv", 'prompt,answer\n"1\n\n2",3\n4,5,6\n', ":5: has 3 fields, and the table 2 columns"),
        ("rows.csv", "prompt,answer\n\n1,2\n,3\n", ":4: column 'prompt' is empty"),
        ("rows.csv", "prompt,answer\n1,2\n3\n", ":3: column 'answer' is empty"),
        ("rows.csv", 'prompt,answer\n1,2\n3,"4\n5,6\n', ":3: is no row of CSV: its quotation mark is never closed"),
        ("rows.csv", "prompt,answer\n1,2\n\xe9,4\n", ":3: is not UTF-8"),
    ],
)
def test_what_is_wrong_has_the_line_that_an_editor_shows(tmp_path: Path, name: str, rows: str, expected: str) -> None:
    path = tmp_path / name
    path.write_text(rows, encoding="latin-1")
    values = yaml.safe_load(job(tmp_path, rows, name).read_text())
    values["source"]["data"]["path"] = str(path)
    (problem, *_) = said(JobSpec.model_validate(values), tmp_path)
    assert problem.startswith(f"source.data.path: {name}{expected}")


def test_of_many_mistakes_all_are_counted(tmp_path: Path) -> None:
    path = job(tmp_path, '{"prompt": "1", "answer": "1"}\n' + '{"prompt": "", "answer": "1"}\n' * 12)
    found = said(load_job(path), tmp_path)
    assert [line.split(":")[2] for line in found[:5]] == ["2", "3", "4", "5", "6"]
    assert found[5:] == ["source.data.path: and 7 more that cannot be used"]
    data = load_job(path).source.data
    assert data is not None
    with pytest.raises(SpecError) as caught:  # as the start says it
        DataTask(data, load_tables(data), [RewardSpec(name="exact_match")], character_tokenizer("1"))
    assert "rows.jsonl:6: column 'prompt' is empty\nand 7 more that cannot be used" in str(caught.value)


def test_an_unknown_character_is_named_once(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in ("1x", "x", "xy", "y", "1", "xx"))
    found = said(load_job(job(tmp_path, rows)), tmp_path)
    assert found == [
        "source.data.path: rows.jsonl:1: model.alphabet does not have 'x' of '1x'; add it there",
        "source.data.path: rows.jsonl:3: model.alphabet does not have 'xy' of 'xy'; add it there",
        "source.data.path: and 3 more that cannot be used",
    ]


@pytest.mark.parametrize(("rewards", "told"), [("exact_match", True), ("number_match", False)])
def test_answers_that_are_too_long_to_be_exact_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rewards: str, told: bool
) -> None:
    rows = "".join(json.dumps({"prompt": "1", "answer": "1" * length}) + "\n" for length in (4, 5, 6, 7))
    source = {"data": {"path": "rows.jsonl"}, "rewards": rewards}
    assert not list(look_at_rows(load_job(job(tmp_path, rows, source=source))))
    expected = "rows.jsonl:3: this row and 1 others of 4 can hardly be exact: the answer has more than the 5 tokens"
    assert (expected in caplog.text) is told


def test_a_large_file_is_left_to_the_start_and_a_mix_a_run_and_an_evaluation_are_not(tmp_path: Path) -> None:
    bad = '{"prompt": "", "answer": "1"}\n'
    (tmp_path / "good.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    data = {"mix": [{"path": "good.jsonl"}, {"path": "rows.jsonl"}]}
    mixed = {"data": data, "rewards": "exact_match"}
    good = {"data": {"path": "good.jsonl"}, "rewards": "exact_match"}
    spec = load_job(job(tmp_path, bad, source=mixed))
    assert not list(row_problems(spec, most_bytes=10))
    assert [p.field for p in row_problems(spec)] == ["source.data.mix.1.path"]
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "2", "answer": "2"}\n')
    held_out = {**mixed, "data": {"mix": [{"path": "held_out.jsonl"}, {"path": "rows.jsonl"}]}}
    spec = load_job(job(tmp_path, bad, source=good, evaluation={"every": 1, "source": held_out}))
    assert [p.field for p in row_problems(spec)] == ["evaluation.source.data.mix.1.path"]
    spec = load_job(job(tmp_path, bad, source=good, pipeline="multi_lora", runs={"a": {}, "b": {"source": mixed}}))
    assert [p.field for p in row_problems(spec)] == ["runs.b.source.data.mix.1.path"]


@pytest.mark.parametrize("command", [("check",), ("run", "--runs-dir", "runs")])
def test_both_commands_say_it_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    job(tmp_path, '{"prompt": "1", "answer": "1"}\n{"prompt": "1+\n')
    result = runner.invoke(app, [*command, "job.yaml"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "rows.jsonl:2: is no JSON object" in result.stderr
    assert "Traceback" not in result.stderr


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6), blank=st.sampled_from(["", "\n", "  \n"]))
def test_lines_are_those_of_the_rows_that_a_job_reads(tmp_path: Path, rows: list[tuple[str, str]], blank: str) -> None:
    """A row that datasets reads as the n-th has the n-th place, whatever its cells hold and what is between."""
    text = io.StringIO(newline="")
    text.write("prompt,answer\n")
    begins = []
    for row in rows:
        text.write(blank)
        begins.append(text.getvalue())
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(row)
    path = tmp_path / "rows.csv"
    path.write_bytes(text.getvalue().encode())
    assert [tuple(line.row.values()) for line in lines_of(path)] == rows
    assert not broken_lines(path)
    numbers = [before.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1 for before in begins]
    assert [place(str(path), i) for i in range(len(rows))] == [f"{path}:{number}" for number in numbers]
    assert place(str(path), len(rows)) == f"{path}: row {len(rows) + 1}"


def test_rows_of_other_tables_have_numbers_from_one(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "1", "answer": "1"}]))
    assert place(str(tmp_path / "rows.json"), 0) == f"{tmp_path}/rows.json: row 1"
    datasets.Dataset.from_list([{"prompt": ""}]).save_to_disk(str(tmp_path / "saved"))
    assert place(str(tmp_path / "saved"), 1) == f"{tmp_path}/saved: row 2"


class TestTokenizers:
    def folder(self, tmp_path: Path) -> Path:
        return write_tiny_model(TinyModel(alphabet="0123456789+="), tmp_path / "model", 0)

    def spec(self, tmp_path: Path, rows: str) -> JobSpec:
        return load_job(job(tmp_path, rows, model={"path": "./model"}))

    def test_a_folder_without_one_is_said_by_check_and_at_the_start(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        for file in folder.glob("*token*"):
            file.unlink()
        with pytest.raises(SpecError, match=r"model\.path: .*model holds no tokenizer"):
            self.spec(tmp_path, '{"prompt": "1", "answer": "1"}\n')
        with pytest.raises(SpecError, match="has no tokenizer"):
            load_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text("{}")  # which tells nothing of the vocabulary
        spec = self.spec(tmp_path, '{"prompt": "1", "answer": "1"}\n')
        (problem,) = look_at_rows(spec)
        assert "has no tokenizer" in problem
        with pytest.raises(SpecError, match="has no tokenizer"):
            load_tokenizer(folder)

    def test_tokens_that_the_model_has_no_embedding_for(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        larger = load_tokenizer(folder)
        larger.add_tokens(["x", "y"])
        larger.save_pretrained(folder)
        spec = self.spec(tmp_path, '{"prompt": "1", "answer": "1"}\n{"prompt": "1", "answer": "y"}\n')
        (problem,) = look_at_rows(spec)
        assert "rows.jsonl:2: 'y' is token 17 of the tokenizer, and the model has 16, counted from 0" in problem
        fine = self.spec(tmp_path, '{"prompt": "1", "answer": "1"}\n')
        assert not list(look_at_rows(fine))  # tokens that nobody uses hurt nobody
        larger.pad_token = "<|pad|>"
        larger.save_pretrained(folder)
        with pytest.raises(SpecError, match=r"model folder .*: '<\|pad\|>' is token 18 of the tokenizer"):
            load_tokenizer(folder)

    def test_a_model_that_is_not_here_is_not_looked_at(self, tmp_path: Path) -> None:
        spec = load_job(job(tmp_path, '{"prompt": "", "answer": "1"}\n', model={"path": "nobody/nothing"}))
        assert not list(look_at_rows(spec))

    def test_check_says_what_only_the_tokenizer_shows(self, tmp_path: Path) -> None:
        self.folder(tmp_path)
        path = job(
            tmp_path, '{"prompt": "1", "answer": "1"}\n{"prompt": "1", "answer": "z"}\n', model={"path": "./model"}
        )
        result = runner.invoke(app, ["check", str(path)])
        assert result.exit_code == 2
        assert "rows.jsonl:2: the model's tokenizer does not know every character of 'z'" in result.stderr
