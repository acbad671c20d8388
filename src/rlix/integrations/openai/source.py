"""Samples from agents that talk to the job's endpoint: its own, as a function, or anybody's from outside."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlix.integrations.openai.conversation import ChatFormat
from rlix.integrations.openai.endpoint import Endpoint, endpoint_of
from rlix.integrations.openai.episodes import Episode, Policy
from rlix.pipeline.samples import Sample, mean
from rlix.pipeline.sources.base import Seat, Source, Surroundings
from rlix.pipeline.sources.loop import LoopThread
from rlix.pipeline.sources.making import Making
from rlix.pipeline.sources.place import Place
from rlix.pipeline.spec.named import import_object, where_raised
from rlix.pipeline.spec.source import EXTERNAL, AgentSpec, ChatSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Demand

__all__ = ["AgentSource", "Call", "endpoint_of"]


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent is called with: where its policy is, and which episode it plays.

    `task`, `seed` and `place` are the same for all samples of a group, so what the agent draws from them is too;
    `sample` is different for each. Who has its tasks in rows takes row `place.row(rows)`, of rows that it holds out
    where `place.split` is "evaluation".
    """

    base_url: str
    api_key: str
    model: str
    task: str
    seed: int
    sample: str
    place: Place


Agent = Callable[..., Any]
"""Plays one episode and returns its reward (a float), or None when it has posted one; may be async."""


class AgentSource(Source):
    """Each sample is the last branch of one agent's conversation."""

    what = "agent"

    def __init__(self, spec: AgentSpec, around: Surroundings, chat: ChatSpec) -> None:
        self._agent = _find_agent(spec)
        count = getattr(self._agent, "rows_of", None)
        self._rows: int | None = None if count is None else count(around.split)
        self._endpoint = Endpoint.join(around.shared, around.job, spec.port, from_outside=spec.name == EXTERNAL)
        super().__init__(spec, around, spec.failure_reward)
        self._spec = spec
        self._policy = Policy(
            seed=around.seed,
            sampling=around.sampling,
            context=around.context,
            ends=around.ends,
            chat=ChatFormat(around.tokenizer, chat, around.ends.token_ids),
            generate=lambda step, trajectory: around.generator().submit(step, [trajectory])[0],
        )
        self._episodes = self._endpoint.episodes
        self._threads = ThreadPoolExecutor(spec.concurrency, "agents")

    def make_loop(self) -> LoopThread:
        """The endpoint's, on which the episodes of all live."""
        return self._endpoint.loop

    @property
    def longest(self) -> int:
        return self.around.context - 1

    @property
    def different(self) -> int | None:
        """Where the agent has its tasks in rows, and says how many."""
        return self._rows

    # ---- episodes --------------------------------------------------------------------------------------------

    async def episode(self, seat: Seat) -> Sample:
        waiting, group = self._agent is None, seat.group
        episode = self._episodes.open(self._policy, seat.step, seat.id, group.task, waiting=waiting, place=group.place)
        played = None if waiting else asyncio.ensure_future(self._played(episode))
        try:
            return await episode.done
        finally:
            if played is not None:
                played.cancel()
            self._episodes.close(episode)

    def demand(self) -> Demand:
        open_ = len(self._episodes.of_split(self.around.split))
        return Demand(open_, self.around.sampling.max_new_tokens * open_)

    def expire(self) -> None:
        self._episodes.expire(self._spec.timeout_s, self.around.split)

    def own_metrics(self, samples: Sequence[Any], making: Making) -> dict[str, float]:
        return {
            "turns": mean([len(sample.turns) for sample in samples]),
            "agent_failed": float(sum(sample.failed for sample in samples)),
            "agent_abandoned": float(sum(sample.abandoned for sample in samples)),
        }

    async def _played(self, episode: Episode) -> None:
        """Calls the job's own agent; what it raises is the end of its episode, and of nothing else."""
        assert self._agent is not None
        call = Call(
            self._endpoint.base_url,
            self._episodes.key_of(episode),
            self.around.job,
            episode.task,
            episode.seed,
            episode.id,
            episode.place,
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

    # ---- its life --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The endpoint, and the loop that everything is played on, stay for as long as another source needs them."""
        self._endpoint.leave(self.around.shared)
        self._threads.shutdown(wait=False, cancel_futures=True)


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
