"""The episodes that are open: who plays them, what was said, and what they were worth."""

import asyncio
import hmac
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from rlix.integrations.openai.conversation import ChatFormat, ContextFullError, Conversation, Heard, Message
from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import Answer, End, Sample
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import ended
from rlix.pipeline.sources.place import TRAIN, Place
from rlix.protocol.errors import RlixError

Generate = Callable[[int, Trajectory], "Future[Trajectory]"]
"""Of a step: where a trajectory goes to be generated."""


class AbortedError(RlixError):
    """What was generated is not whole: it must not be taken for an answer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How the job's policy answers. `seed` is the job's; `context`: tokens that the model can see at once."""

    seed: int
    sampling: Sampling
    context: int
    ends: Ends
    chat: ChatFormat
    generate: Generate


@dataclass(eq=False, slots=True)
class Episode:
    """One sample in the making. `task`, `seed` and `place` are the same for all samples of a group."""

    policy: Policy
    id: str
    step: int
    task: str
    place: Place
    conversation: Conversation
    done: "asyncio.Future[Sample]"
    calls: int = 0
    cached_on: tuple[int, int] | None = None
    end: End = End.DONE
    taken: float | None = None  # when somebody from outside began to play it

    @property
    def seed(self) -> int:
        return stream_seed(self.policy.seed, self.task)

    @property
    def name(self) -> str:
        """As agents know it: those of an evaluation have the same ids as others."""
        return self.id if self.place.split == TRAIN else f"{self.place.split}/{self.id}"


class Episodes:
    """Lives on one event loop."""

    def __init__(self, key: str | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.key = key or secrets.token_urlsafe(24)
        self._open: dict[str, Episode] = {}
        self._waiting: deque[str] = deque()

    # ---- the job's side --------------------------------------------------------------------------------------

    def open(
        self, policy: Policy, step: int, id: str, task: str, *, waiting: bool, place: Place | None = None
    ) -> Episode:
        """`waiting`: it is there for whoever asks for one."""
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        episode = Episode(policy, id, step, task, place or Place(), Conversation(policy.chat), future)
        self._open[episode.name] = episode
        if waiting:
            self._waiting.append(episode.name)
        return episode

    def of_split(self, split: str) -> list[Episode]:
        """Those of it that are open."""
        return [episode for episode in self._open.values() if episode.place.split == split]

    def close(self, episode: Episode) -> None:
        self._open.pop(episode.name, None)

    def key_of(self, episode: Episode) -> str:
        """What an agent authenticates with, and is known by."""
        return f"{self._signed(episode.name)}/{episode.name}"

    # ---- the agents' side ------------------------------------------------------------------------------------

    def known(self, given: str) -> bool:
        """Whether the key is the job's, or an episode's."""
        signed, _, id = given.partition("/")
        return self.is_jobs(given) or hmac.compare_digest(signed.encode(), self._signed(id).encode())

    def is_jobs(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.key.encode())

    def of_key(self, given: str) -> Episode | None:
        """The open episode of a key that is `known`."""
        return self._open.get(given.partition("/")[2])

    def _signed(self, name: str) -> str:
        """So that who plays one episode has no key to another."""
        return hmac.new(self.key.encode(), name.encode(), "sha256").hexdigest()

    def take(self, split: str | None = None) -> Episode | None:
        """One that nobody plays yet; of any split unless one is named."""
        self._waiting = deque(name for name in self._waiting if name in self._open)
        for name in self._waiting:
            found = self._open[name]
            if split in (None, found.place.split):
                self._waiting.remove(name)
                found.taken = self._clock()
                return found
        return None

    def expire(self, timeout_s: float, split: str = TRAIN) -> None:
        """Ends, as failed, what was taken longer ago than that: its player may be dead."""
        for episode in self.of_split(split):
            if episode.taken is not None and self._clock() - episode.taken > timeout_s:
                error = f"whoever took the episode posted no reward within {timeout_s:g} s"
                self.rewarded(episode, 0.0, error=error)

    def rewarded(self, episode: Episode, reward: float, *, exact: bool | None = None, error: str | None = None) -> None:
        """The conversation is over, and becomes a sample. A second reward changes nothing.

        Raises:
            ValueError: the reward is no finite number; one such would be the whole group's advantages.
        """
        if not math.isfinite(reward):
            raise ValueError(f"the reward of episode {episode.id} is {reward!r}; it must be a finite number")
        self.close(episode)
        if not episode.done.done():
            counts = error is None and bool(episode.conversation.turns)
            if error is None and not counts:
                error = "the agent asked the policy nothing"
            end = End.FAILED if error else episode.end
            talk = episode.conversation
            sample = Sample(episode.id, talk.turns, reward, exact, end, counts, error, abandoned=talk.abandoned)
            episode.done.set_result(sample)

    def start(
        self, episode: Episode, prompt: tuple[int, ...], limit: int | None
    ) -> tuple[Trajectory, "Future[Trajectory]"]:
        """Begins to answer; the trajectory's tokens can be watched as they come.

        Raises:
            ContextFullError: there is no room in the model's context.
        """
        policy = episode.policy
        most = policy.sampling.max_new_tokens
        room = min(most, limit or most, policy.context - len(prompt))
        if room < 1:
            episode.end = End.LENGTH
            raise ContextFullError(  # in the words that clients look for
                f"the model's maximum context length is {policy.context} tokens, and the conversation's "
                f"{len(prompt)} fill it"
            )
        id = f"{episode.id}/{episode.calls}"
        episode.calls += 1
        sampling = replace(policy.sampling, max_new_tokens=room)
        trajectory = Trajectory(id, prompt, stream_seed(policy.seed, id), sampling)
        trajectory.cached_on = episode.cached_on
        return trajectory, policy.generate(episode.step, trajectory)

    async def finished(self, episode: Episode, done: "Future[Trajectory]") -> tuple[Trajectory, End]:
        """The whole answer.

        Raises:
            AbortedError: there is none: the job ends, or its replicas keep failing.
        """
        try:
            trajectory = await asyncio.wrap_future(done)
        except (RlixError, InterruptedError) as error:
            raise AbortedError(f"no answer: {error}") from error
        if trajectory.finish_reason not in ("stop", "length"):
            raise AbortedError(f"the answer was cut off ({trajectory.finish_reason})")
        episode.cached_on = trajectory.cached_on
        return trajectory, ended(trajectory, episode.policy.ends)[1]

    def answered(
        self, episode: Episode, trajectory: Trajectory, end: End, heard: Heard, answer: Answer, reply: Message | None
    ) -> None:
        """The client gets this answer. Only the latest request's goes on with the conversation: one before it was
        given up, or is a branch that is left."""
        latest = stream_seed(episode.policy.seed, f"{episode.id}/{episode.calls - 1}")
        if trajectory.seed == latest:  # by its seed: who generates for an adapter or an evaluation renames it
            episode.end = end
            episode.conversation.answered(heard, answer, reply)
        else:
            episode.conversation.abandoned += 1
