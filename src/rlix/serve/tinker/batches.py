"""From the data of a request to the padded tensors that a policy trains on; what makes no sense is refused here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlix.pipeline.requests.losses import SUPERVISED, RequestedLoss
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.wire import Datum

_MOST_CELLS = 2**26
TARGETS, WEIGHTS, MASK = "target_tokens", "weights", "mask"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a model: tokens that it knows, of the longest sequence, and those that fill up a row."""

    vocabulary: int
    context: int
    pad_id: int


def batch_of(data: Sequence[Datum], loss: RequestedLoss, limits: Limits, ranks: int) -> dict[str, Tensor]:
    """One row for each datum, then as many that count for nothing as are missing to one for each rank.

    Raises SpecError, naming the datum.
    """
    if not data:
        raise SpecError("data: there is none")
    rows = [_checked(index, datum, loss, limits) for index, datum in enumerate(data)]
    several = max(row[TARGETS].shape[1] if row[TARGETS].ndim == 2 else 0 for row in rows)
    length = max(len(datum.tokens) for datum in data)
    count = max(len(data), ranks)
    if (cells := count * length * max(several, 1)) > _MOST_CELLS:
        raise SpecError(
            f"data: {count:,} sequences, filled up to the longest with {length:,} tokens, have {cells:,} cells, and "
            f"{_MOST_CELLS:,} are taken: send fewer at once, or those of a length together"
        )
    if several:
        rows = [{key: _wider(value, several) for key, value in row.items()} for row in rows]
    batch = {
        "input_ids": torch.full((count, length + 1), limits.pad_id),
        "mask": torch.zeros(count, length),
    }
    for index, datum in enumerate(data):
        batch["input_ids"][index, : len(datum.tokens)] = torch.from_numpy(datum.tokens.astype(np.int64))
        batch["mask"][index, : len(datum.tokens)] = 1
    for name in rows[0]:
        kind = torch.long if name == TARGETS else torch.float32
        whole = torch.zeros((count, length, several) if several else (count, length), dtype=kind)
        for index, row in enumerate(rows):
            whole[index, : len(row[name])] = torch.from_numpy(row[name].copy()).to(kind)
        batch["targets" if name == TARGETS else name] = whole
    return batch


def _checked(index: int, datum: Datum, loss: RequestedLoss, limits: Limits) -> dict[str, Any]:
    where, length = f"data[{index}]", len(datum.tokens)
    if not 0 < length <= limits.context:
        raise SpecError(f"{where}: has {length:,} tokens; the model takes 1 to {limits.context:,}")
    _check_ids(f"{where}.model_input", datum.tokens, limits)
    given = dict(datum.inputs)
    if loss.name == SUPERVISED:
        given.setdefault(WEIGHTS, np.ones(given[TARGETS].shape, np.float32) if TARGETS in given else np.ones(0))
    if missing := [name for name in (TARGETS, *loss.inputs) if name not in given]:
        raise SpecError(f"{where}.loss_fn_inputs: {loss.name} needs {missing[0]!r}; there are {sorted(given)}")
    optional = set() if loss.name == SUPERVISED else {MASK}
    if unknown := sorted(given.keys() - {TARGETS, *loss.inputs} - optional):
        raise SpecError(f"{where}.loss_fn_inputs: {loss.name} does not take {unknown[0]!r}")
    targets = given[TARGETS]
    if targets.ndim not in (1, 2) or (targets.ndim == 2 and loss.name != SUPERVISED) or targets.shape[-1:] == (0,):
        raise SpecError(f"{where}.loss_fn_inputs.{TARGETS}: {loss.name} takes no shape {list(targets.shape)}")
    for name, array in given.items():
        if array.shape != (targets.shape if name == WEIGHTS else (length,)) and not (
            name == TARGETS and len(array) == length
        ):
            raise SpecError(f"{where}.loss_fn_inputs.{name}: shape {list(array.shape)} beside {length} tokens")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SpecError(f"{where}.loss_fn_inputs.{name}: holds what is not a finite number")
    _check_ids(f"{where}.loss_fn_inputs.{TARGETS}", targets, limits)
    if loss.name == SUPERVISED:
        return {TARGETS: targets, WEIGHTS: given[WEIGHTS]}
    advantages, log_probs = given["advantages"], given["logprobs"]
    # A prompt's tokens have neither: with a ratio for a whole sequence they must not count.
    learnt = given.pop(MASK, ((advantages != 0) | (log_probs != 0)).astype(np.float32))
    return {TARGETS: targets, "advantages": advantages, "logprobs": log_probs, "learnt": learnt}


def _check_ids(where: str, ids: np.ndarray, limits: Limits) -> None:
    if ids.dtype.kind not in "iu":
        raise SpecError(f"{where}: must be whole numbers, the ids of tokens")
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < limits.vocabulary):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise SpecError(f"{where}: token {wrong} is none of the model's {limits.vocabulary:,}")


def _wider(array: np.ndarray, several: int) -> np.ndarray:
    """Of one with fewer targets a position: the others weigh nothing."""
    whole = array if array.ndim == 2 else array[:, None]
    return np.pad(whole, ((0, 0), (0, several - whole.shape[1])))


def rows_of(log_probs: Tensor, data: Sequence[Datum]) -> list[np.ndarray]:
    """Of each datum what belongs to it: [length], or [length, targets]."""
    found = []
    for row, datum in zip(log_probs.numpy(), data, strict=False):
        targets = datum.inputs[TARGETS]
        own = row[: len(datum.tokens)]
        found.append(own[:, : targets.shape[1]] if targets.ndim == 2 else own[:, 0] if own.ndim == 2 else own)
    return found


def scored(prompt: Sequence[int], targets: np.ndarray | None, limits: Limits, ranks: int) -> Mapping[str, Tensor]:
    """A prompt whose tokens after the first, or else `targets` [length - 1, k], are to be scored."""
    ids = np.asarray(prompt, np.int64)
    _check_ids("prompt", ids, limits)
    if not 1 < len(ids) <= limits.context:
        raise SpecError(f"prompt: has {len(ids):,} tokens; to be scored it takes 2 to {limits.context:,}")
    wanted = torch.from_numpy(ids[1:] if targets is None else np.maximum(targets, 0))
    batch = {
        "input_ids": torch.full((ranks, len(ids)), limits.pad_id),
        "mask": torch.zeros(ranks, len(ids) - 1),
        "targets": torch.zeros(ranks, *wanted.shape, dtype=torch.long),
    }
    batch["input_ids"][0], batch["mask"][0], batch["targets"][0] = torch.from_numpy(ids), 1, wanted
    return batch
