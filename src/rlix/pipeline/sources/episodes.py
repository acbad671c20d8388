"""Samples from environments: the policy acts over many turns, and learns from its own tokens only."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from rlix.pipeline.batch import Row
from rlix.pipeline.chat import Chat
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import Answer, mean
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import Seat, Source, Surroundings, ended
from rlix.pipeline.sources.environments.base import (
    Action,
    Demonstration,
    EnvironmentFactory,
    Instance,
    Message,
    Observation,
)
from rlix.pipeline.sources.environments.episode import Episode, Outstanding, Room, play
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, InProcessRunner, Limits, Runner
from rlix.pipeline.sources.environments.process import SubprocessRunner
from rlix.pipeline.sources.making import Making
from rlix.pipeline.spec.named import import_object
from rlix.pipeline.spec.source import ChatSpec, EnvironmentSpec
from rlix.pipeline.tokenizer import read
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Demand


@dataclass(slots=True)
class _Conversation:
    """Which replica, and in which of its lives, has the episode's tokens in its prefix cache."""

    cached_on: tuple[int, int] | None = None


class EpisodeSource(Source):
    """A trajectory occupies a replica while it generates a turn and none while it waits for its environment."""

    what = "environment"
    stuck_hint = ": one of them blocks it; use 'runner: subprocess'"

    def __init__(self, environment: EnvironmentSpec, around: Surroundings, chat: ChatSpec | None = None) -> None:
        super().__init__(environment, around, environment.failure_reward)
        self._environment = environment
        self._factory = import_object(environment.target)
        self._tools: Sequence[Mapping[str, Any]] = tuple(getattr(self._factory, "tools", ()))
        self._chat_spec = chat or ChatSpec()
        self._chat: Chat | None = None
        if self._tools:
            self._chat = self._in_chat  # whether tools can be shown at all is known before anything is generated
        self._runner = make_runner(environment)
        self._outstanding = Outstanding()
        self._limits = Limits(
            reset_timeout_s=environment.reset_timeout_s,
            step_timeout_s=environment.step_timeout_s,
            attempts=environment.attempts,
            backoff_s=environment.backoff_s,
        )
        most = min(around.context, environment.max_tokens or around.context)
        self._room = Room(environment.max_turns, around.sampling.max_new_tokens, most)

    @property
    def longest(self) -> int:
        return self._room.outstanding(0, 0)

    # ---- episodes --------------------------------------------------------------------------------------------

    def demand(self) -> Demand:
        return self._outstanding.demand()

    def own_metrics(self, samples: Sequence[Any], making: Making) -> dict[str, float]:
        return environment_metrics(samples)

    async def episode(self, seat: Seat) -> Episode:
        instance = Instance(seat.id, stream_seed(self.around.seed, seat.id, "instance"), place=seat.group.place)
        environment = GuardedEnvironment(self._runner, instance, self._limits, time.monotonic)
        seed = stream_seed(self.around.seed, seat.group.task)
        policy = partial(self._reply, seat.step, _Conversation())
        return await play(seat.id, seed, environment, policy, self, self._room, self._outstanding)

    async def _reply(
        self, step: int, conversation: _Conversation, id: str, tokens: tuple[int, ...], limit: int
    ) -> Answer:
        """One turn, generated on whatever devices the scheduler grants."""
        sampling = replace(self.around.sampling, max_new_tokens=limit)
        trajectory = Trajectory(id, tokens, stream_seed(self.around.seed, id), sampling)
        trajectory.cached_on = conversation.cached_on
        done = await self.generated(step, trajectory)
        conversation.cached_on = done.cached_on
        return ended(done, self.around.ends)[0]

    # ---- text ------------------------------------------------------------------------------------------------

    def encode(self, observation: Observation, before: Sequence[int]) -> tuple[int, ...]:
        """Tokens as they are, text as it is, messages by the chat template."""
        if isinstance(observation, str):
            return read(self.around.tokenizer, observation, special=not before)
        if not any(isinstance(part, Mapping) for part in observation):
            return cast(tuple[int, ...], tuple(observation))
        messages = cast(Sequence[Message], observation)
        return self._in_chat.go_on(messages, before[-1]) if before else self._in_chat.start(messages)

    def action(self, token_ids: Sequence[int], before: Sequence[int]) -> Action:
        if self._tools:
            return self._in_chat.action(token_ids, before)
        text = cast(str, self.around.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return Action(text, tuple(token_ids))

    @property
    def _in_chat(self) -> Chat:
        """Made when it is first needed: environments that speak text need no template."""
        if self._chat is None:
            self._chat = Chat(self.around.tokenizer, self._chat_spec, self.around.sampling.stop_token_ids, self._tools)
        return self._chat

    def supervised(self, step: int, size: int) -> list[Row]:
        """Demonstrations of the environment: the model learns the actions, not the observations."""
        return [self._demonstrated(stream_seed(self.around.seed, "supervised", step, i)) for i in range(size)]

    def _demonstrated(self, seed: int) -> Row:
        demonstrate = getattr(self._factory, "demonstrate", None)
        if demonstrate is None:
            raise SpecError(
                f"warmup: the environment {self._environment.name} has no 'demonstrate' to learn from; remove the "
                "section warmup, or give the factory that method"
            )
        token_ids: list[int] = []
        learnt: list[bool] = []
        demonstration = cast(Demonstration, demonstrate(seed, **self._environment.options))
        for observation, action in demonstration:
            given = self.encode(observation, token_ids)
            wanted = (*self.encode(action, (0,)), *self.around.sampling.stop_token_ids[:1])
            token_ids += given + wanted
            learnt += [False] * len(given) + [True] * len(wanted)
        return token_ids, learnt

    async def end(self) -> None:
        if isinstance(self._runner, SubprocessRunner):
            await self._runner.close()


def make_runner(environment: EnvironmentSpec) -> Runner:
    """Raises SpecError when the environment cannot be imported."""
    name, options = environment.target, environment.options
    if environment.runner == "subprocess":
        return SubprocessRunner(name, options, environment.max_processes)
    factory = cast(Any, import_object(name))
    return InProcessRunner(cast(EnvironmentFactory, partial(factory, **options)))


def environment_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Counts over the step's episodes; turns and seconds are means per episode."""
    tallies = [episode.tally for episode in episodes]
    return {
        "turns": mean([len(episode.turns) for episode in episodes]),
        "env_failed": float(sum(episode.failed for episode in episodes)),
        "env_faults": float(sum(tally.failures for tally in tallies)),
        "env_timeouts": float(sum(tally.timeouts for tally in tallies)),
        "env_retries": float(sum(tally.retries for tally in tallies)),
        "env_wait_s": mean([tally.seconds for tally in tallies]),
    }
