"""The server as a whole: from its settings to a socket."""

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from rlix.pipeline.models import local_model
from rlix.protocol.errors import RlixError
from rlix.serve.queue.config import FILE as QUEUE_FILE
from rlix.serve.queue.config import load_config
from rlix.serve.tinker.app import Door, Results
from rlix.serve.tinker.base import bases_of, shape_of
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.keys import DEFAULT_USER, Keys, kept, new_key
from rlix.serve.tinker.live import Means, Start
from rlix.serve.tinker.service import Service
from rlix.serve.tinker.settings import ServerSettings
from rlix.serve.tinker.store import Store

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs. `keys`: by user. `models`: that clients may ask for. `notes`: what whoever started it should
    know."""

    url: str
    keys: dict[str, str]
    models: tuple[str, ...]
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def serving(
    settings: ServerSettings, home: Path, start: Start, *, host: str = LOOPBACK, port: int = 0
) -> Iterator[Serving]:
    """Serves for as long as the block lasts. What was asked before and has no result is done.

    Args:
        home: RLIX_HOME, in whose folder `tinker` everything is kept.
        start: begins the job behind a model: `start_served` with the pool's orchestrator.
        port: 0 takes a free one.

    Raises:
        SpecError: a model is not there, or queue.yaml has a mistake.
        RlixError: the port is taken, or another server uses the folder.
    """
    folder = home / "tinker"
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: team.weight for name, team in load_config(home / QUEUE_FILE).teams.items()}
    teams = settings.teams_with(weights)
    users = dict(settings.keys) or {DEFAULT_USER: kept(folder / "key", new_key)}
    keys = Keys(users, kept(folder / "secret", lambda: secrets.token_hex(32)).encode())
    journal = Journal(folder / "journal.db")
    with contextlib.ExitStack() as last:
        last.callback(journal.close)
        most = None if settings.max_saved_gb is None else settings.max_saved_gb * 1e9
        store = Store(folder / "checkpoints", journal, unnamed=settings.samplers_kept, most=most)
        results = Results()
        means = Means(journal, store, folder, start, results.finished, settings.state_every, teams)
        bases = [
            base
            for name, offered in settings.models.items()
            for base in bases_of(name, offered, shape_of(local_model(offered.path or name)), means)
        ]
        service = Service(settings, journal, store, {base.name: base for base in bases})
        door = Door(
            *(service, keys, results),
            most=int(settings.max_body_mb * 1e6),
            results_kept_s=settings.results_kept_s,
        )
        for base in bases:
            base.start()
            last.callback(base.close)
        bound = last.enter_context(_listening(door, results, host, port))
        _publish(folder, last, bound, users)
        yield Serving(bound, users, tuple(base.name for base in bases), tuple(_notes(settings)))


def _notes(settings: ServerSettings) -> Iterator[str]:
    """Where clients may not find a tokenizer by what they are told."""
    for name, offered in settings.models.items():
        told = offered.tokenizer or offered.path or name
        if Path(told).is_absolute():
            yield f"{name}: clients are told to load the tokenizer from {told}, which other machines do not have"
        if name.count("/") != 1 and not Path(name).exists():
            yield (
                f"{name}: SamplingClient.get_tokenizer() asks the hub for a model of that name; where there is none, "
                "clients take TrainingClient.get_tokenizer()"
            )


@contextlib.contextmanager
def _listening(door: Door, results: Results, host: str, port: int) -> Iterator[str]:
    config = uvicorn.Config(door.app(), host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_serve, args=(server,), name="tinker-http", daemon=True)
    thread.start()
    deadline = time.monotonic() + _START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RlixError(f"the server did not start on {host}:{port}: is the port free? --port takes another one")
        time.sleep(0.01)
    try:
        yield f"http://{host}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        results.close()
        server.should_exit = True
        thread.join(_START_S)


def _serve(server: Any) -> None:
    with contextlib.suppress(SystemExit):  # of a port that is taken, which was logged
        server.run()


def _publish(folder: Path, last: contextlib.ExitStack, url: str, users: dict[str, str]) -> None:
    """Where programs of the same user find it."""
    path = folder / "address.json"
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(json.dumps({"base_url": url, "api_key": next(iter(users.values()))}))
    last.callback(path.unlink, missing_ok=True)
