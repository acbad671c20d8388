"""What a table of prompts must have, found without reading more of it than its head."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlix.pipeline.spec.file import Problem, nearest
from rlix.pipeline.spec.source import DataSpec
from rlix.protocol.errors import SpecError

_JSON, PARQUET = (".jsonl", ".json"), (".parquet",)


def column_problems(data: DataSpec) -> Iterator[Problem]:
    """What is wrong with the file or its columns, found without reading more of it than its head."""
    if find_spec("datasets") is None:
        yield Problem("source.data", "needs the package datasets; run 'pip install rlix[data]'")
        return
    path = Path(data.path)
    if not path.exists():
        beside = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        yield Problem("source.data.path", f"there is no file or folder {path}{nearest(str(path), beside)}")
        return
    try:
        columns = _columns(path, data.split)
    except SpecError as error:
        yield Problem("source.data.path", str(error))
        return
    for field, column in (("prompt", data.prompt), ("answer", data.answer)):
        if column is not None and column not in columns:
            yield Problem(
                f"source.data.{field}",
                f"{path.name} has no column {column!r}; its columns are {', '.join(columns)}{nearest(column, columns)}",
            )


def _columns(path: Path, split: str) -> list[str]:
    if path.is_dir():
        return _saved_columns(path, split)
    if path.suffix in PARQUET:
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
            raise SpecError(f"{path} has no split {split!r}; it has {', '.join(names)}; set source.data.split")
        path = path / split
    info = path / "dataset_info.json"
    if not info.is_file():
        raise SpecError(f"{path} was not saved by datasets (Dataset.save_to_disk): it holds no dataset_info.json")
    return list(json.loads(info.read_text())["features"])
