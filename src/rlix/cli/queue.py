"""`rlix submit`, `ps`, `logs`, `explain`, `cancel` and the like, which speak the queue's API and no Ray."""

import contextlib
import csv
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import typer
from pydantic import BaseModel
from rich.table import Table

from rlix.cli.answers import print_answer
from rlix.cli.view import make_console
from rlix.control.settings import Settings
from rlix.pipeline.spec.job import job_text, load_job, named_files, shipped_jobs, shipped_path
from rlix.protocol.errors import RlixError, SpecError
from rlix.scheduler.queue.reasons import counted
from rlix.serve.api import models
from rlix.serve.api.client import Client, UnreachableError, connect
from rlix.serve.queue.submission import check_size

T = TypeVar("T")
POLL_S = 1.0
_TRIES, _AGAIN_S = 20, 0.5  # while a service is started again
FOLLOW_TRIES = 600  # and so often by who follows a log
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a submission says beside the job file."""

    priority: models.Priority = "normal"
    preemptible: bool = True
    limit: str | None = None
    hold: bool = False
    dry_run: bool = False
    given: tuple[str, ...] = ()
    webhook: str = ""


def submit(specs: Sequence[str], wish: Wish, *, as_json: bool) -> None:
    """Each job is checked here, where its files are, before any is sent. Prints ids, one a line."""
    client, jobs = submit_all(specs, wish)
    if as_json:
        print_answer(models.JobList(jobs=jobs))
    elif wish.dry_run:
        _say(_pool_text(client))
        for job in jobs:
            _say(f"{job.name}: {counted(job.gpus, 'GPUs')} for its largest gang; {job.reason}")
        _print_memory(specs, wish.given, client)
    else:
        for job in jobs:
            typer.echo(str(job.id))


def submit_all(specs: Sequence[str], wish: Wish) -> tuple[Client, list[models.JobView]]:
    """Each job is checked here, where its files are, before any is sent."""
    asked = [_submission(spec, wish) for spec in specs]
    client = _client()
    return client, [_submitted(client, one) for one in asked]


def ps(*, mine: bool, as_json: bool) -> None:
    """The queue, and what runs."""
    client = _client()
    jobs = client.jobs(mine=mine)
    if as_json:
        print_answer(models.JobList(jobs=jobs))
        return
    _say(_pool_text(client))
    _print_jobs(jobs)


def history(id: int | None, *, mine: bool, as_json: bool) -> None:
    """Jobs that have ended, or what has happened to one."""
    client = _client()
    if id is None:
        jobs = client.jobs(ended=True, mine=mine)
        print_answer(models.JobList(jobs=jobs)) if as_json else _print_jobs(jobs)
        return
    found = client.get(f"/v1/jobs/{id}/history", models.History)
    if as_json:
        print_answer(found)
        return
    for change in found.changes:
        by = f" by {change.by}"
        _say(f"{_when(change.time)}  {change.what}{by if change.by and not change.what.endswith(by) else ''}")


def explain(id: int, *, as_json: bool) -> None:
    """One sentence: why a job waits, what it does, how it ended."""
    job = _client().job(id)
    print_answer(job) if as_json else _say(f"{job.name} ({job.id}) {sentence(job)}")


def act(ids: Sequence[int], verb: str, body: BaseModel | None = None, *, as_json: bool) -> None:
    """The same with each of these jobs, also after one that is refused; the refusals are raised at the end."""
    client, jobs, refused = _client(), [], []
    for id in ids:
        try:
            jobs.append(client.post(f"/v1/jobs/{id}/{verb}", models.JobView, body))
        except SpecError as error:
            refused.append(str(error))
    if as_json:
        print_answer(models.JobList(jobs=jobs))
    for job in () if as_json else jobs:
        _say(f"{job.name} ({job.id}) {sentence(job)}")
    if refused:
        raise SpecError("\n".join(dict.fromkeys(refused)))


def logs(id: int, *, follow: bool, as_json: bool = False, sleep: Callable[[float], None] = time.sleep) -> None:
    """A job's log so far; with `follow` until it has ended, also while the service is started again. As JSON an object
    for each part, one a line."""
    client, offset, tries = _client(), 0, 0
    while True:
        try:
            part = client.get(f"/v1/jobs/{id}/log", models.Log, offset=offset)
        except UnreachableError as error:
            if not follow or tries >= FOLLOW_TRIES:
                raise
            if not tries:
                typer.echo(f"{error}; asked again for {FOLLOW_TRIES * POLL_S / 60:.0f} minutes", err=True)
            tries += 1
            sleep(POLL_S)
            client = _anew(client)
            continue
        tries = 0
        sys.stdout.write(f"{part.model_dump_json()}\n" if as_json else part.text)
        sys.stdout.flush()
        if part.next == offset and (not follow or part.ended):
            if not offset:
                job = client.job(id)
                typer.echo(f"{job.name} ({id}) has no log so far: {sentence(job)}", err=True)
            return
        if part.next == offset:
            sleep(POLL_S)
        offset = part.next


def usage(since: str, *, as_json: bool, as_csv: bool) -> None:
    """What jobs were given since then."""
    at = time.time() - duration(since, "--since")
    found = _client().get("/v1/usage", models.UsageList, since=at)
    if as_json:
        print_answer(found)
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, list(models.UsageRow.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump() for row in found.rows)
    else:
        _print_usage(found)


def add_user(name: str, team: str, *, admin: bool, as_json: bool) -> None:
    """Prints the token, which nobody can ask for later."""
    asked = models.NewUser.model_construct(name=name, team=team, admin=admin)  # the service checks it
    token = _client().post("/v1/users", models.Token, asked)
    print_answer(token) if as_json else typer.echo(token.token)


def users(removed: str | None, *, as_json: bool) -> None:
    """Who there is, perhaps without one from now on."""
    client = _client()
    if removed is None:
        found = client.get("/v1/users", models.UserList)
    else:
        found = client.post(f"/v1/users/{quote(removed, safe='')}/remove", models.UserList)
    if as_json:
        print_answer(found)
        return
    for user in found.users:
        _say(f"{user.name}  team {user.team}{'  admin' if user.admin else ''}")


def duration(text: str, option: str) -> float:
    """Seconds of "90s", "30m", "4h", "7d", "2w". Raises SpecError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None or float(match[1]) <= 0:
        raise SpecError(f"{option} {text}: must be a time such as 30m, 4h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _submission(spec: str, wish: Wish) -> models.Submission:
    load_job(spec, given=wish.given)
    path = shipped_path(spec) if spec in shipped_jobs() and not Path(spec).is_file() else Path(spec)
    names = named_files(path, wish.given)
    wrong = [name for name in names if name.startswith("..") or not (path.parent / name).is_file()]
    if wrong:
        raise SpecError(
            f"{spec}: {wrong[0]} cannot go with the job: only files in the folder of the job file can; name what lies "
            "elsewhere, and folders, by absolute paths that the pool's hosts see"
        )
    check_size((path.parent / name).stat().st_size for name in names)
    return models.Submission.model_construct(
        spec=job_text(path, wish.given),
        files={name: (path.parent / name).read_bytes() for name in names},
        priority=wish.priority,
        preemptible=wish.preemptible,
        limit_s=None if wish.limit is None else duration(wish.limit, "--time"),
        hold=wish.hold,
        dry_run=wish.dry_run,
        webhook=wish.webhook,
        key=uuid.uuid4().hex,
    )


def ask_pool(path: str, body: BaseModel | None) -> models.PoolView:
    """What is asked of the queue as a whole may be asked again; a service that is just starting will answer."""

    def ask(client: Client) -> models.PoolView:
        return client.get(path, models.PoolView) if body is None else client.post(path, models.PoolView, body)

    return _answered(_client(), ask)


def hook(url: str | None, on: Sequence[str], *, as_json: bool) -> None:
    """Where one is told of one's jobs; with a URL from now on there, "" nowhere."""
    client = _client()
    if url is None:
        found = client.get("/v1/hook", models.HookView)
    else:
        asked = models.NewHook.model_validate({"url": url, **({"on": list(on)} if on else {})})
        found = client.post("/v1/hook", models.HookView, asked)
    if as_json:
        print_answer(found)
    else:
        _say(f"{found.host} is told when a job of yours {' or '.join(found.on)}" if found.host else "nobody is told")
        if found.secret:
            _say(f"what is sent is signed with {found.secret}")


def say_pool(pool: models.PoolView, *, as_json: bool) -> None:
    print_answer(pool) if as_json else _say(_said_of(pool))


def _submitted(client: Client, submission: models.Submission) -> models.JobView:
    """With its key it is the same job however often it is asked for."""
    return _answered(client, lambda client: client.post("/v1/jobs", models.JobView, submission))


def _answered(client: Client, ask: Callable[[Client], T]) -> T:
    """Asked again while nobody answers, for ten seconds."""
    for left in reversed(range(_TRIES)):
        try:
            return ask(client)
        except UnreachableError:
            if not left:
                raise
            time.sleep(_AGAIN_S)
            client = _anew(client)
    raise RlixError("unreachable")


def _print_memory(specs: Sequence[str], given: Sequence[str], client: Client) -> None:
    from rlix.cli.check import check_specs

    devices = client.get("/v1/pool", models.PoolView).devices
    check_specs(specs, given, memory_gib=None, devices=devices or None, model_config=None)


def _client() -> Client:
    return connect(Settings.from_env().home)


def _anew(client: Client) -> Client:
    """To the service that was started again, perhaps at another port; the same while there is none."""
    with contextlib.suppress(SpecError):
        return _client()
    return client


def _pool_text(client: Client) -> str:
    return _said_of(client.get("/v1/pool", models.PoolView))


def _said_of(pool: models.PoolView) -> str:
    shared = f", {pool.jobs_per_gpu} jobs on each" if pool.jobs_per_gpu > 1 else ""
    shares = "".join(f"; {team} has used {x:.1f} × its share" for team, x in pool.times_share.items())
    counts = f"{pool.running} running, {pool.waiting} waiting"
    drained = f"; drained by {pool.drained}: nothing starts" if pool.drained else ""
    size = f"a pool of {counted(pool.devices, 'GPUs')}{shared}"
    found = f"no pool now: {pool.why}" if pool.why else f"{size}: {counts}{shares}"
    return f"{found}{drained}"


def sentence(job: models.JobView) -> str:
    """What it does, why it waits, or how it ended."""
    if job.state == "running":
        progress = f" step {job.step}/{job.steps}," if job.steps else ""
        return f"runs:{progress} {job.reason}"
    if job.state == "ended":
        return f"{job.outcome}{f': {job.reason}' if job.reason else ''}"
    return job.reason


def _print_jobs(jobs: Sequence[models.JobView]) -> None:
    table = Table(box=None)
    for name in ("id", "job", "team", "owner", "state", "GPUs", "priority", "since", ""):
        table.add_column(name, no_wrap=bool(name), overflow="fold")
    for job in jobs:
        state = job.outcome or job.state
        cells = (str(job.id), job.name, job.team, job.owner, state, str(job.gpus), job.priority, _when(job.since))
        table.add_row(*cells, "" if job.state == "ended" and not job.reason else sentence(job))
    make_console().print(table, markup=False)


def _print_usage(found: models.UsageList) -> None:
    sums: dict[tuple[str, str], list[float]] = {}
    for row in found.rows:
        seconds = sums.setdefault((row.team, row.owner), [0.0] * 4)
        for place, part in enumerate((row.given_s, row.busy_s, row.switching_s, row.idle_s)):
            seconds[place] += part / 3600.0
    table = Table(title=f"GPU-hours since {_when(found.since)}", title_justify="left", box=None)
    for name in ("team", "owner", "given", "at work", "switching", "idle under lease"):
        table.add_column(name, justify="left" if name in ("team", "owner") else "right")
    for (team, owner), hours in sorted(sums.items(), key=lambda item: -item[1][0]):
        table.add_row(team, owner, *(f"{part:.3f}" for part in hours))
    make_console().print(table)


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _say(text: str) -> None:
    make_console().print(text, markup=False, highlight=False, soft_wrap=True)
