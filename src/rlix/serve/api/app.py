"""The HTTP API: each door, who may use it, and what it answers. Who asks is said by the token alone."""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlix.protocol.errors import RlixError, SpecError
from rlix.scheduler.queue.fair_share import times_its_share
from rlix.scheduler.queue.jobs import PRIORITIES, Job, QueueError, State
from rlix.serve.api import metrics, models
from rlix.serve.api.openapi import Door, describe
from rlix.serve.api.views import view, view_of
from rlix.serve.page.files import page_routes
from rlix.serve.page.live import LONGEST_S, Live
from rlix.serve.queue.accounts import Accounts
from rlix.serve.queue.hooks import Hook, Hooks, check_url, host_of
from rlix.serve.queue.keeper import Asked, Keeper
from rlix.serve.queue.runner import JOB_FILE
from rlix.serve.queue.store import User
from rlix.serve.queue.submission import MOST_BYTES, check_files, read_submission
from rlix.serve.queue.users import DEFAULT_TEAM, Users

_MOST_LOG = 256 << 10  # bytes of one answer
_MOST_BODY = 2 * MOST_BYTES  # in base64, with the job file
_MOST_NUMBER = 2.0**53
_MOST_ENDED = 1000


class RefusedError(RlixError):
    """The user may not do that."""


class MissingError(RlixError):
    """There is no such thing."""


@dataclass(frozen=True, slots=True)
class Service:
    keeper: Keeper
    users: Users
    accounts: Accounts
    live: Live
    hooks: Hooks


Handler = Callable[[Request, User], Awaitable[BaseModel]]


def make_app(service: Service, *, now: Callable[[], float] = time.time) -> Starlette:
    """Everything runs on the loop that the keeper belongs to."""
    doors = _Doors(service, now)
    table = [
        Door("POST", "/v1/jobs", "Submit a job", doors.submit, models.Submission, models.JobView),
        Door(
            "GET",
            "/v1/jobs",
            "Jobs that have not ended; `state=ended`: those that have; `mine=1`",
            doors.list,
            None,
            models.JobList,
        ),
        Door("GET", "/v1/jobs/{id}", "A job, and why it waits", doors.one, None, models.JobView),
        Door("GET", "/v1/jobs/{id}/history", "What has happened to a job", doors.history, None, models.History),
        Door("GET", "/v1/jobs/{id}/log", "A part of its log, from `offset` on", doors.log, None, models.Log),
        Door("POST", "/v1/jobs/{id}/cancel", "End it", doors.cancel, None, models.JobView),
        Door("POST", "/v1/jobs/{id}/hold", "Let it wait", doors.hold, None, models.JobView),
        Door("POST", "/v1/jobs/{id}/release", "Let it wait no longer", doors.release, None, models.JobView),
        Door("POST", "/v1/jobs/{id}/requeue", "Queue it again", doors.requeue, None, models.JobView),
        Door(
            "POST",
            "/v1/jobs/{id}/priority",
            "Set its priority class",
            doors.priority,
            models.PriorityChange,
            models.JobView,
        ),
        Door("GET", "/v1/pool", "The pool, and who asks", doors.pool, None, models.PoolView),
        Door("GET", "/v1/overview", "What the page shows", doors.overview, None, models.Overview),
        Door("GET", "/v1/timeline", "Devices over time", doors.timeline, None, models.TimelineView),
        Door("GET", "/v1/jobs/{id}/run", "Its metrics and samples", doors.run, None, models.RunView),
        Door("POST", "/v1/queue/drain", "Start nothing any more", doors.drain, models.Draining, models.PoolView),
        Door("POST", "/v1/queue/resume", "Start jobs again", doors.resume, None, models.PoolView),
        Door("GET", "/v1/hook", "Where you are told of your jobs", doors.hook, None, models.HookView),
        Door("POST", "/v1/hook", "Be told of your jobs", doors.put_hook, models.NewHook, models.HookView),
        Door("GET", "/v1/usage", "What jobs were given since `since`", doors.usage, None, models.UsageList),
        Door("GET", "/v1/users", "The users, for admins", doors.list_users, None, models.UserList),
        Door("POST", "/v1/users/{name}/remove", "Remove a user", doors.remove_user, None, models.UserList),
        Door("POST", "/v1/users", "Add a user, or give one a new token", doors.add_user, models.NewUser, models.Token),
    ]
    described = describe(table)

    async def openapi(_: Request) -> Response:
        return JSONResponse(described)

    exposed = metrics.exposition(service.keeper, service.accounts, now)

    async def numbers(request: Request) -> Response:
        if service.users.of(request.headers.get("authorization", "")) is None:
            return _nobody()
        return Response(exposed(), media_type=metrics.CONTENT_TYPE)

    routes = [Route(door.path, _answering(door, service.users), methods=[door.method]) for door in table]
    routes += [Route("/openapi.json", openapi), Route("/metrics", numbers), *page_routes()]
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _no_such_door},
        middleware=[Middleware(GZipMiddleware, minimum_size=4096, compresslevel=4)],
    )


async def _no_such_door(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: there is no such thing; /openapi.json describes what there is"
    return JSONResponse({"error": text}, status_code=error.status_code, headers=error.headers)


def _answering(door: Door, users: Users) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        user = users.of(request.headers.get("authorization", ""))
        if user is None:
            return _nobody()
        try:
            found = await door.handler(request, user)
        except RefusedError as error:
            return _problem(403, str(error))
        except MissingError as error:
            return _problem(404, str(error))
        except QueueError as error:
            return _problem(409, str(error))
        except ValidationError as error:
            told = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
            lines = [f"{where or 'the body'}: {what}" for where, what in told]
            return _problem(422, "\n".join(lines))
        except SpecError as error:
            return _problem(422, str(error))
        except RlixError as error:
            return _problem(503, str(error))
        return Response(found.model_dump_json(), media_type="application/json")

    return answer


def _nobody() -> Response:
    return _problem(401, "no user has this token; set RLIX_TOKEN to yours")


def _problem(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=status)


class _Doors:
    def __init__(self, service: Service, now: Callable[[], float]) -> None:
        self._keeper, self._users, self._accounts, self._now = service.keeper, service.users, service.accounts, now
        self._live = service.live
        self._hooks = service.hooks

    async def submit(self, request: Request, user: User) -> models.JobView:
        body = models.Submission.model_validate_json(await _body(request))
        keeper, files = self._keeper, dict(body.files)
        check_files(files)
        devices = max(1, keeper.pool.devices)
        name, gpus = await asyncio.to_thread(read_submission, body.spec, devices, files)
        snapshot = keeper.snapshot()
        most, guaranteed = snapshot.team(user.team).maximum, snapshot.team(user.team).guaranteed
        if most is not None and gpus > most:
            raise SpecError(f"{name}: needs {gpus} places at once, and team {user.team} may have at most {most}")
        if not body.preemptible and guaranteed + snapshot.common < gpus <= snapshot.pool.places:
            raise SpecError(
                f"{name}: needs {gpus} places at once and cannot be preempted, and would never start: "
                f"{guaranteed} are guaranteed to team {user.team}, and {snapshot.common} to nobody; submit it as one "
                "that can be preempted"
            )
        webhook = check_url(body.webhook, "webhook") if body.webhook else ""
        asked = Asked(name, gpus, PRIORITIES[body.priority], body.preemptible, body.limit_s, body.hold, webhook)
        if body.dry_run:
            draft = keeper.draft(asked, user.name, user.team)
            found = view_of(keeper, draft, keeper.foresee(draft), self._now())
            return found.model_copy(update={"id": 0, "run_dir": ""})
        files[JOB_FILE] = body.spec.encode()
        key = None if body.key is None else f"{user.name}:{body.key}"
        return self._changed(keeper.submit(asked, user.name, user.team, files, key))

    async def list(self, request: Request, user: User) -> models.JobList:
        ended = _choice(request.query_params, "state", "ended")
        mine = _choice(request.query_params, "mine", "1")
        owner = user.name if mine else None
        jobs = self._keeper.ended(_MOST_ENDED, owner=owner) if ended else self._keeper.jobs.values()
        return models.JobList(jobs=[self._view(job) for job in jobs if owner in (None, job.owner)])

    async def one(self, request: Request, _: User) -> models.JobView:
        return self._view(self._job(request))

    async def history(self, request: Request, _: User) -> models.History:
        job = self._job(request)
        changes = [models.ChangeView(time=c.time, by=c.by, what=c.what) for c in self._keeper.changes(job.id)]
        return models.History(job=self._view(job), changes=changes)

    async def log(self, request: Request, user: User) -> models.Log:
        job = self._own(request, user, "read the log of")
        offset = _number(request.query_params, "offset")
        path = self._keeper.work(job).run_dir / "job.log"
        start, data = await asyncio.to_thread(_read, path, int(offset))
        return models.Log(text=data.decode(errors="replace"), next=start + len(data), ended=job.state is State.ENDED)

    async def cancel(self, request: Request, user: User) -> models.JobView:
        return self._changed(self._keeper.cancel(self._own(request, user, "cancel"), user.name))

    async def hold(self, request: Request, user: User) -> models.JobView:
        return self._changed(self._keeper.hold(self._own(request, user, "hold"), user.name))

    async def release(self, request: Request, user: User) -> models.JobView:
        job = self._own(request, user, "release")
        if job.state is State.HELD and job.why != user.name and not user.admin:
            raise RefusedError(f"job {job.id} was held by {job.why}, who may release it, or an admin")
        return self._changed(self._keeper.release(job, user.name))

    async def requeue(self, request: Request, user: User) -> models.JobView:
        return self._changed(self._keeper.requeue(self._own(request, user, "queue again"), user.name))

    async def priority(self, request: Request, user: User) -> models.JobView:
        job = self._own(request, user, "set the priority of")
        body = models.PriorityChange.model_validate_json(await _body(request))
        return self._changed(self._keeper.set_priority(job, PRIORITIES[body.priority], user.name))

    async def pool(self, _: Request, user: User) -> models.PoolView:
        keeper, snapshot = self._keeper, self._keeper.snapshot()
        teams = {*snapshot.teams, *(job.team for job in snapshot.jobs), *(team for team, _ in snapshot.used)}
        shares = {team: times_its_share(snapshot, team) for team in sorted(teams)}
        running = sum(job.active for job in snapshot.jobs)
        return models.PoolView(
            devices=keeper.pool.devices,
            jobs_per_gpu=keeper.pool.jobs_per_gpu,
            why=keeper.pool_why,
            user=user.name,
            team=user.team,
            admin=user.admin,
            waiting=len(snapshot.jobs) - running,
            running=running,
            times_share={team: share for team, share in shares.items() if share is not None},
            drained=keeper.drained,
        )

    async def overview(self, _: Request, __: User) -> models.Overview:
        return self._live.overview()

    async def timeline(self, request: Request, _: User) -> models.TimelineView:
        seconds = _number(request.query_params, "seconds") or 3600.0
        if seconds > LONGEST_S:
            raise SpecError(f"seconds: must be at most {LONGEST_S:.0f}")
        return self._live.timeline(_number(request.query_params, "since"), seconds)

    async def run(self, request: Request, user: User) -> models.RunView:
        job = self._job(request)
        return await self._live.run_of(job, samples=job.owner == user.name or user.admin)

    async def drain(self, request: Request, user: User) -> models.PoolView:
        _for_admins(user, "drain the queue")
        body = models.Draining.model_validate_json(await _body(request) or b"{}")
        self._keeper.drain(user.name, requeue=body.requeue)
        return await self.pool(request, user)

    async def resume(self, request: Request, user: User) -> models.PoolView:
        _for_admins(user, "let it go on")
        self._keeper.resume()
        return await self.pool(request, user)

    async def hook(self, _: Request, user: User) -> models.HookView:
        hook = self._hooks.of(user.name)
        return models.HookView(host="", on=[]) if hook is None else _hook_view(hook)

    async def put_hook(self, request: Request, user: User) -> models.HookView:
        body = models.NewHook.model_validate_json(await _body(request))
        if not body.url:
            self._hooks.put(user.name, None)
            return models.HookView(host="", on=[])
        hook = Hook(check_url(body.url, "url"), tuple(body.on), secrets.token_urlsafe(24))
        self._hooks.put(user.name, hook)
        return _hook_view(hook).model_copy(update={"secret": hook.secret})

    async def usage(self, request: Request, _: User) -> models.UsageList:
        since = _number(request.query_params, "since")
        rows = [models.UsageRow(**asdict(row), idle_s=row.idle_s) for row in self._accounts.since(since)]
        return models.UsageList(since=since, rows=rows)

    async def add_user(self, request: Request, user: User) -> models.Token:
        _for_admins(user, "add users")
        body = models.NewUser.model_validate_json(await _body(request))
        teams = self._keeper.snapshot().teams
        if teams and body.team not in (*teams, DEFAULT_TEAM):
            raise SpecError(f"team: {body.team} is not in queue.yaml, which names {', '.join(sorted(teams))}")
        token = self._users.add(User(body.name, body.team, body.admin))
        return models.Token(name=body.name, team=body.team, admin=body.admin, token=token)

    async def list_users(self, _: Request, user: User) -> models.UserList:
        _for_admins(user, "list users")
        return models.UserList(users=[models.UserView(**asdict(one)) for one in self._users.all()])

    async def remove_user(self, request: Request, user: User) -> models.UserList:
        _for_admins(user, "remove users")
        name = request.path_params["name"]
        if name not in {one.name for one in self._users.all()}:
            raise MissingError(f"there is no user {name}")
        self._users.remove(name)
        self._hooks.put(name, None)
        return await self.list_users(request, user)

    def _changed(self, job: Job) -> models.JobView:
        self._live.forget()
        return self._view(job)

    def _view(self, job: Job) -> models.JobView:
        return view(self._keeper, job, self._now())

    def _job(self, request: Request) -> Job:
        text = request.path_params["id"]
        job = self._keeper.job(int(text)) if text.isdecimal() and len(text) < 18 else None
        if job is None:
            raise MissingError(f"there is no job {text}")
        return job

    def _own(self, request: Request, user: User, verb: str) -> Job:
        job = self._job(request)
        if job.owner != user.name and not user.admin:
            raise RefusedError(
                f"job {job.id} is {job.owner}'s: {job.owner} may {verb} it, or an admin; you are {user.name}"
            )
        return job


def _hook_view(hook: Hook) -> models.HookView:
    return models.HookView(host=host_of(hook.url), on=list(hook.on))


def _for_admins(user: User, what: str) -> None:
    if not user.admin:
        raise RefusedError(f"only an admin may {what}")


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BODY:
            raise SpecError(f"the body has more than {_MOST_BODY:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _choice(params: Mapping[str, str], name: str, value: str) -> bool:
    """Whether it is there; anything else is a mistake."""
    if (given := params.get(name)) not in (None, value):
        raise SpecError(f"{name}: must be {value} or left out")
    return given is not None


def _number(params: Mapping[str, str], name: str) -> float:
    try:
        value = float(params.get(name, "0"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_NUMBER:
        raise SpecError(f"{name}: must be a number of at least 0, and at most 2^53")
    return value


def _read(path: Path, offset: int) -> tuple[int, bytes]:
    """Whole characters, as far as they are there, and where they begin: a log that is shorter than what was read of it
    is another one, of a job that began again."""
    try:
        with path.open("rb") as file:
            if offset > os.fstat(file.fileno()).st_size:
                offset = 0
            file.seek(offset)
            data = file.read(_MOST_LOG)
    except OSError:
        return offset, b""
    return offset, data if len(data) < 4 else data[: _whole(data)]


def _whole(data: bytes) -> int:
    """How many bytes are whole characters of UTF-8."""
    for back in range(1, 4):
        byte = data[-back]
        if byte & 0b11000000 == 0b11000000:  # begins a character of several
            needed = 2 if byte < 0b11100000 else 3 if byte < 0b11110000 else 4
            return len(data) - back if back < needed else len(data)
        if byte < 0b10000000:
            return len(data)
    return len(data)
