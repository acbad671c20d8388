"""Samples from agents that talk to the job's endpoint: its own, as a function, or anybody's from outside."""

import asyncio
import inspect
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from rlix.control.settings import Settings
from rlix.integrations.openai.conversation import ChatFormat
from rlix.integrations.openai.episodes import Episode, Episodes, Policy
from rlix.integrations.openai.server import make_app
from rlix.pipeline.batch import Row
from rlix.pipeline.samples import Sample
from rlix.pipeline.sources.base import Surroundings
from rlix.pipeline.sources.played import PlayedSource
from rlix.pipeline.spec.named import import_object, where_raised
from rlix.pipeline.spec.source import EXTERNAL, AgentSpec, ChatSpec
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.messages import Demand

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent is called with: where its policy is, and which episode it plays.

    `task` and `seed` are the same for all samples of a group, so what the agent draws from `seed` is too; `sample` is
    different for each.
    """

    base_url: str
    api_key: str
    model: str
    task: str
    seed: int
    sample: str


Agent = Callable[..., Any]
"""Plays one episode and returns its reward (a float), or None when it has posted one; may be async."""


class AgentSource(PlayedSource[Sample]):
    """Each sample is the last branch of one agent's conversation."""

    def __init__(self, spec: AgentSpec, around: Surroundings, chat: ChatSpec) -> None:
        super().__init__(spec, around, "agent", spec.failure_reward)
        self._spec = spec
        self._agent = _find_agent(spec)
        policy = Policy(
            seed=around.seed,
            sampling=around.sampling,
            context=around.context,
            ends=around.ends,
            chat=ChatFormat(around.tokenizer, chat, around.ends.token_ids),
            generate=lambda step, trajectory: around.generator().submit(step, trajectory),
        )
        self._episodes = Episodes(policy)
        self._threads = ThreadPoolExecutor(spec.concurrency, "agents")
        config = uvicorn.Config(
            make_app(around.job, self._episodes), host="127.0.0.1", port=spec.port, log_level="warning", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._serving = self._loop.submit(self._server.serve())
        self.base_url = f"http://127.0.0.1:{self._port()}/v1"
        self._address = _publish(around.job, self.base_url, self._episodes.key)

    @property
    def key(self) -> str:
        return self._episodes.key

    @property
    def longest(self) -> int:
        return self.around.context - 1

    # ---- episodes --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def opened(
        self, step: int, ids: Sequence[tuple[str, str]]
    ) -> "AsyncIterator[Mapping[str, asyncio.Future[Sample]]]":
        waiting = self._agent is None
        episodes = [self._episodes.open(step, id, task, waiting=waiting) for task, id in ids]
        played = [] if waiting else [asyncio.ensure_future(self._played(episode)) for episode in episodes]
        try:
            yield {episode.id: episode.done for episode in episodes}
        finally:
            for task in played:
                task.cancel()
            for episode in episodes:
                self._episodes.close(episode)

    def demand(self) -> Demand:
        return Demand(len(self._episodes), self.around.sampling.max_new_tokens * len(self._episodes))

    def expire(self) -> None:
        self._episodes.expire(self._spec.timeout_s)

    def own_metrics(self, played: Sequence[Sample]) -> dict[str, float]:
        return {"agent_failed": float(sum(sample.failed for sample in played))}

    async def _played(self, episode: Episode) -> None:
        """Calls the job's own agent; what it raises is the end of its episode, and of nothing else."""
        assert self._agent is not None
        call = Call(
            self.base_url, self._episodes.key_of(episode), self.around.job, episode.task, episode.seed, episode.id
        )
        try:
            reward = await self._called(call)
            missing = None if reward is not None else "the agent returned no reward and posted none"
            self._episodes.rewarded(episode, float(reward or 0.0), error=missing)
        except TimeoutError:
            self._episodes.rewarded(episode, 0.0, error=f"the agent took longer than {self._spec.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - a user's agent may raise anything
            self._episodes.rewarded(episode, 0.0, error=where_raised(error))

    async def _called(self, call: Call) -> Any:
        """On a thread; what an async agent still has to do, on the loop of the endpoint.

        Raises TimeoutError when it takes too long, from when a thread was free for it.
        """
        assert self._agent is not None
        loop, began = asyncio.get_running_loop(), asyncio.Event()

        def play(agent: Agent) -> Any:
            loop.call_soon_threadsafe(began.set)
            return agent(call)

        played = loop.run_in_executor(self._threads, play, self._agent)
        try:
            await began.wait()
            async with asyncio.timeout(self._spec.timeout_s):
                found = await played
                return await found if inspect.isawaitable(found) else found
        finally:
            played.cancel()  # where it still stands in the queue

    def supervised(self, step: int, size: int) -> list[Row]:
        raise SpecError("warmup: agents have no right answers to learn from; remove the section warmup")

    # ---- its life --------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        wait([self._serving], timeout=_START_TIMEOUT_S)
        super().close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._address.unlink(missing_ok=True)

    def _port(self) -> int:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if self._serving.done() or time.monotonic() > deadline:
                raise RlixError(f"the job's endpoint did not start on 127.0.0.1:{self._spec.port}: is the port free?")
            time.sleep(0.01)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port


def endpoint_of(job: str) -> tuple[str, str]:
    """The base URL and the key of a job's endpoint on this machine.

    Raises:
        RlixError: no job of that name has one.
    """
    path = _address_of(job)
    if not path.is_file():
        raise RlixError(f"no job {job!r} has an endpoint here: {path} is missing")
    found = json.loads(path.read_text())
    return found["base_url"], found["api_key"]


def _publish(job: str, base_url: str, key: str) -> Path:
    """Where agents of the same user find it."""
    path = _address_of(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"base_url": base_url, "api_key": key}, file)
    return path


def _address_of(job: str) -> Path:
    return Settings.from_env().home / "endpoints" / f"{job}.json"


def _find_agent(spec: AgentSpec) -> Agent | None:
    if spec.name == EXTERNAL:
        return None
    found: Any = import_object(spec.target)
    if not callable(found):
        raise SpecError(f"source.openai.name: {spec.name!r} is not a function")
    if isinstance(found, type):  # one that keeps something between episodes
        found = found(**spec.options)
    elif spec.options:
        found = partial(found, **spec.options)
    agent: Agent = found
    return agent
