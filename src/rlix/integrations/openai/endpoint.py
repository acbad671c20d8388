"""The job's endpoint: one address and one key, for everything that its agents play."""

import json
import os
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TextIO

import uvicorn

from rlix.control.settings import Settings
from rlix.integrations.openai.episodes import Episodes
from rlix.integrations.openai.server import make_app
from rlix.node.file_lock import FileBusyError, lock_file
from rlix.pipeline.sources.loop import LoopThread
from rlix.protocol.errors import RlixError, SpecError

_START_TIMEOUT_S = 30.0
_TAKEN_S = 10.0  # for one that was just killed to end


class Endpoint:
    """Serves until all who `join`ed have left."""

    def __init__(self, job: str, port: int) -> None:
        self.loop = LoopThread()
        self.episodes = Episodes()
        self._job, self._port, self._users = job, port, 0
        app = make_app(job, self.episodes)
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = self.loop.submit(self._server.serve())
        self.base_url = f"http://127.0.0.1:{self._bound_port()}/v1"
        self._name: TextIO | None = None  # the lock on the job's name, while others look for it by that

    @staticmethod
    def join(shared: dict[str, Any], job: str, port: int, *, from_outside: bool) -> "Endpoint":
        """The job's, which the first to join starts; `shared` is what sources of the job have in common.

        Args:
            from_outside: whether agents look for it by the job's name.

        Raises:
            SpecError: a job of that name has one that is looked for already.
        """
        if "endpoint" not in shared:
            shared["endpoint"] = Endpoint(job, port)
        endpoint: Endpoint = shared["endpoint"]
        endpoint._users += 1
        if from_outside and endpoint._name is None:
            try:
                endpoint._publish()
            except SpecError:
                endpoint.leave(shared)
                raise
        return endpoint

    def leave(self, shared: dict[str, Any]) -> None:
        self._users -= 1
        if self._users:
            return
        shared.pop("endpoint", None)
        self._server.should_exit = self._server.force_exit = True
        wait([self._serving], timeout=_START_TIMEOUT_S)
        self.loop.close()
        if self._name is not None:
            _address_of(self._job).unlink(missing_ok=True)
            Path(self._name.name).unlink(missing_ok=True)
            self._name.close()

    def _publish(self) -> None:
        """Where agents of the same user find it."""
        path = _address_of(self._job)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._name = lock_file(path.with_suffix(".lock"), _TAKEN_S)
        except FileBusyError as error:
            raise SpecError(
                f"name: another job {self._job!r} has its endpoint on this machine ({error}), and agents find one by "
                "that name; give this one another"
            ) from error
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"base_url": self.base_url, "api_key": self.episodes.key}, file)

    def _bound_port(self) -> int:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if self._serving.done() or time.monotonic() > deadline:
                raise RlixError(f"the job's endpoint did not start on 127.0.0.1:{self._port}: is the port free?")
            time.sleep(0.01)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port


def endpoint_of(job: str) -> tuple[str, str]:
    """The base URL and the key of a job's endpoint on this machine; of a run of several it is `<job>/<run>`.

    Raises:
        RlixError: no job of that name has one.
    """
    path = _address_of(job)
    if not path.is_file():
        raise RlixError(f"no job {job!r} has an endpoint here: {path} is missing")
    found = json.loads(path.read_text())
    return found["base_url"], found["api_key"]


def _address_of(job: str) -> Path:
    return Settings.from_env().home / "endpoints" / f"{job}.json"
