"""The pipeline that ships: samples from a source, made on a schedule, and what an algorithm learns from them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.saving import SaveHandle
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.base import Pipeline
from rlix.pipeline.batch import PolicyBatch, over_ranks, tokens_of
from rlix.pipeline.engines import Engines
from rlix.pipeline.evaluation import Evaluation, evaluation_metrics
from rlix.pipeline.models import teacher_of
from rlix.pipeline.policy import AdapterPolicy, Policy, adapter_config, save_state, score
from rlix.pipeline.sample_texts import SampleTexts
from rlix.pipeline.samples import Samples
from rlix.pipeline.schedules.base import Supply
from rlix.pipeline.schedules.choice import build_schedule
from rlix.pipeline.sources.choice import build_source
from rlix.pipeline.sources.surroundings import surroundings
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.training.critic import CriticBatch, critic_on_meta
from rlix.pipeline.training.metrics import mean_metrics
from rlix.pipeline.training.updates import updates
from rlix.pipeline.warmup import conversations_of, warm_up
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName, Phase


class Trainer(Pipeline):
    """Source × schedule × algorithm, as the job's spec has them; it trains every weight, or with `lora` an adapter."""

    engines: Engines
    policy: Policy
    rollouts: Any  # a `RolloutManager`, or what an adapter sees of one
    critic: TrainEngine | None = None
    reference: TrainEngine | None = None

    # ---- the algorithm ---------------------------------------------------------------------------------------

    def step(self, step: int) -> Mapping[str, float]:
        samples = self.sample(step)
        batch = self.scored(samples)
        metrics = self.algorithm.prepare(samples, batch)
        metrics |= self.train_critic(step, batch)
        return metrics | self.train(step, batch) | samples.metrics() | self.rollouts.slot_use()

    def sample(self, step: int) -> Samples:
        """What this step learns from, made on whatever devices the scheduler grants."""
        self.note_phase("rollout")
        samples = replace(self.schedule.samples(step), learner=step)
        self.texts.note(step, samples)
        return samples

    def scored(self, samples: Samples) -> PolicyBatch:
        """A row for each sample, with what the algorithm compares with, as far as it asks for it.

        Raises:
            SpecError: tokens of older weights are to be weighed, and sampling forbids it.
        """
        batch, needs = self.algorithm.begin(samples, self.pad_id)
        if not self.source.generates:
            del batch["sampled_log_probs"]
        elif problem := self.spec.rollout.not_as_the_policy_says:
            del batch["sampled_log_probs"]
            if samples.off_policy:
                raise SpecError(
                    f"rollout.temperature: step {samples.learner} learns from older weights' tokens, and {problem}"
                )
        if needs.old_log_probs:
            batch["old_log_probs"] = self.old_log_probs(batch)
        if needs.reference:
            batch["reference_log_probs"] = self.reference_log_probs(batch)
        if self.critic is not None:
            batch["values"] = self.values(batch)
        return batch

    def train(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        """Optimizer steps over the minibatches, then the new weights; not abandoned where the critic has trained."""
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor, stoppable=self.critic is None):
            start = time.time()
            metrics = self.updates(step, batch, lambda part, total: self.policy.train(part, total, self.algorithm))
            seconds = time.time() - start
            self.publish(step + 1)
        return {"train_s": seconds} | mean_metrics(metrics) | self.lateness()

    def train_critic(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        """As many optimizer steps as the policy takes, over the same minibatches; of a job that has a critic."""
        if self.critic is None or self.needs.critic is None:
            return {}
        clip, norm = self.needs.critic.clip, self.spec.optimizer.max_grad_norm
        old, returns = batch.pop("values"), batch.pop("returns")
        whole = CriticBatch(input_ids=batch["input_ids"], mask=batch["mask"], old_values=old, returns=returns)
        critic, aggregation = self.critic, self.algorithm.aggregation
        with self.phase(ClusterName.CRITIC, Phase.CRITIC_TRAINING, critic):
            start = time.time()
            metrics = self.updates(
                step,
                cast(PolicyBatch, whole),
                lambda part, total: cast(
                    dict[str, float], critic.critic_step(over_ranks(part), total, clip, aggregation, norm)
                ),
            )
            seconds = time.time() - start
        return {"critic_train_s": seconds} | mean_metrics(metrics)

    # ---- its parts -------------------------------------------------------------------------------------------

    def old_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the policy before this step's first update: [samples, length - 1]."""
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.OLD_LOG_PROBS, self.actor):
            return self.policy.score(batch)

    def reference_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the teacher, or the policy as it was before reinforcement learning, which for an adapter is the model
        that it is on: [samples, length - 1]."""
        cluster, engine = ClusterName.REFERENCE, self.reference
        if engine is None:
            cluster, engine = ClusterName.ACTOR_TRAIN, self.actor
        with self.phase(cluster, Phase.REFERENCE_LOG_PROBS, engine):
            return score(engine, batch, self.spec.rollout.temperature)

    def values(self, batch: PolicyBatch) -> torch.Tensor:
        """The critic's estimate before each token: [samples, length - 1]."""
        assert self.critic is not None
        with self.phase(ClusterName.CRITIC, Phase.VALUE_COMPUTE, self.critic):
            return cast(torch.Tensor, self.critic.values(over_ranks(tokens_of(batch))))

    def lateness(self) -> dict[str, float]:
        """By how much decoding took longer than declared, in all so far, where a speed was declared."""
        return {} if self.spec.declared_speed is None else {"decode_late_s": self.rollouts.late_s}

    def publish(self, version: int) -> None:
        """Rollouts, if there are any, generate with the policy as it is now as soon as the schedule lets them."""
        if self.spec.generates:
            self.schedule.publish(self.policy.publish(version))

    def updates(
        self, step: int, batch: PolicyBatch, train: Callable[[PolicyBatch, float], dict[str, float]]
    ) -> list[dict[str, float]]:
        """Over the minibatches, as often as the job says; the metrics of each."""
        return updates(batch, self.algorithm, self.spec.algorithm, self.spec.seed, step, train)

    # ---- its life --------------------------------------------------------------------------------------------

    @property
    def whole_name(self) -> str:
        """Which no other part of the job has."""
        return self.spec.name

    @property
    def actor(self) -> TrainEngine:
        """The policy's."""
        return self.engines.actor

    def make_engines(self) -> Engines:
        return Engines(self, None if self.spec.lora is None else (1, adapter_config(self.spec.lora).rank))

    def make_policy(self) -> Policy:
        if self.spec.lora is None:
            return Policy(self.engines, self.spec)
        return AdapterPolicy(self.engines, self.spec, "policy", alone=True)

    def setup(self) -> None:
        self.engines = self.make_engines()
        self.build_source()
        self.engines.start()
        self.policy = self.make_policy()
        self.rollouts = self.policy.rollouts()
        supply = Supply(self.source, self.rollouts.publish, self.spec.steps)
        self.schedule = build_schedule(self.spec.schedule, supply)

    def build_source(self) -> None:
        """Where samples come from and what is learnt from them."""
        spec = self.spec
        around = surroundings(
            spec, self.whole_name, self.engines.model_path, self.stop_requested, lambda: self.rollouts
        )
        self.pad_id = int(around.tokenizer.pad_token_id)
        self.source = build_source(spec.source, around)
        self.taught = conversations_of(spec, around)
        self.algorithm = build_algorithm(spec.algorithm, self.source.longest)
        self.needs = self.algorithm.needs(self.algorithm.options)
        self.texts = SampleTexts(spec.logging, self.folder, around.tokenizer)
        self.evaluations: dict[str, Evaluation] = {}
        if spec.evaluation is not None:
            for name, one in spec.evaluation.named.items():
                self.evaluations[name] = Evaluation(one, spec.source, around, name)

    def initialize(self) -> None:
        warm_up(self, self.actor, self.taught or self.source)
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            if self.policy.keeps_start(self.needs):
                self.engines.keep_start()
            self.engines.serve_base()
            self.policy.begin()
            self.publish(0)
        self._build_others()

    def save(self, path: Path) -> list[SaveHandle]:
        """Between phases the engines wait in host memory: to save them takes no device, and no place in a queue."""
        saving = self.policy.save(path)
        if self.critic is not None:
            saving += save_state(self.critic, path / "critic", asynchronous=self.spec.checkpoint.asynchronous)
        return saving

    def load(self, path: Path, step: int) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.engines.serve_base()
            self.policy.load(path)
            self.publish(step)
        self._build_others()
        if self.critic is not None:
            with self.phase(ClusterName.CRITIC, Phase.CRITIC_TRAINING, self.critic):
                self.critic.load_state(path / "critic")
                self.critic.adjust_optimizer(self._of_critic(self.spec.optimizer), self.spec.updates)

    def settle(self) -> None:
        self.schedule.settle()

    def evaluate(self, done: int) -> dict[str, float]:
        """Not counted into training; with the newest weights."""
        metrics: dict[str, float] = {}
        for name, evaluation in self.evaluations.items():
            samples = evaluation.run(done)
            self.texts.note(max(0, done - 1), samples, evaluation=True)
            metrics |= evaluation_metrics(samples, name)
        self.rollouts.slot_use()  # the next step's begins anew
        return metrics

    def teardown(self) -> None:
        for evaluation in getattr(self, "evaluations", {}).values():
            evaluation.close()
        for part in ("source", "taught", "engines"):
            if (found := getattr(self, part, None)) is not None:
                found.close()

    def expect_gpu_s(self, left: float) -> None:
        self.rollouts.expect_gpu_s(left)

    def _build_others(self) -> None:
        """The teacher, or what starts from the policy as reinforcement learning finds it."""
        start, needs = self.engines.start_path, self.needs
        if needs.reference_engine(adapter=self.policy.adapter is not None):
            path = start if needs.teacher is None else teacher_of(needs.teacher, self.engines.model_path)
            self.reference = self.engines.policy(ClusterName.REFERENCE, path)
        if needs.critic is not None:
            optimizer = self._of_critic(self.spec.optimizer)
            self.critic = self.engines.build(ClusterName.CRITIC, critic_on_meta(start), start, optimizer)

    def _of_critic(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        assert self.needs.critic is not None
        return optimizer.model_copy(update={"learning_rate": self.needs.critic.learning_rate})
