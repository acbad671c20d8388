"""Generating the next steps' trajectories while a step trains, under a bound on the age of their tokens."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from rlix.engine.weights.publication import PublishedWeights
from rlix.pipeline.algorithms import masked_mean, truncated_importance_weights
from rlix.pipeline.base import JobConfig
from rlix.pipeline.batch import align
from rlix.pipeline.full_finetune import FullFinetunePipeline
from rlix.pipeline.policy import PolicyBatch
from rlix.pipeline.spec.training import AsynchronousSpec
from rlix.protocol.errors import RlixError


class StalenessError(RlixError):
    """A token is older than the job's bound allows. Always a bug: nothing is started that could become too old."""


@dataclass(frozen=True, slots=True)
class _Begun:
    done: "Future[Any]"
    time: float


class AheadPipeline(FullFinetunePipeline):
    """While step k trains, what the steps up to k + `ahead` learn from is generated.

    Every token knows the version of the weights that produced it, and is checked against `max_staleness` when it is
    trained on. The loss is PPO's around the policy before the update, each token weighted for having been sampled by
    an older one (`truncated_importance_weights`). With `in_flight: finish` a step's trajectories come from one version,
    so that a run is as reproducible as an on-policy one.
    """

    def __init__(self, pipeline_id: str, config: JobConfig) -> None:
        super().__init__(pipeline_id, config)
        self._ahead: dict[int, _Begun] = {}
        self._held_back: PublishedWeights | None = None

    # ---- what a subclass writes ------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, step: int) -> "Future[Any]":
        """Start to generate what step `step` learns from."""

    @abstractmethod
    def finished(self, generating: "Future[Any]") -> Any:
        """Wait for what `begin` started."""

    # ---- ahead of the step that trains -----------------------------------------------------------------------

    def collect(self, step: int) -> tuple[Any, float, float]:
        """What an earlier step has usually begun, how long it took and how long it was waited for; begins the next."""
        if step not in self._ahead:
            self._begin(step)
        begun, start = self._ahead[step], time.time()
        self.note_phase("rollout")
        generated = self.finished(begun.done)
        del self._ahead[step]
        self._begin_ahead(step)
        end = time.time()
        return generated, end - begun.time, end - start

    def publish(self, weights: PublishedWeights) -> None:
        """At once, or when the trajectories in flight are finished."""
        if self.asynchronous.in_flight == "finish" and self._ahead:
            self._held_back = weights
        else:
            super().publish(weights)

    def _begin_ahead(self, step: int) -> None:
        """Start what may be generated while `step` trains."""
        if self._held_back is not None:
            super().publish(self._held_back)
            self._held_back = None
        ahead = self.asynchronous.ahead or self.asynchronous.max_staleness
        for later in range(step + 1, min(step + ahead, self.spec.steps - 1) + 1):
            if later not in self._ahead:
                self._begin(later)

    def _begin(self, step: int) -> None:
        self._ahead[step] = _Begun(self.begin(step), time.time())

    def keep_origin(
        self, batch: PolicyBatch, versions: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
    ) -> PolicyBatch:
        """`batch` with where its tokens come from: for each row, the version and log-probability of each token."""
        batch["versions"] = align(versions, batch["mask"])
        batch["behavior_log_probs"] = align(logprobs, batch["mask"])
        return batch

    def train(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        return correct_staleness(step, batch, self.asynchronous) | super().train(step, batch)

    # ---- parts -----------------------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> AsynchronousSpec:
        return self.spec.asynchronous or AsynchronousSpec()

    @property
    def keeps_old_log_probs(self) -> bool:
        return True  # the policy that trains is not the one that sampled


def correct_staleness(step: int, batch: PolicyBatch, rule: AsynchronousSpec) -> dict[str, float]:
    """Enforce the staleness bound on `batch` and weight its tokens; returns what was found, as metrics.

    Takes `versions` and `behavior_log_probs` out of the batch, adds `importance`, empties the mask of what is dropped.

    Raises:
        StalenessError: with `on_stale: wait`, a token is older than `max_staleness`.
    """
    mask = batch["mask"].bool()
    age = torch.where(mask, step - batch.pop("versions"), 0.0)
    sampled_with = batch.pop("behavior_log_probs")
    weights = truncated_importance_weights(batch["old_log_probs"], sampled_with, mask, cap=rule.importance_cap)
    metrics = {
        "staleness": float(masked_mean(age, mask)),
        "staleness_max": float(age.max()),
        "mixed": float((age.amax(dim=1) > torch.where(mask, age, torch.inf).amin(dim=1)).sum()),
        "importance": float(masked_mean(weights, mask)),
        "dropped": 0.0,
    }
    stale = age > rule.max_staleness
    if stale.any() and rule.on_stale == "wait":
        raise StalenessError(f"step {step}: a token is {int(age.max())} steps old, the bound is {rule.max_staleness}")
    if rule.on_stale == "drop":
        dropped = stale.any(dim=1)
        batch["mask"] = torch.where(dropped.unsqueeze(1), 0.0, batch["mask"])
        metrics["dropped"] = float(dropped.sum())
    batch["importance"] = torch.where(stale, 1.0, weights)
    return metrics
