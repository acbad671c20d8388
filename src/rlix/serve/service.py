"""`rlix serve`: the queue, its API, and the loop that keeps them going, in one process that may be killed any time."""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rlix.protocol.errors import RlixError
from rlix.scheduler.queue.jobs import State
from rlix.serve.addresses import ADDRESS_FILE, PORT, TOKEN_FILE
from rlix.serve.api.app import Service, make_app
from rlix.serve.api.views import view
from rlix.serve.page.live import Live
from rlix.serve.queue.accounts import Accounts, read_run
from rlix.serve.queue.config import FILE as CONFIG_FILE
from rlix.serve.queue.config import QueueSpec, load_config
from rlix.serve.queue.hooks import Hooks
from rlix.serve.queue.keeper import Keeper
from rlix.serve.queue.runner import Runner
from rlix.serve.queue.store import FILE, Store
from rlix.serve.queue.users import Users

logger = logging.getLogger(__name__)

_ACCOUNT_S, _FORGET_S = 60.0, 3600.0
_MOST_ENDED = 10_000  # of one minute, or of the day before the service


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`host`: loopback unless told otherwise: who can reach it still needs a token, but the network sees tokens where
    there is no certificate."""

    home: Path
    runs_dir: Path
    host: str = "127.0.0.1"
    port: int = PORT
    certificate: Path | None = None
    key: Path | None = None


def serve(options: ServeOptions, runner: Runner, say: Callable[[str], None] = logger.info) -> None:
    """Returns when it is told to end (SIGTERM, SIGINT). Jobs go on. `say`: is told where it answers.

    Raises:
        RlixError: another service has the queue, or the port is taken.
    """
    config = load_config(options.home / CONFIG_FILE)
    with contextlib.closing(Store(options.home / FILE)) as store:
        users = Users(store)
        users.first(options.home)
        keeper = Keeper(store, runner, config, options.home, options.runs_dir.absolute(), now=time.time)
        accounts = Accounts(store, keeper.usage)
        live = Live(keeper, accounts, time.time)
        hooks = make_hooks(store, keeper, config, time.time)
        app = make_app(Service(keeper, users, accounts, live, hooks))
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                host=options.host,
                port=options.port,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ssl_certfile=options.certificate,
                ssl_keyfile=options.key,
            )
        )
        loops = (keeper.run, live.run, hooks.run, lambda: _account(keeper, accounts), lambda: _forget(keeper))
        asyncio.run(_run(server, loops, options, say))


def make_hooks(
    store: Store,
    keeper: Keeper,
    config: QueueSpec,
    now: Callable[[], float],
    transport: httpx.AsyncBaseTransport | None = None,
) -> Hooks:
    """Each job is described as the API does."""
    return Hooks(
        store,
        keeper,
        lambda job: view(keeper, job, now()).model_dump(mode="json"),
        starved_s=config.starved_h * 3600.0,
        now=now,
        transport=transport,
    )


async def _run(
    server: uvicorn.Server,
    loops: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    options: ServeOptions,
    say: Callable[[str], None],
) -> None:
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            raise RlixError(f"{options.host}:{options.port} cannot be listened at: is the port free?")
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    scheme = "https" if options.certificate is not None else "http"
    url = f"{scheme}://{options.host}:{port}"
    _announce(options.home, url)
    token = options.home / TOKEN_FILE
    say(f"the queue answers at {url}; open it in a browser, and sign in with the token in {token}")
    others = [asyncio.create_task(loop()) for loop in loops]
    try:
        done, _ = await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        server.should_exit = True
        for task in others:
            task.cancel()
        with contextlib.suppress(SystemExit):
            await serving


async def _account(keeper: Keeper, accounts: Accounts) -> None:
    """Once a minute what runs, and what has ended since."""
    since = time.time() - 86400.0  # it may have ended while there was no service
    while True:
        now = time.time()
        jobs = [job for job in keeper.jobs.values() if job.state is State.RUNNING]
        jobs += keeper.ended(_MOST_ENDED, since=since)
        since = now
        for job in jobs:
            try:
                accounts.take(job, await asyncio.to_thread(read_run, job, keeper.work(job).run_dir), now)
            except RlixError as error:
                logger.warning("%s is not accounted for: %s", job.said, error)
        with contextlib.suppress(RlixError):  # without a pool: the loop of turns says so
            await keeper.look_at_control()
        await asyncio.sleep(_ACCOUNT_S)


async def _forget(keeper: Keeper) -> None:
    while True:
        try:
            keeper.forget_files()
        except RlixError as error:
            logger.warning("%s", error)
        await asyncio.sleep(_FORGET_S)


def _announce(home: Path, url: str) -> None:
    partial = home / f"{ADDRESS_FILE}.partial"
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    partial.rename(home / ADDRESS_FILE)
