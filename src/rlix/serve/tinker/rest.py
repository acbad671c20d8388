"""What is asked of runs, checkpoints, sessions and samplers: by path."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from rlix.protocol.errors import SpecError
from rlix.serve.tinker.keys import Keys
from rlix.serve.tinker.records import Checkpoint, Model
from rlix.serve.tinker.service import Service, UnknownError
from rlix.serve.tinker.store import SCHEME

Handler = Callable[[Request, str], Awaitable[Response]]
Read = Callable[[Request], Awaitable[dict[str, Any]]]
"""The JSON object of a request's body."""
FILES = "/files/{model}/{kind}/{name}/{file}"
_CHECKPOINT = "training_runs/{model}/checkpoints/{kind}/{name}"
_GIGABYTE = 1e9


def gets(service: Service, keys: Keys) -> dict[str, Handler]:
    async def run(request: Request, user: str) -> Response:
        return JSONResponse(_run(service, service.model(user, request.path_params["model"])))

    async def runs(request: Request, user: str) -> Response:
        return _paged(request, service.journal.models(user), "training_runs", lambda model: _run(service, model), 20)

    async def checkpoints(request: Request, user: str) -> Response:
        model = service.model(user, request.path_params["model"])
        return JSONResponse({"checkpoints": [_shown(each) for each in service.journal.checkpoints(user, model.id)]})

    async def all_checkpoints(request: Request, user: str) -> Response:
        return _paged(request, service.journal.checkpoints(user), "checkpoints", _shown, 100)

    async def urls(request: Request, user: str) -> Response:
        found = _checkpoint(service, request, user)
        listed, until = {}, 0
        for file in sorted(Path(found.folder).iterdir()):
            path = f"/api/v1/files/{found.path.removeprefix(SCHEME)}/{file.name}"
            signed, until = keys.link(path)
            listed[file.name] = f"{str(request.base_url).rstrip('/')}{path}?{signed}"
        return JSONResponse({"urls": listed, "expires": _time(until)})

    async def sessions(request: Request, user: str) -> Response:
        limit, offset = _page(request, 20)
        found = [session.id for session in service.journal.sessions(user)]
        return JSONResponse({"sessions": found[offset : offset + limit]})

    async def session(request: Request, user: str) -> Response:
        found = service.session(user, request.path_params["session"])
        return JSONResponse(
            {
                "training_run_ids": [model.id for model in service.journal.models(user, found.id)],
                "sampler_ids": [sampler.id for sampler in service.journal.samplers(found.id)],
                "user_metadata": found.body.get("user_metadata"),
                "display_name": found.body.get("display_name"),
            }
        )

    async def trace(request: Request, user: str) -> Response:
        service.session(user, request.path_params["session"])
        error = "refused: `rlix report` writes a trace of the server's jobs from their run folders"
        return JSONResponse({"status": "failed", "error": error})

    async def sampler(request: Request, user: str) -> Response:
        found = service.sampler(user, request.path_params["sampler"])
        return JSONResponse({"sampler_id": found.id, "base_model": found.base, "model_path": found.path or None})

    async def storage(_: Request, user: str) -> Response:
        found = service.journal.checkpoints(user)
        size = sum(each.bytes for each in found)
        used = {
            "user_name": user,
            "checkpoint_count": len(found),
            "size_bytes": size,
            "size_gigabytes": size / _GIGABYTE,
        }
        return JSONResponse({"data": [used]})

    return {
        "training_runs": runs,
        "training_runs/{model}": run,
        "training_runs/{model}/checkpoints": checkpoints,
        f"{_CHECKPOINT}/external_weights_urls": urls,
        "checkpoints": all_checkpoints,
        "sessions": sessions,
        "sessions/{session}": session,
        "sessions/{session}/trace_export": trace,
        "samplers/{sampler}": sampler,
        "billing/usage/checkpoints/current": storage,
    }


def posts(service: Service, read: Read) -> dict[str, Handler]:
    async def weights_info(request: Request, user: str) -> Response:
        found = service.store.find(user, (await read(request)).get("tinker_path"))
        about = found.about
        return JSONResponse(
            {
                "base_model": about["base"],
                "is_lora": bool(about["rank"]),
                "lora_rank": about["rank"] or None,
                "train_unembed": False,
                "train_mlp": about.get("train_mlp"),
                "train_attn": about.get("train_attn"),
            }
        )

    async def copy(request: Request, user: str) -> Response:
        given = await read(request)
        found = service.store.find(user, given.get("source_path"))
        key = request.headers.get("x-idempotency-key", "")
        path = await asyncio.to_thread(service.store.copy_of, found, user, given.get("ttl_seconds"), key)
        return JSONResponse({"tinker_path": path})

    return {"weights_info": weights_info, "copy_weights": copy}


def changes(service: Service, read: Read) -> Mapping[tuple[str, str], Handler]:
    """By method and path."""

    async def delete(request: Request, user: str) -> Response:
        await asyncio.to_thread(service.store.delete, _checkpoint(service, request, user))
        return Response(status_code=204)

    async def ttl(request: Request, user: str) -> Response:
        given = (await read(request)).get("ttl_seconds")
        service.store.keep_until(_checkpoint(service, request, user), given)
        return Response(status_code=204)

    async def project(request: Request, user: str) -> Response:
        found = service.session(user, request.path_params["session"])
        given = (await read(request)).get("project_id")
        service.journal.note_session(found.id, {**found.body, "project_id": given})
        return Response(status_code=204)

    async def publish(_: Request, __: str) -> Response:
        raise SpecError("publishing is refused: weights belong to one user here; send save_weights_external's files")

    return {
        ("DELETE", _CHECKPOINT): delete,
        ("PUT", f"{_CHECKPOINT}/ttl"): ttl,
        ("POST", f"{_CHECKPOINT}/publish"): publish,
        ("DELETE", f"{_CHECKPOINT}/publish"): publish,
        ("PUT", "sessions/{session}/project"): project,
    }


def file_of(service: Service, keys: Keys) -> Callable[[Request], Awaitable[Response]]:
    """A file of external weights, for whoever has the signed address."""

    async def handle(request: Request) -> Response:
        query, names = request.query_params, request.path_params
        if not keys.is_linked(request.url.path, query.get("until", ""), query.get("signature", "")):
            return JSONResponse({"detail": "the address is signed for an hour, and this is not it"}, status_code=403)
        found = service.journal.checkpoint(f"{SCHEME}{names['model']}/{names['kind']}/{names['name']}")
        files = [] if found is None else [file for file in Path(found.folder).iterdir() if file.name == names["file"]]
        if not files:
            return JSONResponse({"detail": "there is no such file any more"}, status_code=404)
        return FileResponse(files[0])

    return handle


def _checkpoint(service: Service, request: Request, user: str) -> Checkpoint:
    names = request.path_params
    try:
        return service.store.find(user, f"{SCHEME}{names['model']}/{names['kind']}/{names['name']}")
    except SpecError as error:
        raise UnknownError(str(error)) from None


def _run(service: Service, model: Model) -> dict[str, Any]:
    found = service.journal.checkpoints(model.owner, model.id)
    last = {kind: next((_shown(each) for each in found if each.kind == kind), None) for kind in ("training", "sampler")}
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.owner,
        "is_lora": bool(model.rank),
        "lora_rank": model.rank or None,
        "corrupted": False,
        "last_request_time": _time(model.used),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": dict(model.metadata) or None,
    }


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.path.removeprefix(SCHEME).partition("/")[2],
        "checkpoint_type": checkpoint.kind,
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "public": False,
        "user_metadata": checkpoint.about.get("user_metadata"),
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: Request, default: int) -> tuple[int, int]:
    try:
        limit, offset = int(request.query_params.get("limit", default)), int(request.query_params.get("offset", 0))
    except ValueError:
        raise SpecError("limit and offset must be whole numbers") from None
    return max(0, limit), max(0, offset)


def _paged(
    request: Request, found: list[Any], name: str, shown: Callable[[Any], dict[str, Any]], default: int
) -> Response:
    limit, offset = _page(request, default)
    page = [shown(each) for each in found[offset : offset + limit]]
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return JSONResponse(json.loads(json.dumps({name: page, "cursor": cursor})))
