"""Any Gymnasium environment, its observations and actions as text."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rlix.pipeline.sources.environments.base import Action, Instance, Transition
from rlix.pipeline.spec.named import import_object
from rlix.protocol.errors import SpecError


class TextAdapter(Protocol):
    """Between an environment's spaces and text."""

    def observation(self, space: Any, observation: Any) -> str: ...

    def action(self, space: Any, text: str) -> Any:
        """Raises ValueError when the text is no action; the trajectory then ends."""
        ...


class PlainText:
    """Numbers separated by blanks, with two digits after the point; text and discrete actions as they are."""

    def observation(self, space: Any, observation: Any) -> str:
        from gymnasium import spaces

        if isinstance(space, (spaces.Discrete, spaces.Text)):
            return f"{observation}"
        flat: Any = spaces.flatten(space, observation)
        return " ".join(f"{value:.2f}" if isinstance(value, float) else f"{value}" for value in flat.tolist())

    def action(self, space: Any, text: str) -> Any:
        from gymnasium import spaces

        if isinstance(space, spaces.Text):
            return text
        if isinstance(space, spaces.Discrete):
            action: Any = int(text)
        else:
            import numpy as np

            action = np.array([float(part) for part in text.split()], dtype=space.dtype).reshape(space.shape)
        if action not in space:
            raise ValueError(f"{text!r} is outside {space}")
        return action


class GymnasiumEnvironment:
    """Wraps `gymnasium.make(id, **options)`; `adapter` names a `TextAdapter` class ("package.module:Class").

    Calls run in a thread each, so that they do not hold up the event loop; one that hangs keeps its thread, which the
    `subprocess` runner avoids. `exact` is the environment's `is_success` or `success`, where it reports one.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        id: str,
        adapter: str | None = None,
        suffix: str = ">",
        invalid_reward: float = 0.0,
        **options: Any,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise SpecError("environment: needs the package gymnasium; run 'pip install rlix[gym]'") from error
        make_adapter: Any = PlainText if adapter is None else import_object(adapter)
        self._adapter: TextAdapter = make_adapter()
        self._suffix, self._invalid_reward = suffix, invalid_reward
        self._env = gymnasium.make(id, **options)

    async def reset(self, seed: int) -> str:
        observation, _ = await in_thread(lambda: self._env.reset(seed=seed % 2**31))
        return self._text(observation)

    async def step(self, action: Action) -> Transition:
        try:
            decoded = self._adapter.action(self._env.action_space, action.text)
        except ValueError:
            return Transition("", self._invalid_reward, done=True)
        observation, reward, terminated, truncated, info = await in_thread(lambda: self._env.step(decoded))
        exact = bool(info.get("is_success", info.get("success", False)))
        return Transition(self._text(observation), float(reward), bool(terminated or truncated), exact)

    async def close(self) -> None:
        await in_thread(self._env.close)

    def _text(self, observation: Any) -> str:
        return self._adapter.observation(self._env.observation_space, observation) + self._suffix


async def in_thread(function: Callable[[], Any]) -> Any:
    """The function's result, from a daemon thread: unlike a pool's, one that hangs keeps no process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def post(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_outcome, outcome)

    def run() -> None:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits
            post(future.set_exception, error)
        else:
            post(future.set_result, result)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await future
