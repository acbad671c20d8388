"""Prompts from the user's own files, in an order that depends on the job's seed alone."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlix.pipeline.sources.rewards import TEXT_REWARDS, Reward, TextReward, as_reward, import_object, token_match
from rlix.pipeline.sources.tasks.base import Prompt, random_stream
from rlix.pipeline.spec.file import Problem, nearest
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlix.pipeline.spec.job import DataSpec, RewardSpec

_JSON, _PARQUET = (".jsonl", ".json"), (".parquet",)


class Rows(Protocol):
    """Rows by number; a `datasets.Dataset`, or a list of dicts."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class DataTask:
    """The task over a table with a prompt and an answer in each row.

    Every epoch is a new shuffle of all rows; step k continues where step k-1 ended. Prompts go through the tokenizer's
    chat template when it has one.
    """

    def __init__(
        self, data: "DataSpec", rows: Rows, reward: "RewardSpec", tokenizer: "PreTrainedTokenizerBase"
    ) -> None:
        self._data, self._rows, self._tokenizer = data, rows, tokenizer
        self._reward_name = reward.name or str(reward.function)
        self._text_reward = _text_reward(reward)
        self._shuffled = lru_cache(maxsize=4)(self._shuffle)

    def prompts(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._take("prompts", seed, step, n)

    def supervised(self, seed: int, step: int, n: int) -> list[Prompt]:
        return self._take("supervised", seed, step, n)

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> Reward:
        if self._text_reward is None:
            return token_match(completion_ids, prompt.answer_ids)
        completion = self._tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        value = self._text_reward(prompt.text, completion, prompt.answer)
        return as_reward(value, f"reward {self._reward_name} for prompt {prompt.id}")

    def _take(self, stream: str, seed: int, step: int, n: int) -> list[Prompt]:
        result = []
        for i in range(n):
            epoch, position = divmod(step * n + i, len(self._rows))
            result.append(self._prompt(f"{stream}/{step}/{i}", self._shuffled(stream, seed, epoch)[position]))
        return result

    def _shuffle(self, stream: str, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        random_stream("data", stream, seed, epoch).shuffle(order)
        return order

    def _prompt(self, id: str, row: int) -> Prompt:
        values = self._rows[row]
        given = values.get(self._data.prompt)
        answer = "" if self._data.answer is None else values.get(self._data.answer)
        if not given:
            raise SpecError(f"{self._data.path}: row {row}: column {self._data.prompt!r} is empty")
        if answer is None:
            raise SpecError(f"{self._data.path}: row {row}: column {self._data.answer!r} is empty")
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        answer_ids: list[int] = []
        if self._data.answer is not None:
            answer_ids = [*self._encode(str(answer), row, special=False), self._tokenizer.eos_token_id]
        return Prompt(id, text, tuple(self._encode_prompt(given, row)), str(answer), tuple(answer_ids))

    def _encode_prompt(self, given: Any, row: int) -> list[int]:
        if self._tokenizer.chat_template is None:
            if not isinstance(given, str):
                raise SpecError(
                    f"{self._data.path}: row {row}: column {self._data.prompt!r} holds a {type(given).__name__}, and "
                    "the model's tokenizer has no chat template; give the prompt as text"
                )
            return self._encode(given, row, special=True)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._encode(str(text), row, special=False)  # the template has put the special tokens in

    def _encode(self, text: str, row: int, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            raise SpecError(
                f"{self._data.path}: row {row}: the model's tokenizer does not know every character of {text!r}; "
                "add them to model.alphabet, or use another model"
            )
        return ids


def load_rows(data: "DataSpec") -> Rows:
    """The table at `data.path`, memory-mapped. Raises SpecError when it cannot be read or lacks what the spec names."""
    if problems := list(column_problems(data)):
        raise SpecError("\n".join(f"{p.field}: {p.message}" for p in problems))
    import datasets

    path = Path(data.path)
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
            rows = loaded[data.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            read = datasets.Dataset.from_parquet if path.suffix in _PARQUET else datasets.Dataset.from_json
            rows = read(str(path))
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise SpecError(f"data.path: {path} cannot be read as a table: {error.__cause__ or error}") from error
    if len(rows) == 0:
        raise SpecError(f"data.path: {path} holds no rows")
    result: Rows = rows
    return result


def column_problems(data: "DataSpec") -> Iterator[Problem]:
    """What is wrong with the file or its columns, found without reading more of it than its head."""
    if find_spec("datasets") is None:
        yield Problem("data", "needs the package datasets; run 'pip install rlix[data]'")
        return
    path = Path(data.path)
    if not path.exists():
        beside = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        yield Problem("data.path", f"there is no file or folder {path}{nearest(str(path), beside)}")
        return
    try:
        columns = _columns(path, data.split)
    except SpecError as error:
        yield Problem("data.path", str(error))
        return
    for field, column in (("prompt", data.prompt), ("answer", data.answer)):
        if column is not None and column not in columns:
            yield Problem(
                f"data.{field}",
                f"{path.name} has no column {column!r}; its columns are {', '.join(columns)}{nearest(column, columns)}",
            )


def _columns(path: Path, split: str) -> list[str]:
    if path.is_dir():
        return _saved_columns(path, split)
    if path.suffix in _PARQUET:
        return _parquet_columns(path)
    if path.suffix not in _JSON:
        raise SpecError(f"{path} is of a kind that is not known; use .jsonl, .parquet, or a folder saved by datasets")
    return _json_columns(path)


def _json_columns(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        raise SpecError(f"{path} is empty")
    try:
        row = json.loads(first)
    except ValueError as error:
        raise SpecError(f"{path} does not hold one JSON object per line; its first line: {error}") from error
    if not isinstance(row, dict):
        raise SpecError(f"{path} does not hold one JSON object per line; its first line is a {type(row).__name__}")
    return list(row)


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet
    from pyarrow.lib import ArrowInvalid

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise SpecError(f"{path} is not a Parquet file: {error}") from error
    if file.metadata.num_rows == 0:
        raise SpecError(f"{path} holds no rows")
    return list(file.schema_arrow.names)


def _saved_columns(path: Path, split: str) -> list[str]:
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text())["splits"]
        if split not in names:
            raise SpecError(f"{path} has no split {split!r}; it has {', '.join(names)}; set data.split")
        path = path / split
    info = path / "dataset_info.json"
    if not info.is_file():
        raise SpecError(f"{path} was not saved by datasets (Dataset.save_to_disk): it holds no dataset_info.json")
    return list(json.loads(info.read_text())["features"])


def _text_reward(reward: "RewardSpec") -> TextReward | None:
    """The function that judges text, or None when tokens are compared."""
    if reward.function is not None:
        function: Any = import_object(reward.function)
        return function
    return None if reward.name == "token_match" else TEXT_REWARDS[str(reward.name)]
