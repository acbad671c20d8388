"""Tables of rows in an order that depends on the job's seed alone: read whole, or as a stream, alone or mixed."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from rlix.pipeline.hub import check_reachable
from rlix.pipeline.sources.tasks.base import random_stream
from rlix.pipeline.spec.columns import FORMATS, data_fields, is_saved, kinds, missing_columns
from rlix.pipeline.spec.rows import SHOWN, broken_lines, others, place
from rlix.pipeline.spec.source import DataSpec, TableSpec
from rlix.protocol.errors import SpecError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

_BLOCK = 1000
_BUFFER = 10_000  # rows of a stream that are shuffled together
_CURSORS = 4  # of a stream; replaced groups are read far ahead of the others
_FAR = 10_000


class Rows(Protocol):
    """Rows by number; a `datasets.Dataset`, or a list of dicts."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class Table(Protocol):
    """Rows that can be used, one after the other, for ever."""

    def row(self, stream: str, seed: int, position: int) -> tuple[str, Row]:
        """The row at `position` of the order of (`stream`, `seed`), and what to call it."""
        ...


def usable(
    path: str, count: int, longest: int | None, length: Callable[[int, str], int], *, what: str, fix: str
) -> list[int]:
    """Numbers of a table's rows that are not too long; every row is looked at before anything starts.

    Args:
        length: tokens of the row of a number; raises SpecError, which begins with the text that it is given, for one
            that cannot be used.
        what: has so many tokens; `fix`: what to do when all have more.

    Raises:
        SpecError: rows cannot be used, of which the first few are named, or all are too long.
    """
    fitting, problems, unusable = list[int](), list[str](), 0
    for number in range(count):
        try:
            tokens = length(number, "")
        except SpecError:
            unusable += 1
            if unusable <= SHOWN:  # where it is takes reading the file
                problems.append(_problem(number, place(path, number), length))
        else:
            if longest is None or tokens <= longest:
                fitting.append(number)
    if unusable:
        raise SpecError("\n".join([*problems, *others(unusable - len(problems))]))
    if not fitting:
        raise SpecError(f"{path}: every {what} has more than {longest} tokens; {fix}")
    if left_out := count - len(fitting):
        said = "%s: %d rows of %d are left out: the %s has more than %s tokens"
        logger.warning(said, path, left_out, count, what, longest)
    return fitting


def _problem(number: int, where: str, length: Callable[[int, str], int]) -> str:
    try:
        length(number, where)
    except SpecError as error:
        return str(error)
    return ""


class Shuffled:
    """Rows that are at hand: every epoch is a new shuffle of those that are used.

    Args:
        used: their numbers.
        number: of the table among those of a mix.
    """

    def __init__(self, rows: Rows, used: Sequence[int], number: int = 0) -> None:
        self._rows, self._used, self._number = rows, used, number
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def __len__(self) -> int:
        return len(self._used)

    def row(self, stream: str, seed: int, position: int) -> tuple[str, Row]:
        epoch, at = divmod(position, len(self._used))
        row = self._order(stream, seed, epoch)[at]
        return f"row {row + 1}", self._rows[row]

    def _shuffle(self, stream: str, seed: int, epoch: int) -> list[int]:
        order = list(self._used)
        random_stream("data", stream, seed, epoch, *([self._number] if self._number else [])).shuffle(order)
        return order


@dataclass(slots=True)
class _Cursor:
    rows: Iterator[tuple[str, Row]]
    position: int = 0  # of the next row


@dataclass(slots=True)
class Streamed:
    """Rows that are read as they are asked for, which is nearly in order; what came before is read again when it must.

    Args:
        data: a `datasets.IterableDataset`.
        usable: whether a row can be used.
        path: as the job has it, for messages.
    """

    data: Any
    usable: Callable[[str, Row], bool]
    path: str
    number: int = 0
    _cursors: dict[tuple[str, int], list[_Cursor]] = field(default_factory=dict)

    def row(self, stream: str, seed: int, position: int) -> tuple[str, Row]:
        cursors = self._cursors.setdefault((stream, seed), [])
        behind = [c for c in cursors if position - _FAR <= c.position <= position]
        cursor = max(behind, key=lambda c: c.position, default=None)
        if cursor is None:
            cursor = _Cursor(self._endless(stream, seed))
        else:
            cursors.remove(cursor)
        cursors.insert(0, cursor)
        del cursors[_CURSORS:]
        while True:
            found = next(cursor.rows)
            cursor.position += 1
            if cursor.position > position:
                return found

    def _endless(self, stream: str, seed: int) -> Iterator[tuple[str, Row]]:
        key = random_stream("data", stream, seed, self.number).getrandbits(32)
        shuffled = self.data.shuffle(seed=key, buffer_size=_BUFFER)
        epoch = 0
        while True:
            shuffled.set_epoch(epoch)
            some = False
            for at, row in enumerate(self._read(shuffled)):
                name = f"row {at + 1} of epoch {epoch + 1} of the stream"
                if self.usable(name, row):
                    some = True
                    yield name, row
            if not some:
                raise SpecError(f"{self.path}: no row of the stream can be used; the log says why of the first")
            epoch += 1

    def _read(self, shuffled: Any) -> Iterator[Row]:
        """Raises SpecError at what is no row, which shows when its turn has come."""
        try:
            yield from shuffled
        except _reading_errors() as error:
            raise _unreadable(self.path, error) from error


class Mixture:
    """Which table each prompt comes from: in every block of 1,000 each has its share, in an order of the seed's."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._counts = _shares(weights, _BLOCK)
        if 0 in self._counts:
            where = f"source.data.mix.{self._counts.index(0)}"
            raise SpecError(f"{where}.weight: of {_BLOCK:,} prompts none would be of this table; raise it")
        self._block = lru_cache(maxsize=8)(self._drawn)

    def place(self, stream: str, seed: int, position: int) -> tuple[int, int]:
        """The number of the table, and how many prompts came from it before."""
        if len(self._counts) == 1:
            return 0, position
        block, at = divmod(position, _BLOCK)
        tables = self._block(stream, seed, block)
        table = tables[at]
        return table, block * self._counts[table] + tables[:at].count(table)

    def _drawn(self, stream: str, seed: int, block: int) -> list[int]:
        tables = [table for table, count in enumerate(self._counts) for _ in range(count)]
        random_stream("mixture", stream, seed, block).shuffle(tables)
        return tables


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion, the largest remainders rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def load_tables(data: DataSpec) -> list[Any]:
    """Each table of the job, as `datasets` has it. Raises SpecError when one cannot be read or lacks what is named."""
    return [_load(where, table) for where, table in data_fields(data)]


def _load(where: str, table: TableSpec) -> Any:
    loaded = read_table(where, table)
    columns = loaded.column_names
    if columns is not None and (problems := list(missing_columns(where, table, columns))):
        raise SpecError("\n".join(f"{p.field}: {p.message}" for p in problems))
    return loaded


def read_table(where: str, table: TableSpec) -> Any:
    """As `datasets` has it. Raises SpecError when it cannot be read or has no rows."""
    try:
        loaded = _read(table)
    except StopIteration as error:
        raise SpecError(f"{where}.path: {table.path} cannot be read as a table: a file of it is empty") from error
    except _reading_errors() as error:
        raise _unreadable(table.path, error, f"{where}.path: ") from error
    if not table.streaming and len(loaded) == 0:
        raise SpecError(f"{where}.path: {table.path} holds no rows")
    return loaded


def _reading_errors() -> tuple[type[Exception], ...]:
    """What `datasets` raises at a table that it cannot read."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    return DatasetGenerationError, DatasetNotFoundError, OSError, ValueError


def _unreadable(path: str, error: Exception, where: str = "") -> SpecError:
    if broken := broken_lines(Path(path)):
        return SpecError("\n".join(f"{where}{line}" for line in broken))
    reason = str(error.__cause__ or error).strip().splitlines()
    return SpecError(f"{where}{path} cannot be read as a table: {reason[0] if reason else type(error).__name__}")


def _read(table: TableSpec) -> Any:
    import datasets

    path = Path(table.path)
    if path.is_dir() and is_saved(path):
        loaded = datasets.load_from_disk(str(path))
        rows = loaded[table.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return rows.to_iterable_dataset() if table.streaming else rows
    options = _csv_options(table) if path.suffix == ".csv" or (path.is_dir() and kinds(path) == {".csv"}) else {}
    if path.is_file():
        return datasets.load_dataset(
            FORMATS[path.suffix], data_files=str(path), split="train", streaming=table.streaming, **options
        )
    if not path.is_dir():
        check_reachable(table.path, data=True)
    return datasets.load_dataset(table.path, table.config, split=table.split, streaming=table.streaming, **options)


def _csv_options(table: TableSpec) -> dict[str, Any]:
    """Prompts and answers are text, whatever they look like: 007 is not 7, and None is a word."""
    text = {column: str for column in (table.prompt, table.answer) if column is not None}
    return {"converters": text, "keep_default_na": False, "na_values": ["", "NaN", "nan"]}
