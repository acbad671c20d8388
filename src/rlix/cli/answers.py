"""What commands print with `--json`: one schema, which `rlix schema --answers` prints. The queue's commands print what
its API answers (`rlix.serve.api.models`). Times are unix seconds, memory is in bytes."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class HostAnswer(Answer):
    name: str
    address: str
    state: str
    """ready, cordoned, draining, lost or misconfigured."""
    why: str = ""


class HostsAnswer(Answer):
    """`rlix drain`, `rlix uncordon`."""

    hosts: tuple[HostAnswer, ...]


class JobAnswer(Answer):
    name: str
    pipeline_id: str
    state: str
    """starting, running, finished, failed, stopped, unknown (it does not answer); ending, attached (a program)."""
    phase: str = ""
    step: int = 0
    steps: int = 0
    error: str = ""
    run_dir: str | None = None
    resumes: int = 0
    reward: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """Of a program: what it said of its last step."""


class JobsAnswer(Answer):
    """`rlix stop`."""

    jobs: tuple[JobAnswer, ...]


class LeaseAnswer(Answer):
    epoch: int
    pipeline_id: str
    cluster: str
    phase: str
    devices: tuple[int, ...]
    state: str
    """pending, active, draining or quarantined."""
    since: float | None
    reason: str = ""


class WaitAnswer(Answer):
    pipeline_id: str
    cluster: str
    phase: str
    since: float
    behind: str
    """What is in its way."""


class EndingAnswer(Answer):
    time: float
    pipeline_id: str
    job: str
    cluster: str
    devices: tuple[int, ...]
    why: str


class DeviceAnswer(Answer):
    id: int
    address: str
    kind: str


class StatusAnswer(Answer):
    """`rlix status`. `running`: whether there is a control plane; `trouble`: why it grants nothing."""

    running: bool
    said: str
    jobs: tuple[JobAnswer, ...] = ()
    devices: tuple[DeviceAnswer, ...] = ()
    leases: tuple[LeaseAnswer, ...] = ()
    waiting: tuple[WaitAnswer, ...] = ()
    hosts: tuple[HostAnswer, ...] = ()
    endings: tuple[EndingAnswer, ...] = ()
    trouble: str = ""


class PhaseAnswer(Answer):
    phase: str
    cluster: str
    devices: int
    parts: Mapping[str, int]
    """Bytes on each device, by what they are for."""
    total: int


class MemoryAnswer(Answer):
    name: str
    phases: tuple[PhaseAnswer, ...]
    """Empty of a job with a pipeline of its own, whose memory is not known."""
    fitting: int | None = None
    """Trajectories of the greatest length that a replica decodes at a time."""


class CheckAnswer(Answer):
    """`rlix check`. `memory`: of a device, where it is known."""

    memory: int | None
    jobs: tuple[MemoryAnswer, ...]


class DoctorHostAnswer(Answer):
    name: str
    address: str
    own_name: tuple[str, ...]
    versions: Mapping[str, str]
    shm: int
    shm_free: int
    locks: str


class DoctorAnswer(Answer):
    """`rlix doctor`. `problems`: what is wrong, a sentence each."""

    hosts: tuple[DoctorHostAnswer, ...]
    problems: tuple[str, ...]


class DownAnswer(Answer):
    """`rlix down`."""

    ended: bool
    said: str


class FreeAnswer(Answer):
    """`rlix free`."""

    devices: tuple[int, ...]


class ExportAnswer(Answer):
    """`rlix export`."""

    run_dir: str
    checkpoint: str
    folder: str


class PlanAnswer(Answer):
    """`rlix plan`. `modes`: seconds of a step of the fastest plan of each mode."""

    mode: str
    seconds: float
    devices: int
    modes: Mapping[str, float]
    guesses: tuple[str, ...]
    explanation: str


class ProfileAnswer(Answer):
    """`rlix profile`."""

    path: str
    tables: str


class FileAnswer(Answer):
    """`rlix queue backup` (what was written) and `restore` (where the queue before is kept)."""

    said: str
    file: str | None


class LoraAnswer(Answer):
    """`rlix lora`."""

    job: str = ""
    run: str = ""
    said: str
    folder: str | None = None


ANSWERS: tuple[type[Answer], ...] = (
    StatusAnswer,
    CheckAnswer,
    DoctorAnswer,
    HostsAnswer,
    JobsAnswer,
    DownAnswer,
    FreeAnswer,
    ExportAnswer,
    PlanAnswer,
    ProfileAnswer,
    FileAnswer,
    LoraAnswer,
)


def print_answer(found: BaseModel) -> None:
    sys.stdout.write(json.dumps(found.model_dump(mode="json"), indent=2) + "\n")


def say(found: FileAnswer | LoraAnswer, *, as_json: bool) -> None:
    print_answer(found) if as_json else typer.echo(found.said)


def schema_of_answers() -> dict[str, Any]:
    """Of all of them, by name under `$defs`."""
    _, described = models_json_schema([(answer, "serialization") for answer in ANSWERS])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
