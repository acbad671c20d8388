"""Off-policy training under a bound: the next steps' trajectories are generated while a step trains."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from rlix.engine.weights import PublishedWeights
from rlix.pipeline.algorithms import masked_mean, truncated_importance_weights
from rlix.pipeline.base import JobConfig
from rlix.pipeline.batch import align
from rlix.pipeline.full_finetune import FullFinetunePipeline
from rlix.pipeline.policy import PolicyBatch
from rlix.pipeline.router import Trajectory
from rlix.pipeline.samples import Samples
from rlix.pipeline.spec_training import AsynchronousSpec
from rlix.pipeline.tasks import Prompt
from rlix.protocol.errors import RlixError


class StalenessError(RlixError):
    """A token is older than the job's bound allows. Always a bug: nothing is started that could become too old."""


@dataclass(frozen=True, slots=True)
class _Started:
    prompts: Sequence[Prompt]
    done: "Future[list[Trajectory]]"
    time: float


class AsynchronousPipeline(FullFinetunePipeline):
    """While step k trains, the trajectories of the steps up to k + `ahead` are generated.

    Every token knows the version of the weights that produced it, and is checked against `max_staleness` when it is
    trained on. The loss is PPO's around the policy before the update, each token weighted for having been sampled by
    an older one (`truncated_importance_weights`). With `in_flight: finish` a step's trajectories come from one version,
    so that a run is as reproducible as an on-policy one.
    """

    def __init__(self, pipeline_id: str, config: JobConfig) -> None:
        super().__init__(pipeline_id, config)
        self._ahead: dict[int, _Started] = {}
        self._held_back: PublishedWeights | None = None

    def step(self, step: int) -> Mapping[str, float]:
        samples = self.collect(step)
        self.start_ahead(step)
        batch = self.collate(samples.trajectories)
        batch["old_log_probs"] = self.old_log_probs(batch)
        if self.reference is not None:
            batch["reference_log_probs"] = self.reference_log_probs(batch)
        batch["advantages"] = self.advantages(self.shaped(samples), batch)
        metrics = self.correct(step, samples.trajectories, batch)
        return metrics | self.train(step, batch) | samples.metrics() | self.rollout_metrics

    # ---- ahead of the step that trains -----------------------------------------------------------------------

    def collect(self, step: int) -> Samples:
        """The step's samples, which an earlier step has usually started."""
        if step not in self._ahead:
            self._start(step)
        started = self._ahead[step]
        begin = time.time()
        self.note_phase("rollout")
        done = self.rollouts.wait(started.done, self.lease_timeout_s, self.stop_requested)
        del self._ahead[step]
        self.note_rollout(done, time.time() - started.time)
        self.rollout_metrics["rollout_wait_s"] = time.time() - begin
        return self.judge(started.prompts, done)

    def start_ahead(self, step: int) -> None:
        """Start what may be generated while `step` trains."""
        if self._held_back is not None:
            super().publish(self._held_back)
            self._held_back = None
        ahead = self.asynchronous.ahead or self.asynchronous.max_staleness
        for later in range(step + 1, min(step + ahead, self.spec.steps - 1) + 1):
            if later not in self._ahead:
                self._start(later)

    def publish(self, weights: PublishedWeights) -> None:
        """At once, or when the trajectories in flight are finished."""
        if self.asynchronous.in_flight == "finish" and self._ahead:
            self._held_back = weights
        else:
            super().publish(weights)

    def _start(self, step: int) -> None:
        prompts = self.task.prompts(self.spec.seed, step, self.spec.rollout.prompts_per_step)
        self._ahead[step] = _Started(prompts, self.rollouts.submit_all(step, self.trajectories(prompts)), time.time())

    # ---- staleness -------------------------------------------------------------------------------------------

    def correct(self, step: int, trajectories: Sequence[Trajectory], batch: PolicyBatch) -> dict[str, float]:
        """Enforce the staleness bound on `batch` and weight its tokens; returns what was found, as metrics.

        Raises:
            StalenessError: with `on_stale: wait`, a token is older than `max_staleness`.
        """
        rule, mask = self.asynchronous, batch["mask"].bool()
        age = torch.where(mask, step - align([t.versions for t in trajectories], mask), 0.0)
        sampled_with = align([t.logprobs for t in trajectories], mask)
        weights = truncated_importance_weights(batch["old_log_probs"], sampled_with, mask, cap=rule.importance_cap)
        metrics = {
            "staleness": float(masked_mean(age, mask)),
            "staleness_max": float(age.max()),
            "importance": float(masked_mean(weights, mask)),
            "dropped": 0.0,
        }
        stale = age > rule.max_staleness
        if stale.any() and rule.on_stale == "wait":
            raise StalenessError(
                f"step {step}: a token is {int(age.max())} steps old, the bound is {rule.max_staleness}"
            )
        if rule.on_stale == "drop":
            dropped = stale.any(dim=1)
            batch["mask"] = torch.where(dropped.unsqueeze(1), 0.0, batch["mask"])
            metrics["dropped"] = float(dropped.sum())
        batch["importance"] = torch.where(stale, 1.0, weights)
        return metrics

    # ---- parts -----------------------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> AsynchronousSpec:
        return self.spec.asynchronous or AsynchronousSpec()
