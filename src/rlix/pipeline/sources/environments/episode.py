"""A trajectory of several turns: the policy's tokens and the environment's, and which are which."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rlix.pipeline.samples import Answer, End, Sample, Turn
from rlix.pipeline.sources.environments.base import Action, EnvironmentFailedError, Observation
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, Tally
from rlix.protocol.messages import Demand


@dataclass(frozen=True, slots=True)
class Episode(Sample):
    """`turns` holds what was played before the end; a failed one keeps what it had, its reward is what came before."""

    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Room:
    """How long an episode may get: turns, tokens of one answer, tokens in all."""

    turns: int
    answer_tokens: int
    tokens: int

    def answer(self, turns_played: int, tokens: int) -> int:
        """How many tokens the next answer may have; 0 when there can be none."""
        if turns_played >= self.turns:
            return 0
        return max(0, min(self.answer_tokens, self.tokens - tokens))

    def outstanding(self, turns_played: int, tokens: int) -> int:
        """At most so many tokens will still be generated."""
        return max(0, min((self.turns - turns_played) * self.answer_tokens, self.tokens - tokens))


@dataclass(slots=True)
class Outstanding:
    """Episodes that are open and the tokens they may still take, whether they generate or wait."""

    tokens: dict[str, int] = field(default_factory=dict)

    def update(self, id: str, tokens: int) -> None:
        self.tokens[id] = tokens

    def close(self, id: str) -> None:
        self.tokens.pop(id, None)

    def demand(self) -> Demand:
        return Demand(len(self.tokens), sum(self.tokens.values()))


class Codec(Protocol):
    """Between what is said and tokens. `before`: all tokens so far; none at the beginning."""

    def encode(self, observation: Observation, before: Sequence[int]) -> tuple[int, ...]: ...

    def action(self, token_ids: Sequence[int], before: Sequence[int]) -> Action: ...


Policy = Callable[[str, tuple[int, ...], int], Awaitable[Answer]]
"""(turn's id, all tokens so far, at most so many new ones) -> what the policy generates."""


async def play(
    id: str,
    seed: int,
    environment: GuardedEnvironment,
    policy: Policy,
    codec: Codec,
    room: Room,
    outstanding: Outstanding,
) -> Episode:
    """One episode to its end. A failing environment ends it as FAILED; a failing policy raises.

    One that ends with an answer that was cut off ends as LENGTH, whatever its environment makes of that.
    """
    turns: list[Turn] = []
    tokens: list[int] = []
    reward, exact, failed, error = 0.0, False, False, None
    outstanding.update(id, room.outstanding(0, 0))
    try:
        end = End.TURNS
        observation_ids = _something(id, codec.encode(await environment.reset(seed), ()))
        while True:
            tokens += observation_ids
            limit = room.answer(len(turns), len(tokens))
            if limit == 0:
                end = End.TURNS if len(turns) >= room.turns else End.LENGTH
                break
            answer = await policy(f"{id}/{len(turns)}", tuple(tokens), limit)
            turns.append(Turn(observation_ids, answer))
            action = codec.action(answer.token_ids, tokens)
            tokens += answer.token_ids
            outstanding.update(id, room.outstanding(len(turns), len(tokens)))
            transition = await environment.step(action)
            turns[-1] = replace(turns[-1], reward=transition.reward)
            reward += transition.reward
            exact = exact or transition.exact
            if transition.done:
                end = End.LENGTH if answer.cut_off else End.DONE
                break
            observation_ids = codec.encode(transition.observation, tokens)
    except EnvironmentFailedError as failure:
        end, failed, error = End.FAILED, True, str(failure)
    finally:
        outstanding.close(id)
        await environment.close(failed=failed)
    return Episode(id, tuple(turns), reward, exact, end, error=error, tally=environment.tally)


def _something(id: str, observation_ids: tuple[int, ...]) -> tuple[int, ...]:
    if not observation_ids:
        raise EnvironmentFailedError(f"the environment of {id} began with no tokens: there is nothing to answer")
    return observation_ids
