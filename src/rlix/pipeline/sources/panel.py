"""Several rewards at once: weighted, side by side, each call of a user's own in a process and within its time."""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlix.pipeline.sources.judge import FAILURES, Verdict, attempted
from rlix.pipeline.sources.rewards import TEXT_REWARDS, Reward, as_reward, token_match
from rlix.pipeline.sources.tasks.base import Prompt
from rlix.pipeline.spec.source import RewardSpec

_AT_ONCE = ("token_match", *TEXT_REWARDS)  # quick and safe: in this process
_PROCESSES = 4
_HUNG_PER_PROCESS = 4
_START_S = 120.0  # a process imports the user's code, which may import much
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion to judge, as text without special tokens and token by token."""

    prompt: Prompt
    completion: str
    completion_ids: Sequence[int]


class Panel:
    """Judges completions by all rewards of a job.

    A completion's reward is the sum by weight; it is exactly right when the first reward says so. What fails, or takes
    longer than its `timeout_s`, costs the sample and is said.

    Args:
        processes: at most so many judge at a time; they are started when a reward of the user's is first asked.
        stop: once it is set, no reward of the user's is asked any more.
    """

    def __init__(
        self, rewards: Sequence[RewardSpec], processes: int = _PROCESSES, stop: threading.Event | None = None
    ) -> None:
        self._rewards = tuple(rewards)
        self._names = _apart([spec.name.rpartition(":")[2] for spec in rewards])
        self._stop = stop or threading.Event()
        self._hung = 0  # calls in a row that did not return
        self._hopeless = _HUNG_PER_PROCESS * processes
        self._threads = ThreadPoolExecutor(processes, "reward")
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        own = [spec.target for spec in rewards if spec.name not in _AT_ONCE]
        for _ in range(processes):
            self._idle.put(_Process(own))

    def judge(self, asked: Sequence[Asked]) -> list[Verdict]:
        self._hung = 0
        parts = [[self._ask(reward, one) for one in asked] for reward in self._rewards]
        return [self._sum([part() for part in of_one]) for of_one in zip(*parts, strict=True)]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().end()

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        if (failed := next((v for v in verdicts if isinstance(v, str)), None)) is not None:
            return failed
        given = [v for v in verdicts if isinstance(v, Reward)]
        total = sum(spec.weight * reward.reward for spec, reward in zip(self._rewards, given, strict=True))
        parts = tuple(zip(self._names, (reward.reward for reward in given), strict=True)) if len(given) > 1 else ()
        return Reward(total, given[0].exact, parts)

    def _ask(self, spec: RewardSpec, asked: Asked) -> Any:
        """A function that brings the verdict; what ships answers there and then."""
        source = f"reward {spec.name} for prompt {asked.prompt.id}"
        if spec.name in _AT_ONCE:
            return partial(attempted, source, partial(_shipped, spec.name, asked))
        return self._threads.submit(self._in_process, spec, source, asked).result

    def _in_process(self, spec: RewardSpec, source: str, asked: Asked) -> Verdict:
        if self._stop.is_set():
            return f"{source} was not asked: the job is to stop"
        if self._hung >= self._hopeless:  # or a step would take hours
            return f"{source} was not asked: {self._hung} calls in a row had not returned in time"
        process = self._idle.get()
        try:
            answer = process.ask(_request(spec, asked), spec.timeout_s)
        finally:
            self._idle.put(process)
        self._hung = self._hung + 1 if "late" in answer else 0
        texts = {"prompt": asked.prompt.text, "completion": asked.completion, "answer": asked.prompt.answer}
        if "error" in answer:
            reason = f"{source} failed: {answer['error']}"
            return FAILURES.note(f"reward {spec.name}", reason, texts, answer.get("trace", ""))
        try:
            return as_reward(_reward(answer), source)
        except ValueError as error:  # not a finite number
            return FAILURES.note(f"reward {spec.name}", str(error), texts, "")


def _apart(names: Sequence[str]) -> list[str]:
    """Names that are different: `score`, `score_2`."""
    before = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, before, strict=True)]


def _shipped(name: str, asked: Asked) -> float | Reward:
    if name == "token_match":
        return token_match(asked.completion_ids, asked.prompt.answer_ids)
    return TEXT_REWARDS[name](asked.prompt.text, asked.completion, asked.prompt.answer)


def _request(spec: RewardSpec, asked: Asked) -> dict[str, Any]:
    return {
        "function": spec.target,
        "given": [asked.prompt.text, asked.completion, asked.prompt.answer],
        "columns": dict(asked.prompt.columns),
        "options": spec.options,
    }


def _reward(answer: Mapping[str, Any]) -> float | Reward:
    value: float = answer["reward"]
    return value if answer["exact"] is None else Reward(value, answer["exact"])


class _Process:
    """A process that runs `reward_process.py`, started when it is first asked, and anew after one that hung or died.

    Args:
        functions: what it imports before it is ready.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = functions
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """One call and its answer: `reward` and `exact`, or `error`, and `late` when it was out of time."""
        process = self._process
        if process is None:
            try:
                process = self._process = self._spawn()
            except OSError as error:
                return {"error": f"no process could be started for it: {error}"}
            if self._answer(process, _START_S) is None:  # it says when it is ready
                self.end()
                return {"error": f"its process did not import the rewards within {_START_S:g} s"}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            line = self._answer(process, timeout_s)
        except (OSError, ValueError) as error:
            self.end()
            return {"error": f"its process broke off: {error}"}
        if line is None:
            self.end()
            return {"error": f"it did not return within {timeout_s:g} s", "late": True}
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):  # its output ends a moment before it does
                process.wait(_END_S)
            code = process.returncode
            self.end()
            return {"error": "its process " + ("closed its output" if code is None else f"ended with {code}")}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=_END_S)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "rlix.pipeline.sources.reward_process", str(os.getpid()), *self._functions],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a group of its own, so that what it starts dies with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    @staticmethod
    def _answer(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes | None:
        """The next line, as far as it came; None when it did not come in time."""
        assert process.stdout is not None
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                break
            line += part
        return line
