"""Agentic reinforcement learning: the policy acts over many turns, and learns from its own tokens only."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlix.pipeline.batch import TokenBatch
from rlix.pipeline.full_finetune import FullFinetunePipeline
from rlix.pipeline.policy import PolicyBatch
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import digest
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.environments.base import (
    Demonstration,
    EnvironmentFactory,
    EnvironmentFailedError,
    Instance,
    Observation,
)
from rlix.pipeline.sources.environments.episode import Answer, Episode, Outstanding, Room, play
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, InProcessRunner, Limits, Runner
from rlix.pipeline.sources.environments.loop import LoopThread
from rlix.pipeline.sources.environments.process import SubprocessRunner
from rlix.pipeline.sources.rewards import import_object
from rlix.pipeline.spec.checks import BUILT_IN_ENVIRONMENTS
from rlix.pipeline.spec.job import EnvironmentSpec
from rlix.protocol.errors import SpecError, WaitTimeoutError

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_GRACE_S = 60.0
_HOPELESS_STEPS = 3
_NO_SPREAD = 1e-6  # rewards that differ by less than rounding error carry no signal


class AgenticPipeline(FullFinetunePipeline):
    """Play groups of episodes, compare the rewards within each group, take a clipped policy step, publish the weights.

    A trajectory occupies a replica while it generates a turn and none while it waits for its environment. One whose
    environment failed gets `environment.failure_reward`, or is left out of its group.
    """

    rollout_metrics: dict[str, float]

    # ---- the algorithm ---------------------------------------------------------------------------------------

    def step(self, step: int) -> Mapping[str, float]:
        episodes = self.play(step)
        self._check_environments(step, episodes)
        counts = [not e.failed or self.environment.failure_reward is not None for e in episodes]
        rewards = [self.reward(episode) for episode in episodes]
        batch = self.collate_episodes(episodes, counts)
        batch["advantages"] = self.episode_advantages(rewards, counts)
        metrics: dict[str, float] = {
            "reward": mean_of(rewards, counts),
            "exact": mean_of([float(e.exact) for e in episodes], counts),
            "trajectories": len(episodes),
            "trajectories_digest": digest((e.id, e.token_ids, e.end) for e in episodes),
        }
        self.add_log_probs(batch)
        return self.train(step, batch) | metrics | self.rollout_metrics

    def _check_environments(self, step: int, episodes: Sequence[Episode]) -> None:
        """A step in which every environment failed teaches nothing; several in a row will not get better by themselves.

        Raises:
            EnvironmentFailedError: the last of `_HOPELESS_STEPS` such steps in a row.
        """
        if not all(episode.failed for episode in episodes):
            self._failed_steps = 0
            return
        self._failed_steps += 1
        reason = episodes[-1].error
        logger.warning("%s: every environment of step %d failed, the last one: %s", self.spec.name, step, reason)
        if self._failed_steps == _HOPELESS_STEPS:
            raise EnvironmentFailedError(
                f"every environment of {_HOPELESS_STEPS} steps in a row failed, the last one: {reason}"
            )

    def reward(self, episode: Episode) -> float:
        declared = self.environment.failure_reward
        return declared if episode.failed and declared is not None else episode.reward

    def episode_advantages(self, rewards: Sequence[float], counts: Sequence[bool]) -> torch.Tensor:
        """How much better each trajectory [prompts * samples] is than the others of its group that count."""
        return group_advantages(
            torch.tensor(rewards),
            torch.tensor(counts),
            self.spec.rollout.samples_per_prompt,
            normalize_by_std=self.spec.algorithm.normalize_by_std,
        )

    # ---- episodes --------------------------------------------------------------------------------------------

    def play(self, step: int) -> list[Episode]:
        """A group of episodes for each of the step's tasks, next to each other."""
        start = time.time()
        self.note_phase("rollout")
        episodes = self.finished(self.begin(step))
        self.note_episodes(episodes, time.time() - start)
        return episodes

    def begin(self, step: int) -> "Future[list[Episode]]":
        """Start to play the step's episodes, beside whatever else runs."""
        return self._loop.submit(self._play(step))

    def finished(self, playing: "Future[list[Episode]]") -> list[Episode]:
        """Wait for what `begin` started: it ends in time by itself, unless an environment blocks the thread of all."""
        limit = self.rollout_timeout_s + _GRACE_S
        if not wait([playing], timeout=limit).done:
            raise WaitTimeoutError(
                f"the thread of the environments did not answer within {limit:g} s: one of them blocks it; use "
                "'runner: subprocess'"
            )
        return playing.result()

    def note_episodes(self, episodes: Sequence[Episode], seconds: float) -> None:
        tokens = sum(episode.generated for episode in episodes)
        self.rollout_metrics = {
            "rollout_s": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            **environment_metrics(episodes),
        }

    async def _play(self, step: int) -> list[Episode]:
        samples = range(self.spec.rollout.samples_per_prompt)
        tasks = [f"episodes/{step}/{i}" for i in range(self.spec.rollout.prompts_per_step)]
        open_ = [asyncio.ensure_future(self._episode(step, t, f"{t}/{k}")) for t in tasks for k in samples]
        try:
            await self._until_done(step, open_)
            return [task.result() for task in open_]
        finally:
            if any(not task.done() or task.cancelled() or task.exception() for task in open_):
                for task in open_:
                    task.cancel()
                self.rollouts.abandon()
                await asyncio.gather(*open_, return_exceptions=True)

    async def _until_done(self, step: int, open_: Sequence["asyncio.Future[Episode]"]) -> None:
        deadline = time.monotonic() + self.rollout_timeout_s
        pending = set(open_)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # environments do not raise here: what does is ours
            if self.stop_requested.is_set():
                raise InterruptedError("the job was asked to stop")
            if time.monotonic() > deadline:
                names = ", ".join(sorted(self._outstanding.tokens)[:8])
                raise WaitTimeoutError(
                    f"step {step}: {len(pending)} episodes did not end within {self.rollout_timeout_s:g} s: {names}"
                )
            self.rollouts.expect(self._outstanding.demand())

    async def _episode(self, step: int, task: str, id: str) -> Episode:
        instance = Instance(id, stream_seed(self.spec.seed, id, "instance"))
        environment = GuardedEnvironment(self.runner, instance, self.limits, time.monotonic)
        room = Room(self.environment.max_turns, self.sampling.max_new_tokens, self.max_tokens)
        seed = stream_seed(self.spec.seed, task)
        policy = partial(self._answer, step, _Conversation())
        return await play(id, seed, environment, policy, self, room, self._outstanding)

    async def _answer(
        self, step: int, conversation: "_Conversation", id: str, tokens: tuple[int, ...], limit: int
    ) -> Answer:
        """One turn, generated on whatever devices the scheduler grants."""
        sampling = Sampling(
            max_new_tokens=limit,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            stop_token_ids=self.sampling.stop_token_ids,
        )
        trajectory = Trajectory(id, tokens, stream_seed(self.spec.seed, id), sampling)
        trajectory.cached_on = conversation.cached_on
        done = await asyncio.wrap_future(self.rollouts.submit(step, trajectory))
        conversation.cached_on = done.cached_on
        return Answer(tuple(done.token_ids), tuple(done.logprobs), tuple(done.versions))

    # ---- data ------------------------------------------------------------------------------------------------

    def encode(self, observation: Observation, *, first: bool) -> tuple[int, ...]:
        if not isinstance(observation, str):
            return tuple(observation)
        return tuple(self.tokenizer.encode(observation, add_special_tokens=first))

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def collate_episodes(self, episodes: Sequence[Episode], counts: Sequence[bool]) -> PolicyBatch:
        rows = [(e.token_ids, e.from_policy if count else ()) for e, count in zip(episodes, counts, strict=True)]
        tokens = collate_turns(rows, self.pad_id)
        return PolicyBatch(input_ids=tokens["input_ids"], mask=tokens["mask"])

    def supervised_batch(self, step: int, size: int) -> TokenBatch:
        """Demonstrations of the environment: the model learns the actions, not the observations."""
        rows = []
        for i in range(size):
            token_ids: list[int] = []
            learnt: list[bool] = []
            demonstration = self.demonstration(stream_seed(self.spec.seed, "supervised", step, i))
            for turn, (observation, action) in enumerate(demonstration):
                given = self.encode(observation, first=turn == 0)
                wanted = (*self.encode(action, first=False), *self.sampling.stop_token_ids[:1])
                token_ids += given + wanted
                learnt += [False] * len(given) + [True] * len(wanted)
            rows.append((token_ids, learnt))
        return collate_turns(rows, self.pad_id)

    def demonstration(self, seed: int) -> Demonstration:
        demonstrate = getattr(self.factory, "demonstrate", None)
        if demonstrate is None:
            raise SpecError(
                f"warmup: the environment {self.environment.factory or self.environment.name} has no 'demonstrate' to "
                "learn from; remove the section warmup, or give the factory that method"
            )
        return cast(Demonstration, demonstrate(seed, **self.environment.options))

    # ---- parts -----------------------------------------------------------------------------------------------

    def set_up_task(self, tokenizer: PreTrainedTokenizerBase) -> None:
        assert self.spec.environment is not None  # a spec for this pipeline is refused without
        self.environment = self.spec.environment
        self.tokenizer = tokenizer
        self._loop = LoopThread()
        self._outstanding = Outstanding()
        self._failed_steps = 0
        self.runner = make_runner(self.environment)
        self.factory = import_object(factory_name(self.environment))
        self.limits = Limits(
            reset_timeout_s=self.environment.reset_timeout_s,
            step_timeout_s=self.environment.step_timeout_s,
            attempts=self.environment.attempts,
            backoff_s=self.environment.backoff_s,
        )
        context = int(AutoConfig.from_pretrained(self.model_path).max_position_embeddings)
        self.max_tokens = min(context, self.environment.max_tokens or context)

    def teardown(self) -> None:
        try:
            if (loop := getattr(self, "_loop", None)) is not None:
                loop.close(self.runner.close() if isinstance(self.runner, SubprocessRunner) else None)
        finally:
            super().teardown()


@dataclass(slots=True)
class _Conversation:
    """Which replica, and in which of its lives, has the episode's tokens in its prefix cache."""

    cached_on: tuple[int, int] | None = None


def factory_name(environment: EnvironmentSpec) -> str:
    return environment.factory or BUILT_IN_ENVIRONMENTS[environment.name or ""]


def make_runner(environment: EnvironmentSpec) -> Runner:
    """Raises SpecError when the environment's factory cannot be imported."""
    name, options = factory_name(environment), environment.options
    if environment.runner == "subprocess":
        return SubprocessRunner(name, options, environment.max_processes)
    factory = cast(Any, import_object(name))
    return InProcessRunner(cast(EnvironmentFactory, partial(factory, **options)))


def collate_turns(rows: Sequence[tuple[Sequence[int], Sequence[bool]]], pad_id: int) -> TokenBatch:
    """Right-padded sequences of (tokens, which of them the policy answers for; none when that is empty)."""
    length = max(2, *(len(tokens) for tokens, _ in rows))
    input_ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros((len(rows), length - 1))
    for row, (tokens, from_policy) in enumerate(rows):
        input_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        if from_policy:
            mask[row, : len(tokens) - 1] = torch.tensor(from_policy[1:], dtype=mask.dtype)
    return TokenBatch(input_ids=input_ids, mask=mask)


def group_advantages(
    rewards: torch.Tensor, counts: torch.Tensor, group_size: int, *, normalize_by_std: bool = True
) -> torch.Tensor:
    """GRPO's advantages among those of each group that count: [groups * group_size], 0 for the others.

    `rewards` and `counts` (bool) are [groups * group_size], a group's members next to each other. Where all count this
    is `group_relative_advantages`; where fewer than two do, or all are equal, it is 0.
    """
    groups, valid = rewards.float().view(-1, group_size), counts.view(-1, group_size)
    number = valid.sum(dim=1, keepdim=True)
    mean = torch.where(valid, groups, 0.0).sum(dim=1, keepdim=True) / number.clamp(min=1)
    centered = torch.where(valid & (number > 1), groups - mean, 0.0)
    if normalize_by_std:
        std = (centered.square().sum(dim=1, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
        centered = torch.where(std > _NO_SPREAD, centered / std.clamp(min=_NO_SPREAD), 0.0)
    return centered.reshape(rewards.shape)


def environment_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Counts over the step's episodes; seconds and turns are means per episode."""
    tallies = [episode.tally for episode in episodes]
    return {
        "env_failed": float(sum(episode.failed for episode in episodes)),
        "env_faults": float(sum(tally.failures for tally in tallies)),
        "env_timeouts": float(sum(tally.timeouts for tally in tallies)),
        "env_retries": float(sum(tally.retries for tally in tallies)),
        "env_wait_s": sum(tally.seconds for tally in tallies) / len(tallies),
        "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
    }


def mean_of(values: Sequence[float], counts: Sequence[bool]) -> float:
    """The mean of those that count; 0 when none does."""
    kept = [value for value, count in zip(values, counts, strict=True) if count]
    return sum(kept) / len(kept) if kept else 0.0
