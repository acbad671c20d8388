"""What an environment is: reset it with a seed, then answer actions with observations and rewards until it is done."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlix.pipeline.sources.place import Place
from rlix.pipeline.sources.rewards import finite
from rlix.protocol.errors import RlixError

Message = Mapping[str, Any]
"""As chat templates take them: `role` (system, user, tool, ...) and `content`, and for a tool its `name`."""
Observation = str | tuple[int, ...] | tuple[Message, ...]
"""What the policy reads next: text, token ids that need no tokenizer, or messages for the model's chat template."""


class EnvironmentFailedError(RlixError):
    """An environment raised, hung or died; it costs its own trajectory (or one of that trajectory's attempts).

    `trace`: the user's own traceback, where there is one.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class EnvironmentTimeoutError(EnvironmentFailedError):
    """An environment did not answer within its time."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`argument`: a JSON object, where the policy wrote the call; `problem`: why it could not be read."""

    name: str
    argument: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy generated in one turn: as text without special tokens, and token by token, end token included.

    `tool_calls`: those in the text, when the environment has `tools`.
    """

    text: str
    token_ids: tuple[int, ...]
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """An environment's answer. The rewards of a trajectory's transitions add up; `exact`: the task was solved."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    exact: bool = False


def observed(what: str, found: Any) -> Observation:
    """What `what` has the policy read. Raises EnvironmentFailedError when it is nothing that can be read."""
    if not isinstance(found, str | tuple | list):
        raise EnvironmentFailedError(f"{what} gave {found!r} to read; it must be text, token ids or messages")
    return found if isinstance(found, str) else tuple(found)


def checked(found: object) -> Transition:
    """What `step` returned, in Python's own numbers. Raises EnvironmentFailedError when it cannot be learnt from."""
    if not isinstance(found, Transition):
        raise EnvironmentFailedError(f"step returned {found!r}, which is no Transition")
    if (reward := finite(found.reward)) is None:
        raise EnvironmentFailedError(f"step gave the reward {found.reward!r}, which is no finite number")
    observation = "" if found.done and found.observation is None else observed("step", found.observation)
    return Transition(observation, reward, bool(found.done), bool(found.exact))


@dataclass(frozen=True, slots=True)
class Instance:
    """Which environment this is: one of those started for `trajectory`, the first being attempt 0.

    `seed` differs between the trajectories of a group, which share the seed given to `reset`. It is for what is not
    part of the task, such as simulated latency. Who has its tasks in rows takes row `place.row(rows)`, of rows that it
    holds out where `place.split` is "evaluation".
    """

    trajectory: str
    seed: int
    attempt: int = 0
    place: Place = field(default_factory=Place)


class Environment(Protocol):
    """One trajectory's world. `reset` is called once, then `step` until it is done or the trajectory ends.

    The same seed and actions must give the same observations and rewards: that is what a retry relies on. Methods are
    coroutines that must not block; code that may block or crash belongs into the `subprocess` runner.

    A class attribute `tools`, a sequence of JSON schemas, says what the policy may call; the model's chat template
    shows them to it, and `Action.tool_calls` are its calls.
    """

    async def reset(self, seed: int) -> Observation: ...

    async def step(self, action: Action) -> Transition: ...

    async def close(self) -> None: ...


EnvironmentFactory = Callable[[Instance], Environment]
Demonstration = tuple[tuple[str, str], ...]
"""(observation, right action) of each turn of one trajectory."""
