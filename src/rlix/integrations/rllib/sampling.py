"""Sampling with as many environment runners as there are bundles: they are parked and go on, and keep their state.

A batch is of the same weights whatever the number of runners; which of them took a step differs. With several
environments to a runner each chunk may hold a few steps more than were asked for.
"""

import functools
import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import ray

from rlix.control.program import Program
from rlix.control.rollout_lease import Taken
from rlix.protocol.errors import DeviceBusyError, SpecError, WaitTimeoutError

logger = logging.getLogger(__name__)

CHUNK_STEPS = 200
"""Environment steps that a runner takes at a time. One whose bundle leaves ends its chunk, and takes no other."""
_SAMPLER = "synchronous_parallel_sample"
_POLL_S = 1.0
_CHUNK_TIMEOUT_S = 600.0

_samplers: "WeakKeyDictionary[Any, ElasticSampler]" = WeakKeyDictionary()
_patching = threading.Lock()


class ElasticSampler:
    """Replaces RLlib's sampler for the runners of one algorithm."""

    def __init__(
        self,
        program: Program,
        cluster: str,
        chunk_steps: int = CHUNK_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._clock = clock
        self._cluster = cluster
        self._chunk = chunk_steps
        self.sizes: list[int] = []
        """How many runners worked at a time, whenever that changed."""

    def sample(self, group: Any, total: int) -> tuple[list[Any], list[Any]]:
        """Episodes that hold at least `total` environment steps, and what the runners measured."""
        runners = dict(sorted(group._worker_manager.actors().items()))
        flying: dict[Any, int] = {}
        episodes: list[Any] = []
        metrics: list[Any] = []
        asked, moved = 0, self._clock()
        with self._program.rollout(self._cluster, demand=-(-total // self._chunk)) as rollout:
            while asked < total or flying:
                try:
                    changes = rollout.poll(0.0 if rollout.leases or flying else _POLL_S)
                except DeviceBusyError as error:  # the others go on
                    logger.warning("%s", error)
                    continue
                leaving = [change.lease for change in changes if isinstance(change, Taken)]
                allowed = min(len(rollout.leases), len(runners))
                if leaving:  # a runner has no bytes there, so it need not be waited for: what flies is collected later
                    rollout.give_back(*leaving)
                for runner in list(runners)[:allowed]:
                    if asked < total and runner not in flying.values() and len(flying) < allowed:
                        steps = min(self._chunk, total - asked)
                        asked += steps
                        flying[runners[runner].apply.remote(functools.partial(_sampled, steps=steps))] = runner
                        moved = self._clock()
                self._note(len(flying))
                if flying:
                    if self._take(flying, episodes, metrics):
                        moved = self._clock()
                    elif self._clock() - moved > _CHUNK_TIMEOUT_S:
                        raise WaitTimeoutError(
                            f"environment runners {sorted(flying.values())} took longer than {_CHUNK_TIMEOUT_S:g} s "
                            f"for {self._chunk} steps"
                        )
                    rollout.report(-(-(total - asked) // self._chunk) + len(flying))
        return episodes, metrics

    @staticmethod
    def _take(flying: dict[Any, int], episodes: list[Any], metrics: list[Any]) -> bool:
        """Takes in a chunk that is ready, or becomes so in a moment; says whether there was one."""
        ready, _ = ray.wait(list(flying), timeout=_POLL_S)
        for ref in ready:
            del flying[ref]
            found, measured = ray.get(ref)
            episodes += found
            metrics.append(measured)
        return bool(ready)

    def _note(self, count: int) -> None:
        if count and (not self.sizes or self.sizes[-1] != count):
            self.sizes.append(count)


def make_elastic(algorithm: Any, sampler: ElasticSampler) -> None:
    """From now on the algorithm samples through `sampler`.

    Raises:
        SpecError: the algorithm has no runners of its own, samples in another way, or wants whole episodes.
    """
    if algorithm.config.batch_mode == "complete_episodes":
        raise SpecError("rlix.rllib: elastic sampling cuts episodes where chunks end; leave batch_mode as it is")
    module = next(
        (
            sys.modules[each.__module__]
            for each in type(algorithm).__mro__
            if hasattr(sys.modules[each.__module__], _SAMPLER)
        ),
        None,
    )
    if module is None or module is importlib.import_module("ray.rllib.algorithms.algorithm"):
        raise SpecError(f"rlix.rllib: {type(algorithm).__name__} does not sample synchronously; leave elastic out")
    if algorithm.env_runner_group.num_remote_env_runners() < 1:
        raise SpecError("rlix.rllib: elastic sampling needs .env_runners(num_env_runners=...) of 1 or more")
    with _patching:
        _samplers[algorithm.env_runner_group] = sampler
        inner = getattr(module, _SAMPLER)
        if not hasattr(inner, "_rlix"):
            setattr(module, _SAMPLER, _dispatching(inner))


def _dispatching(inner: Any) -> Any:
    @functools.wraps(inner)
    def sample(*, worker_set: Any, **how: Any) -> Any:
        sampler, total = _samplers.get(worker_set), how.get("max_env_steps")
        if sampler is None or total is None or worker_set.num_remote_env_runners() < 1:
            return inner(worker_set=worker_set, **how)
        return sampler.sample(worker_set, total)

    sample._rlix = True  # type: ignore[attr-defined]
    return sample


def _sampled(runner: Any, *, steps: int) -> tuple[Any, Any]:
    return runner.sample(num_timesteps=steps), runner.get_metrics()
