"""What the server knows of sessions, models, operations, checkpoints and samplers, as rows of its journal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Of an operation. One that has `failed` has changed nothing."""

    QUEUED = "queued"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Operation:
    """One request of a client. `target`: the model or the sampler; `seq`: its place among those of the target."""

    id: str
    target: str
    seq: int
    kind: str
    body: bytes
    state: State = State.QUEUED
    media: str = ""
    result: bytes = b""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a client trains.

    Attributes:
        rank: of its adapter; 0: every weight is trained.
        applied: the last operation that is through. saved: the last that `folder` holds, -1 where there is none yet.
        unloaded: why nothing can be asked of it any more.
    """

    id: str
    session: str
    owner: str
    base: str
    rank: int
    config: Mapping[str, Any]
    created: float
    used: float
    applied: int
    saved: int
    folder: str
    unloaded: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that were saved under a name. `kind`: training, sampler or external."""

    path: str
    model: str
    owner: str
    kind: str
    folder: str
    created: float
    expires: float | None
    bytes: int
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a client samples from: `folder` holds its adapter, or its weights; "": the base model itself.

    `path`: of the checkpoint, if it is one. `model`: whose newest weights it follows, if any's.
    """

    id: str
    session: str
    owner: str
    base: str
    path: str
    model: str
    folder: str
    clones: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    owner: str
    created: float
    ended: str
    body: Mapping[str, Any]


def session_of(row: Sequence[Any]) -> Session:
    id, owner, created, ended, body = row
    return Session(id, owner, created, ended, json.loads(body))


def model_of(row: Sequence[Any]) -> Model:
    values = list(row)
    values[5], values[12] = json.loads(row[5]), json.loads(row[12])
    return Model(*values)


def operation_of(row: Sequence[Any]) -> Operation:
    id, target, seq, kind, body, _, state, media, result, *_ = row
    return Operation(id, target, seq, kind, body, State(state), media, result)


def checkpoint_of(row: Sequence[Any]) -> Checkpoint:
    values = [*row[:8], json.loads(row[8])]
    return Checkpoint(*values)
