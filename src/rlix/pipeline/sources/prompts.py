"""Samples from prompts: one answer each, judged by the task's reward."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rlix.pipeline.batch import Row
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import Answer, End, Sample, Samples, Turn, mean, measured, per_s
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import Patience, Source, Surroundings, done_at, ended
from rlix.pipeline.sources.judge import Verdict
from rlix.pipeline.sources.tasks.base import Prompt, Task


@dataclass(frozen=True, slots=True)
class _Begun:
    prompts: Sequence[Prompt]
    done: "Future[list[Trajectory]]"
    time: float
    done_at: Callable[[], float]


class PromptSource(Source):
    """A group of answers to each of the step's prompts."""

    def __init__(self, task: Task, around: Surroundings) -> None:
        super().__init__(None, around)
        self._task = task
        self._patience = Patience(around.job, "reward")

    @property
    def longest(self) -> int:
        return self.around.sampling.max_new_tokens

    @property
    def different(self) -> int | None:
        return self._task.different

    def begin(self, step: int, groups: int | None = None) -> _Begun:
        prompts = self._task.prompts(self.around.seed, step, self.around.groups)[:groups]
        trajectories = [self._trajectory(p, k) for p in prompts for k in range(self.around.group_size)]
        start = time.time()
        done = self.around.generator().submit_all(step, trajectories)
        return _Begun(prompts, done, start, done_at(done))

    def finish(self, begun: _Begun) -> Samples:
        done = self.around.generator().wait(begun.done, self.around.timeout_s, self.around.stop)
        seconds, tokens = begun.done_at() - begun.time, sum(len(t.token_ids) for t in done)
        asked = [prompt for prompt in begun.prompts for _ in range(self.around.group_size)]
        start = time.time()
        answers = [ended(t, self.around.ends) for t in done]
        verdicts = self._task.judge([(p, a.token_ids) for p, (a, _) in zip(asked, answers, strict=True)])
        if self.around.stop.is_set():
            raise InterruptedError("the job was asked to stop")
        samples = [_sample(t, a, end, v) for t, (a, end), v in zip(done, answers, verdicts, strict=True)]
        self._patience.look_at(samples)
        metrics = {
            "rollout_s": seconds,
            "tokens": float(tokens),
            "tokens_per_s": per_s(tokens, seconds),
            "reward_s": time.time() - start,
            "reward_failed": float(sum(sample.failed for sample in samples)),
            **_parts(verdicts),
        }
        return Samples(samples, self.around.group_size, measured(samples, metrics))

    def supervised(self, step: int, size: int) -> list[Row]:
        examples = self._task.supervised(self.around.seed, step, size)
        return [
            ((*e.prompt_ids, *e.answer_ids), (False,) * len(e.prompt_ids) + (True,) * len(e.answer_ids))
            for e in examples
        ]

    def close(self) -> None:
        self._task.close()

    def _trajectory(self, prompt: Prompt, k: int) -> Trajectory:
        id = f"{prompt.id}/{k}"
        return Trajectory(id, prompt.prompt_ids, stream_seed(self.around.seed, id), self.around.sampling)


def _parts(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean of each reward, where there are several."""
    given: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, value in () if isinstance(verdict, str) else verdict.parts:
            given.setdefault(f"reward_{name}", []).append(value)
    return {name: mean(values) for name, values in given.items()}


def _sample(trajectory: Trajectory, answer: Answer, end: End, verdict: Verdict) -> Sample:
    turns = (Turn(trajectory.prompt_ids, answer),)
    if isinstance(verdict, str):
        return Sample(trajectory.id, turns, 0.0, False, end, counts=False, error=verdict)
    return Sample(trajectory.id, turns, verdict.reward, verdict.exact, end, parts=verdict.parts)
