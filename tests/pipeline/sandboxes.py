"""Environments for the tests of processes: built in a process of their own, by name."""

import os
import subprocess
import sys
import time

from rlix.pipeline.sources.environments import Action, Instance, Transition


class Sandbox:
    """Does what the action says; "sleep" blocks the whole process, and has started another."""

    def __init__(self, instance: Instance, *, greeting: str) -> None:
        self._greeting, self._attempt = greeting, instance.attempt

    async def reset(self, seed: int) -> str:
        sys.stdout.write("this must not get among the answers\n")
        return f"{self._greeting} {seed}"

    async def step(self, action: Action) -> Transition:
        match action.text:
            case "pid":
                return Transition(str(os.getpid()), reward=0.5)
            case "tokens":
                return Transition(action.token_ids, done=True, exact=True)
            case "sleep" if self._attempt == 0:
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                time.sleep(600)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("nothing there")
        return Transition("awake", done=True)

    async def close(self) -> None:
        """Nothing is held."""


class Sums:
    """Two turns, each rewarded by the sum of the tokens' numbers; one trajectory in five fails."""

    def __init__(self, instance: Instance) -> None:
        self._fails, self._turns = instance.seed % 5 == 0, 0

    async def reset(self, seed: int) -> str:
        return f"{seed % 10}>"

    async def step(self, action: Action) -> Transition:
        if self._fails:
            raise RuntimeError("no luck")
        self._turns += 1
        return Transition(">", reward=sum(action.token_ids) % 7 / 7, done=self._turns == 2)

    async def close(self) -> None:
        """Nothing is held."""

    @classmethod
    def demonstrate(cls, seed: int) -> tuple[tuple[str, str], ...]:
        return ((f"{seed % 10}>", "12"), (">", "3"))
