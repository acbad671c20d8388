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
