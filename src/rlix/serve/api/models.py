"""What is sent and answered: one schema, for the HTTP API, its OpenAPI description and `--json` of the commands."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Base64Bytes, BaseModel, ConfigDict, Field, WithJsonSchema

Priority = Literal["low", "normal", "high"]
LONGEST_LIMIT_S = 366 * 86400.0
_NAME, _LONGEST_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]*$", 64


def _named(text: str) -> str:
    if not re.fullmatch(_NAME, text) or len(text) > _LONGEST_NAME:
        raise ValueError(
            f"must begin with a letter or a digit and hold letters, digits and ._@- only, at most {_LONGEST_NAME}, "
            f"not {text[:_LONGEST_NAME]!r}"
        )
    return text


_Name = Annotated[
    str,
    AfterValidator(_named),
    WithJsonSchema({"type": "string", "pattern": _NAME, "minLength": 1, "maxLength": _LONGEST_NAME}),
]


class _Body(BaseModel):
    """Asked for: an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid")


class Submission(_Body):
    spec: str
    """The job file's text."""
    files: dict[str, Base64Bytes] = Field(default_factory=dict)
    """The files that it names relative to itself, by these names; their contents in base64."""
    priority: Priority = "normal"
    preemptible: bool = True
    limit_s: Annotated[float, Field(gt=0, le=LONGEST_LIMIT_S)] | None = None
    """At most 366 days."""
    hold: bool = False
    dry_run: bool = False
    """Say what would become of it, and keep nothing: `id` is 0 and `run_dir` empty."""
    webhook: str = ""
    """Is told by a POST when the job has finished or failed, or waits for long. Nobody can ask for it. Signed with the
    secret of who submits, once `POST /v1/hook` has made one."""
    key: Annotated[str, Field(min_length=8, max_length=64)] | None = None
    """Chosen by who submits, of 8 to 64 characters: asked again with the same key, it is the same job."""


class Draining(_Body):
    requeue: bool = False
    """What runs writes a checkpoint, ends, and waits with the others."""


class PriorityChange(_Body):
    priority: Priority


class NewUser(_Body):
    """Names begin with a letter or a digit and hold letters, digits and `._@-`, at most 64. Where `queue.yaml` names
    teams, `team` is one of them, or `default`."""

    name: _Name
    team: _Name = "default"
    admin: bool = False


class NewHook(_Body):
    """Of all jobs of who asks. `url` "": none any more."""

    url: str
    on: list[Literal["finished", "failed", "starved"]] = ["finished", "failed", "starved"]


class HookView(BaseModel):
    """`host`: "" where there is none. `secret` signs what is sent (`X-RLix-Signature`: HMAC with SHA-256 of the body);
    it is shown once."""

    host: str
    on: list[str]
    secret: str = ""


class Token(BaseModel):
    name: str
    team: str
    admin: bool
    token: str
    """Is shown this once."""


class UserView(BaseModel):
    name: str
    team: str
    admin: bool


class UserList(BaseModel):
    users: list[UserView]


class JobView(BaseModel):
    """A job. Times are unix seconds. `reason`: why it waits, is slow or ended. `start`: when it starts at the latest if
    nobody comes before it."""

    id: int
    name: str
    owner: str
    team: str
    state: str
    gpus: int
    priority: str
    preemptible: bool
    limit_s: float | None
    submitted_at: float
    since: float
    started_at: float | None
    reason: str
    ahead: int | None = None
    start: float | None = None
    outcome: str | None = None
    requeues: int = 0
    pipeline_id: str = ""
    phase: str = ""
    step: int = 0
    steps: int = 0
    run_dir: str = ""


class JobList(BaseModel):
    jobs: list[JobView]


class ChangeView(BaseModel):
    time: float
    by: str
    what: str


class History(BaseModel):
    job: JobView
    changes: list[ChangeView]


class Log(BaseModel):
    """A part of a job's log. Ask with `offset` = `next` for more of it."""

    text: str
    next: int
    ended: bool


class UsageRow(BaseModel):
    """Device-seconds: under a lease, at work, moving weights, and idle under a lease."""

    job: int
    name: str
    owner: str
    team: str
    phase: str
    given_s: float
    busy_s: float
    switching_s: float
    idle_s: float


class UsageList(BaseModel):
    since: float
    rows: list[UsageRow]


class PoolView(BaseModel):
    """`why`: there is no pool now. `times_share`: what teams were given by what they are entitled to, decayed.
    `drained`: who wants nothing to start; "": nobody."""

    devices: int
    jobs_per_gpu: int
    why: str
    user: str
    team: str
    admin: bool
    waiting: int
    running: int
    times_share: dict[str, float]
    drained: str = ""


class WaitView(BaseModel):
    """Who waits in the pool, since when, for what, and on whose lease."""

    pipeline_id: str
    since: float | None
    text: str


class ProgramView(BaseModel):
    """What runs in the pool and is no job of the queue."""

    pipeline_id: str
    name: str
    phase: str
    gpus: int
    step: int = 0
    steps: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    """What the program said of its last step."""


class TeamUsage(BaseModel):
    """Device-seconds of the last day: under a lease, of them at work, and moving weights."""

    team: str
    given_s: float
    busy_s: float
    switching_s: float


class Overview(BaseModel):
    """What a page shows: those that run and then those that wait, in their order, as many as fit, and how many more
    there are. `leased`: devices under a lease. `trouble`: what keeps the pool from granting anything, and the latest
    ends that nobody asked for."""

    time: float
    leased: int
    jobs: list[JobView]
    more_jobs: int
    ended: list[JobView]
    programs: list[ProgramView]
    more_programs: int
    waits: list[WaitView]
    more_waits: int
    trouble: list[str]
    usage: list[TeamUsage]


class LaneView(BaseModel):
    label: str
    devices: int


class TimelineView(BaseModel):
    """Who had which devices. Rows: lane, pipeline and phase, as places in the lists; from and to, in seconds since
    `start`; and which share of the lane's devices, on average. Where leases are many, a row is a stretch of time."""

    start: float
    end: float
    lanes: list[LaneView]
    pipelines: list[str]
    phases: list[str]
    jobs: dict[str, str]
    """What people call each pipeline."""
    rows: list[tuple[int, int, int, float, float, float]]


class SampleView(BaseModel):
    step: int
    evaluation: bool
    prompt: str
    completion: str
    reward: float
    end: str
    error: str = ""


class RunView(BaseModel):
    """A job's metrics, thinned, each as long as `step`, and its latest samples, which its owner and admins may read."""

    job: JobView
    step: list[int]
    time: list[float]
    metrics: dict[str, list[float | None]]
    samples: list[SampleView]
    may_read: bool


class Problem(BaseModel):
    error: str
