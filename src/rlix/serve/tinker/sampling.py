"""Samples from what clients have saved, and from the base model, on whatever replicas the pool grants."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.seeds import stream_seed
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.answers import PROTOBUF, failure
from rlix.serve.tinker.batches import Limits, scored
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.records import Operation, Sampler, State
from rlix.serve.tinker.sample_request import Asked, read_sample
from rlix.serve.tinker.wire import Answer, Prompt, Top, sample_answer

_FIRST_SLICE = 32
_THREADS = 4


class Replicas(Protocol):
    """What is needed of the engine behind a base model."""

    ends: Ends

    @property
    def ranks(self) -> int: ...
    def offer(self, name: str, folder: Path, version: int) -> None: ...
    def withdraw(self, name: str) -> None: ...
    def generate(self, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]": ...
    def scoring(self, folder: Path | None) -> AbstractContextManager[str | None]: ...
    def score_prompt(self, name: str | None, batch: Any, several: int) -> dict[str, Any]: ...


class Samples:
    """The samples of one base model. For any thread.

    Args:
        with_devices: has something done on the training engine, which scores prompts.
        finished: told the id of an operation that has a result.
        most: adapters that replicas hold at a time.
    """

    def __init__(
        self,
        journal: Journal,
        replicas: Replicas,
        limits: Limits,
        *,
        with_devices: Callable[[Callable[[], Any]], "Future[Any]"],
        finished: Callable[[str], None],
        most: int,
    ) -> None:
        self._journal, self._replicas, self._limits = journal, replicas, limits
        self._with_devices, self._finished, self._most = with_devices, finished, most
        self._threads = ThreadPoolExecutor(_THREADS, "tinker-samples")
        self._lock = threading.Lock()
        self._offered: OrderedDict[str, str] = OrderedDict()  # folder by name, the one used longest ago first
        self._open: dict[str, int] = {}  # requests under way, by name
        self._versions = 0
        self._under_way: set[str] = set()

    def start(self, operation: Operation) -> None:
        """Asked again while it is under way, it is the same."""
        with self._lock:
            if operation.id in self._under_way:
                return
            self._under_way.add(operation.id)
        self._threads.submit(self._guarded, operation, partial(self._begin, operation))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- one request -----------------------------------------------------------------------------------------

    def _guarded(self, operation: Operation, step: Callable[[], None]) -> None:
        try:
            step()
        except SpecError as error:
            self._end(operation, State.FAILED, *failure(str(error), "user"))
        except Exception as error:  # noqa: BLE001 - whatever it is, its client is told
            self._end(operation, State.FAILED, *failure(f"{type(error).__name__}: {error}", "server"))

    def _begin(self, operation: Operation) -> None:
        sampler = self._journal.sampler(operation.target)
        if sampler is None:
            raise SpecError(f"there is no sampler {operation.target}")
        asked = read_sample(operation.body, operation.id, self._limits, self._replicas.ends)
        name = self._hold(sampler)
        trajectories = [
            Trajectory(f"{operation.id}/{index}", asked.prompt, stream_seed(asked.seed, index), asked.sampling)
            for index in range(asked.count)
        ]
        self._go_on(operation, sampler, asked, name, trajectories)

    def _go_on(
        self, operation: Operation, sampler: Sampler, asked: Asked, name: str, trajectories: list[Trajectory]
    ) -> None:
        """Where strings end an answer it is looked at again and again, so that little is generated for nothing."""
        open_ = [replace(each, adapter=name) for each in trajectories if each.finish_reason is None]
        if not open_:
            self._release(name)
            self._scored(operation, sampler, asked, trajectories)
            return
        if asked.strings:
            slices = [replace(each.sampling, max_new_tokens=_next_slice(each, asked)) for each in open_]
            open_ = [replace(each, sampling=part) for each, part in zip(open_, slices, strict=True)]
        try:
            done = self._replicas.generate(open_)
        except BaseException:  # raised again
            self._release(name)
            raise
        done.add_done_callback(
            lambda done: self._threads.submit(
                self._guarded, operation, partial(self._looked_at, operation, sampler, asked, name, trajectories, done)
            )
        )

    def _looked_at(
        self,
        operation: Operation,
        sampler: Sampler,
        asked: Asked,
        name: str,
        before: list[Trajectory],
        done: "Future[list[Trajectory]]",
    ) -> None:
        try:
            found = {each.id: each for each in done.result()}
        except BaseException:  # raised again
            self._release(name)
            raise
        trajectories = [self._cut(found.get(each.id, each), asked) for each in before]
        self._go_on(operation, sampler, asked, name, trajectories)

    def _cut(self, trajectory: Trajectory, asked: Asked) -> Trajectory:
        """Without what was generated after a string that ends it; open, if there is more to come."""
        if not asked.strings:
            return trajectory
        kept = _kept(self._replicas.ends, asked.strings, trajectory.token_ids)
        if kept is not None:
            del trajectory.token_ids[kept:], trajectory.logprobs[kept:], trajectory.versions[kept:]
            trajectory.finish_reason = "stop"
        elif trajectory.finish_reason == "length" and len(trajectory.token_ids) < asked.sampling.max_new_tokens:
            trajectory.finish_reason = None
        return trajectory

    def _scored(self, operation: Operation, sampler: Sampler, asked: Asked, trajectories: list[Trajectory]) -> None:
        if not (asked.scores or asked.top_prompt or asked.top_sample or asked.targets is not None):
            self._answer(operation, asked, trajectories, Prompt(), {})
            return
        done = self._with_devices(partial(self._score, sampler, asked, trajectories))
        done.add_done_callback(
            lambda done: self._threads.submit(
                self._guarded, operation, lambda: self._answer(operation, asked, trajectories, *done.result())
            )
        )

    def _score(
        self, sampler: Sampler, asked: Asked, trajectories: Sequence[Trajectory]
    ) -> tuple[Prompt, dict[str, Top]]:
        """On the training engine, with the sampler's weights on it for that long."""
        engine = self._replicas
        _check_there(sampler)  # one client's weights, and everybody's engine
        with engine.scoring(Path(sampler.folder) if sampler.folder else None) as name:
            prompt, tops = self._of_prompt(name, asked), {}
            for each in trajectories if asked.top_sample else ():
                whole = [*asked.prompt, *each.token_ids]
                batch = scored(whole, None, self._limits, engine.ranks)
                answer = engine.score_prompt(name, batch, asked.top_sample)
                rows = slice(len(asked.prompt) - 1, len(whole) - 1)
                tops[each.id] = Top(answer["ids"][0][rows].numpy(), answer["best"][0][rows].numpy())
            return prompt, tops

    def _of_prompt(self, name: str | None, asked: Asked) -> Prompt:
        if not (asked.scores or asked.top_prompt or asked.targets is not None):
            return Prompt()
        engine, length, k = self._replicas, len(asked.prompt), asked.top_prompt
        answer = engine.score_prompt(name, scored(asked.prompt, None, self._limits, engine.ranks), k)
        unknown = 1 if asked.last is None else length - asked.last
        log_probs = np.concatenate([[np.nan], answer["log_probs"][0].numpy()])
        log_probs[:unknown] = np.nan
        top = targets = None
        if k:
            nothing = np.full((1, k), np.nan)
            best = np.concatenate([nothing, answer["best"][0].numpy()])
            best[:unknown] = np.nan
            top = Top(np.concatenate([nothing, answer["ids"][0].numpy()]), best)
        if asked.targets is not None:
            batch = scored(asked.prompt, asked.targets, self._limits, engine.ranks)
            targets = np.where(asked.targets >= 0, engine.score_prompt(name, batch, 0)["log_probs"][0].numpy(), 0.0)
        return Prompt(log_probs if asked.scores else None, top, targets)

    def _answer(
        self,
        operation: Operation,
        asked: Asked,
        trajectories: Sequence[Trajectory],
        prompt: Prompt,
        tops: Mapping[str, Top],
    ) -> None:
        answers = [
            Answer(each.token_ids, each.logprobs, each.finish_reason == "stop", tops.get(each.id))
            for each in trajectories
        ]
        self._end(operation, State.DONE, PROTOBUF, sample_answer(answers, prompt))

    def _end(self, operation: Operation, state: State, media: str, result: bytes) -> None:
        self._journal.finish(operation.id, state, media, result)
        with self._lock:
            self._under_way.discard(operation.id)
        self._finished(operation.id)

    # ---- which adapters replicas hold ------------------------------------------------------------------------

    def _hold(self, sampler: Sampler) -> str:
        """The name that replicas know the sampler's adapter by, until it is released; "": the model's own."""
        if not sampler.folder:
            return ""
        _check_there(sampler)
        followed = sampler.model or sampler.folder
        name = "t" + hashlib.blake2b(followed.encode(), digest_size=10).hexdigest()
        with self._lock:
            if self._offered.get(name) != sampler.folder:
                self._versions += 1
                self._replicas.offer(name, Path(sampler.folder), self._versions)
                self._offered[name] = sampler.folder
            self._offered.move_to_end(name)
            self._open[name] = self._open.get(name, 0) + 1
            idle = [other for other in self._offered if not self._open.get(other)]
            for other in idle[: max(0, len(self._offered) - self._most)]:
                del self._offered[other]
                self._replicas.withdraw(other)
        return name

    def _release(self, name: str) -> None:
        with self._lock:
            if name:
                self._open[name] -= 1


def _check_there(sampler: Sampler) -> None:
    if sampler.folder and not Path(sampler.folder).is_dir():
        raise SpecError(
            f"the weights of sampler {sampler.id} are gone: of a model only the newest without a name are kept "
            "(`samplers_kept` of the server); save_weights_for_sampler keeps them under a name"
        )


def _next_slice(trajectory: Trajectory, asked: Asked) -> int:
    return min(asked.sampling.max_new_tokens, max(_FIRST_SLICE, 2 * len(trajectory.token_ids)))


def _kept(ends: Ends, strings: tuple[str, ...], token_ids: Sequence[int]) -> int | None:
    return ends.with_strings(strings).kept(token_ids)
