import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlix.pipeline.samples import End, Sample, by_table
from rlix.pipeline.sources.data import DataTask
from rlix.pipeline.sources.panel import Asked
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.tables import Mixture, load_tables
from rlix.pipeline.sources.tasks.base import Prompt
from rlix.pipeline.spec.columns import column_problems
from rlix.pipeline.spec.source import ChatSpec, DataSpec, RewardSpec
from rlix.pipeline.tokenizer import character_tokenizer
from rlix.protocol.errors import SpecError
from rlix.workers.worker import WORKER_ENVIRONMENT
from tests.pipeline.test_panel import judged

TOKENIZER = character_tokenizer("0123456789>= +user:")
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10)]


def task(
    rows: Any = None, *, tokenizer: Any = TOKENIZER, longest: int | None = None, reward: str = "exact_match"
) -> DataTask:
    data = DataSpec(path="rows.jsonl")
    return DataTask(data, [ROWS if rows is None else rows], [RewardSpec(name=reward)], tokenizer, longest)


def write(folder: Path, kind: str) -> Path:
    table = datasets.Dataset.from_list(ROWS)
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return folder / "rows.jsonl"
    if kind == "parquet":
        table.to_parquet(str(folder / "rows.parquet"))
        return folder / "rows.parquet"
    if kind == "csv":
        table.to_csv(str(folder / "rows.csv"))
        return folder / "rows.csv"
    if kind == "folder of files":
        (folder / "rows").mkdir()
        for number, half in enumerate((ROWS[:5], ROWS[5:])):
            (folder / "rows" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in half))
        return folder / "rows"
    (table if kind == "dataset" else datasets.DatasetDict(train=table)).save_to_disk(str(folder / "rows"))
    return folder / "rows"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "folder of files", "dataset", "dataset with splits"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path, kind: str) -> None:
    data = DataSpec(path=str(write(tmp_path, kind)))
    found = DataTask(data, load_tables(data), [RewardSpec(name="exact_match")], TOKENIZER)
    assert found.prompts(0, 0, 10) == task().prompts(0, 0, 10)


def test_a_job_reads_a_table_without_a_word_on_the_terminal(tmp_path: Path) -> None:
    code = "import sys, datasets; datasets.load_dataset('json', data_files=sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(write(tmp_path, "jsonl"))],
        env={**os.environ, **WORKER_ENVIRONMENT},
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert done.stdout + done.stderr == b""


class TestOrder:
    def test_every_epoch_is_another_order_of_all_rows(self) -> None:
        stream = [p.text for step in range(5) for p in task().prompts(0, step, 4)]
        first, second = stream[:10], stream[10:]
        assert sorted(first) == sorted(second) == sorted(row["prompt"] for row in ROWS)
        assert first != second

    def test_depends_on_seed_step_and_purpose_alone(self) -> None:
        assert task().prompts(3, 7, 4) == task().prompts(3, 7, 4)
        texts = [[p.text for p in prompts] for prompts in (task().prompts(0, 0, 9), task().prompts(1, 0, 9))]
        assert texts[0] != texts[1]
        assert [p.text for p in task().supervised(0, 0, 9)] not in texts

    def test_a_step_may_be_longer_than_the_table(self) -> None:
        prompts = task().prompts(0, 0, 25)
        assert len({p.id for p in prompts}) == 25


class TestPrompt:
    def test_tokens(self) -> None:
        prompt = task([{"prompt": "4+4=", "answer": 8}]).prompts(0, 0, 1)[0]
        assert list(prompt.prompt_ids) == TOKENIZER.encode("4+4=")
        assert list(prompt.answer_ids) == [12, 2]
        assert prompt.answer == "8"

    def test_chat_template(self) -> None:
        chat = character_tokenizer("0123456789>= +user:")
        chat.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}>"
        text = task([{"prompt": "1+1=", "answer": "2"}], tokenizer=chat).prompts(0, 0, 1)[0]
        messages = [{"role": "user", "content": "1+1="}]
        given = task([{"prompt": messages, "answer": "2"}], tokenizer=chat).prompts(0, 0, 1)[0]
        assert chat.decode(list(text.prompt_ids)) == "user:1+1=>"
        assert given.prompt_ids == text.prompt_ids
        for wrong in (5, ["1+1="], {"role": "user"}):
            with pytest.raises(SpecError, match=r"row 1: column 'prompt': the model's chat template does not render"):
                task([{"prompt": wrong, "answer": "2"}], tokenizer=chat)
        data, rewards = DataSpec(path="rows.jsonl"), [RewardSpec(name="exact_match")]
        chat.chat_template = "{% for m in messages %}{{ m['content'] }}+{% endfor %}>"
        said = DataTask(data, [[{"prompt": "1", "answer": "2"}]], rewards, chat, chat=ChatSpec(system="9"))
        assert chat.decode(list(said.prompts(0, 0, 1)[0].prompt_ids)) == "9+1+>"
        for given in (ChatSpec(system="9"), ChatSpec(options={"enable_thinking": False})):
            with pytest.raises(SpecError, match=r"source\.chat\.\w+: is not used, .* has no chat template"):
                DataTask(data, [[{"prompt": "1", "answer": "2"}]], rewards, TOKENIZER, chat=given)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"prompt": "", "answer": "1"}, "row 1: column 'prompt' is empty"),
            ({"prompt": None, "answer": "1"}, "row 1: column 'prompt' is empty"),
            ({"prompt": "1", "answer": None}, "row 1: column 'answer' is empty"),
            ({"prompt": "abc", "answer": "1"}, "does not know every character of 'abc'"),
            ({"prompt": [{"role": "user", "content": "1"}], "answer": "1"}, "no chat template"),
        ],
    )
    def test_rows_that_cannot_be_used(self, row: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            task([row])

    def test_long_prompts_are_left_out_and_all_rows_looked_at_before_the_start(self) -> None:
        rows = [{"prompt": "1" * length, "answer": "1"} for length in (3, 9, 2)]
        kept = task(rows, longest=4).prompts(0, 0, 4)  # with the begin token
        assert sorted({len(p.prompt_ids) for p in kept}) == [3, 4]
        with pytest.raises(SpecError, match=r"every prompt has more than 2 tokens; raise source\.data\.max"):
            task(rows, longest=2)
        with pytest.raises(SpecError, match=r"row 2: .*\n.*row 3: "):
            task([*rows[:1], {"prompt": "abc", "answer": "1"}, {"prompt": "1", "answer": None}])


class TestReward:
    def test_text_and_tokens(self) -> None:
        prompt = task([{"prompt": "4+4=", "answer": "8"}]).prompts(0, 0, 1)[0]
        assert asyncio.run(task().judge(prompt, [12, 2])) == Reward(1.0, True)
        assert asyncio.run(task(reward="token_match").judge(prompt, [12])) == Reward(0.25, False)


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "content", "field", "message"),
        [
            ("gone.jsonl", None, "source.data.path", "there is no file or folder"),
            ("empty.jsonl", "", "source.data.path", "is empty"),
            ("list.jsonl", "[1]\n", "source.data.path", "first line is a list"),
            ("torn.jsonl", '{"prompt": \n', "source.data.path", "does not hold one JSON object per line"),
            ("rows.txt", "prompt,answer\n", "source.data.path", "use .jsonl, .json, .parquet, .csv, or a folder"),
            ("rows.csv", "prompt,anwser\n1,1\n", "source.data.answer", "did you mean 'anwser'?"),
            ("header.csv", "prompt,answer\n", "source.data.path", "holds no rows"),
            ("excel.csv", "prompt;answer\n1;1\n", "source.data.path", "has ';' between its columns 'prompt;answer'"),
            ("gone.tsv", None, "source.data.path", "there is no file or folder"),
            ("comma.csv", "prompt,answer\n1,200 + 1,1201\n", "source.data.path", "quote what holds a comma"),
            ("latin.csv", "prompt,answer\n\xe9,1\n", "source.data.path", "is not a text file in UTF-8"),
            ("latin.jsonl", '{"prompt": "\xe9", "answer": "1"}\n', "source.data.path", "is not a text file in UTF-8"),
            ("rows.parquet", "text", "source.data.path", "is not a Parquet file"),
            (
                "cols.jsonl",
                '{"promt": "1", "answer": "1"}\n',
                "source.data.prompt",
                "columns are promt, answer; did you mean 'promt'?",
            ),
        ],
    )
    def test_what_is_wrong_is_found_before_the_job_starts(
        self, tmp_path: Path, name: str, content: str | None, field: str, message: str
    ) -> None:
        if content is not None:
            (tmp_path / name).write_text(content, encoding="latin-1")
        (problem,) = column_problems(DataSpec(path=str(tmp_path / name)))
        assert problem.field == field
        assert message in problem.message

    def test_one_file_has_no_splits_and_no_configurations(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"prompt": "1", "answer": "1"}\n')
        found = column_problems(DataSpec(path=str(path), split="test", config="main"))
        assert [problem.field for problem in found] == ["source.data.split", "source.data.config"]

    def test_an_empty_file_in_a_folder_is_one_message(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text("")
        with pytest.raises(SpecError, match=r"source\.data\.path: .* cannot be read as a table: a file of it is empty"):
            load_tables(DataSpec(path=str(tmp_path)))

    @pytest.mark.parametrize("folder", [False, True])
    def test_prompts_and_answers_of_csv_are_text(self, tmp_path: Path, folder: bool) -> None:
        path = tmp_path / "rows.csv"
        path.write_text("\ufeffprompt,answer,level,note\n007,0123,3,\nNone,1.50,4,x\nnull,NA,,y\n", encoding="utf-8")
        data = DataSpec(path=str(tmp_path if folder else path))
        assert not list(column_problems(data))
        (rows,) = load_tables(data)
        assert rows["prompt"][:] == ["007", "None", "null"]
        assert rows["answer"][:] == ["0123", "1.50", "NA"]
        assert rows["level"][:2] == [3, 4]  # other columns are what they look like

    @pytest.mark.parametrize(
        ("answers", "read"),
        [
            ([1, 2.5], ["1", "2.5"]),
            (["2020-01-01", "2021-02-03"], ["2020-01-01", "2021-02-03"]),
            (["1", 2], ["1", "2"]),
        ],
    )
    def test_answers_of_json_are_as_they_were_written(self, tmp_path: Path, answers: Any, read: list[str]) -> None:
        path = tmp_path / "rows.jsonl"
        rows = [json.dumps({"prompt": f"{i}=", "answer": answer}) for i, answer in enumerate(answers)]
        path.write_text("\ufeff" + "\n".join(rows), encoding="utf-8")
        data = DataSpec(path=str(path))
        assert not list(column_problems(data))
        tokenizer = character_tokenizer("0123456789.-=")
        found = DataTask(data, load_tables(data), [RewardSpec(name="exact_match")], tokenizer).prompts(0, 0, 2)
        assert sorted(prompt.answer for prompt in found) == read

    def test_json_may_be_one_list(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(ROWS, indent=1))
        data = DataSpec(path=str(path))
        assert not list(column_problems(data))
        assert load_tables(data)[0]["answer"][:] == [row["answer"] for row in ROWS]

    def test_folders(self, tmp_path: Path) -> None:
        (tmp_path / "plain").mkdir()
        (problem,) = column_problems(DataSpec(path=str(tmp_path / "plain")))
        assert "was not saved by datasets" in problem.message
        path = write(tmp_path, "dataset with splits")
        (problem,) = column_problems(DataSpec(path=str(path), split="test"))
        assert "has no split 'test'; it has train" in problem.message

    def test_what_is_neither_file_nor_folder_may_be_on_the_hub(self) -> None:
        assert not list(column_problems(DataSpec(path="openai/gsm8k", config="main")))
        (problem,) = column_problems(DataSpec(path="rows/gsm8k.jsonl"))
        assert "there is no file or folder" in problem.message

    def test_a_broken_line_further_down(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2", \n')
        with pytest.raises(SpecError, match=r"^source\.data\.path: .*rows\.jsonl:2: is no JSON object: Expecting prop"):
            load_tables(DataSpec(path=str(path)))


class TestMixture:
    def test_every_block_has_its_shares_in_an_order_of_the_seeds(self) -> None:
        mixture = Mixture([3.0, 1.0])
        places = [mixture.place("prompts", 0, position) for position in range(2000)]
        assert [sum(table for table, _ in places[i : i + 1000]) for i in (0, 1000)] == [250, 250]
        for number in (0, 1):  # each table is read in order, whatever is asked first
            assert [at for table, at in places if table == number] == list(range(750 * 2 if number == 0 else 250 * 2))
        assert Mixture([3.0, 1.0]).place("prompts", 0, 1234) == places[1234]
        assert [table for table, _ in places] != [mixture.place("prompts", 1, p)[0] for p in range(2000)]

    def test_a_table_that_would_never_be_drawn_from_is_refused(self) -> None:
        assert Mixture([999.0, 1.0]).place("prompts", 0, 0)[0] in (0, 1)
        with pytest.raises(SpecError, match=r"mix\.1\.weight: of 1,000 prompts none"):
            Mixture([9999.0, 1.0])

    def test_tables_with_columns_of_their_own(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "level": 3}\n')
        (tmp_path / "b.csv").write_text("question,right\n2+2=,4\n3+3=,6\n")
        mix = [
            {"path": str(tmp_path / "a.jsonl"), "weight": 1},
            {"path": str(tmp_path / "b.csv"), "prompt": "question", "answer": "right", "weight": 3},
        ]
        data = DataSpec.model_validate({"mix": mix})
        assert not list(column_problems(data))
        prompts = DataTask(data, load_tables(data), [RewardSpec(name="exact_match")], TOKENIZER).prompts(0, 0, 1000)
        counts = {text: sum(p.text == text for p in prompts) for text in ("1+1=", "2+2=", "3+3=")}
        assert counts == {"1+1=": 250, "2+2=": 375, "3+3=": 375}
        assert {p.answer for p in prompts if p.text == "2+2="} == {"4"}
        assert next(p for p in prompts if p.text == "1+1=").columns == {"level": 3}
        assert {(p.text, p.table) for p in prompts} == {("1+1=", "a"), ("2+2=", "b"), ("3+3=", "b")}
        made = [Sample("", (), 1.0, True, End.DONE, table="a"), Sample("", (), 0.5, False, End.DONE, table="b")]
        made.append(Sample("", (), 0.0, False, End.DONE, table="b", counts=False))
        found = {"data/a/reward": 1.0, "data/a/exact": 1.0, "data/b/reward": 0.5, "data/b/exact": 0.0}
        assert by_table(made) == found

    def test_tables_of_one_file_name_have_names_apart(self) -> None:
        mix = [{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}, {"path": "z/a.jsonl", "name": "hard"}]
        assert DataSpec.model_validate({"mix": mix}).names == ("a", "a_2", "hard")
        assert DataSpec(path="a.jsonl").names == ("",)

    def test_a_mistake_names_its_table(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
        mix = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "a.jsonl"), "prompt": "promt"}]
        (problem,) = column_problems(DataSpec.model_validate({"mix": mix}))
        assert problem.field == "source.data.mix.1.prompt"


class TestStream:
    def stream(self, folder: Path, longest: int | None = None) -> DataTask:
        rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(30)]
        rows[3]["prompt"] = ""
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataSpec(path=str(folder / "rows.jsonl"), streaming=True)
        return DataTask(data, load_tables(data), [RewardSpec(name="exact_match")], TOKENIZER, longest)

    def test_is_the_same_from_wherever_it_is_read(self, tmp_path: Path) -> None:
        whole = self.stream(tmp_path)
        texts = [[p.text for p in whole.prompts(0, step, 4)] for step in range(20)]
        assert [p.text for p in self.stream(tmp_path).prompts(0, 17, 4)] == texts[17]  # as after a resume
        assert [p.text for p in whole.prompts(0, 2, 4)] == texts[2]
        flat = [text for step in texts for text in step]
        assert len(set(flat[:29])) == 29  # the row without a prompt is left out, and then it begins anew
        assert sorted(flat[:29]) == sorted(flat[29:58])
        assert flat[:29] != flat[29:58]

    def test_what_is_too_long_is_left_out_and_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        prompts = self.stream(tmp_path, longest=5).prompts(0, 0, 18)
        assert {len(p.prompt_ids) for p in prompts} == {5}
        with pytest.raises(SpecError, match="no row of the stream can be used"):
            self.stream(tmp_path, longest=1).prompts(0, 0, 1)
        assert "its prompt has 7 tokens, more than 1" in caplog.text

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
    def test_a_torn_line_is_said_with_its_file(self, tmp_path: Path, name: str) -> None:
        torn = '{"prompt": "1", "answer": "1"}\n{"prompt": "2", \n' if "json" in name else 'prompt,answer\n1,1\n1,"2\n'
        (tmp_path / name).write_text(torn)
        data = DataSpec(path=str(tmp_path / name), streaming=True)
        with pytest.raises(SpecError, match=rf"{name}:\d: (is no JSON object|is no row of CSV)"):
            task = DataTask(data, load_tables(data), [RewardSpec(name="exact_match")], TOKENIZER)
            task.prompts(0, 0, 1)


def test_math_verify_judges_in_processes_of_its_own() -> None:
    prompt = Prompt("p", "?", (1,), "1/2", (1,))
    texts = (r"so \boxed{\frac{2}{4}}", "it is 0.5", "it is 2")
    verdicts = judged([RewardSpec(name="math_verify", timeout_s=300)], *(Asked(prompt, text, (1,)) for text in texts))
    assert verdicts == [Reward(1.0, True), Reward(1.0, True), Reward(0.0, False)]
    assert [getattr(verdict, "answer", None) for verdict in verdicts] == ["1/2", "1/2", "2"]
