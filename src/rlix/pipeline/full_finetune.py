"""The pipeline that ships: samples from a source, made on a schedule, and what an algorithm learns from them."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig

from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.saving import SaveHandle
from rlix.engine.weights.publication import Published
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.base import Pipeline
from rlix.pipeline.batch import PolicyBatch, collate, over_ranks, shuffled_parts, tokens_of
from rlix.pipeline.critic import CriticBatch, critic_on_meta
from rlix.pipeline.ends import Ends
from rlix.pipeline.evaluation import Evaluation, evaluation_metrics
from rlix.pipeline.models import describe_model, prepare_model, teacher_of
from rlix.pipeline.policy import policy_on_meta
from rlix.pipeline.rollout.bundle_feed import BundleFeed
from rlix.pipeline.rollout.none import NoRollouts
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.router import Router, Sampling
from rlix.pipeline.sample_texts import SampleTexts
from rlix.pipeline.samples import Samples
from rlix.pipeline.schedules.base import Supply
from rlix.pipeline.schedules.choice import build_schedule
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import Source, Surroundings
from rlix.pipeline.sources.choice import build_source
from rlix.pipeline.spec.executor import build_arguments
from rlix.pipeline.spec.source import SourceSpec
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.pipeline.training.metrics import mean_metrics
from rlix.pipeline.training.module import OptimizedModule
from rlix.pipeline.training.parameter_groups import check_patterns
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Cluster
from rlix.protocol.types import ClusterName, Phase


class FullFinetunePipeline(Pipeline):
    """Source × schedule × algorithm, as the job's spec has them; every weight of one policy is trained."""

    adapter: str | None = None  # of the policy, where not every weight of it is trained
    adapter_room = (0, 0)  # how many adapters replicas serve at most, and of which rank
    rollouts: Any  # a `RolloutManager`, or what an adapter sees of one

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
        algorithm, rollout, optimizer = self.spec.algorithm, self.spec.rollout, self.spec.optimizer
        metrics: list[dict[str, float]] = []
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor, stoppable=self.critic is None):
            start = time.time()
            for epoch in range(algorithm.epochs):
                for part in self.minibatches(batch, step, epoch):
                    total = self.algorithm.denominator(part["mask"])
                    metrics.append(
                        self.actor.policy_step(
                            over_ranks(part),
                            total,
                            self.algorithm,
                            rollout.temperature,
                            optimizer.max_grad_norm,
                            self.adapter,
                        )
                    )
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
        metrics: list[dict[str, float]] = []
        with self.phase(ClusterName.CRITIC, Phase.CRITIC_TRAINING, self.critic):
            start = time.time()
            for epoch in range(self.spec.algorithm.epochs):
                for part in self.minibatches(cast(PolicyBatch, whole), step, epoch):
                    total = self.algorithm.denominator(part["mask"])
                    metrics.append(
                        self.critic.critic_step(over_ranks(part), total, clip, self.algorithm.aggregation, norm)
                    )
            seconds = time.time() - start
        return {"critic_train_s": seconds} | mean_metrics(metrics)

    # ---- its parts -------------------------------------------------------------------------------------------

    def old_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the policy before this step's first update: [samples, length - 1]."""
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.OLD_LOG_PROBS, self.actor):
            found = self.actor.log_probs(over_ranks(tokens_of(batch)), self.spec.rollout.temperature, self.adapter)
        return cast(torch.Tensor, found)

    def reference_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the policy as it was before reinforcement learning: [samples, length - 1]."""
        assert self.reference is not None
        with self.phase(ClusterName.REFERENCE, Phase.REFERENCE_LOG_PROBS, self.reference):
            return cast(
                torch.Tensor, self.reference.log_probs(over_ranks(tokens_of(batch)), self.spec.rollout.temperature)
            )

    def values(self, batch: PolicyBatch) -> torch.Tensor:
        """The critic's estimate before each token: [samples, length - 1]."""
        assert self.critic is not None
        with self.phase(ClusterName.CRITIC, Phase.VALUE_COMPUTE, self.critic):
            return cast(torch.Tensor, self.critic.values(over_ranks(tokens_of(batch))))

    def lateness(self) -> dict[str, float]:
        """By how much decoding took longer than declared, in all so far, where a speed was declared."""
        return {} if self.spec.declared_speed is None else {"decode_late_s": self.rollouts.late_s}

    def weights(self, version: int) -> Published:
        """What the replicas need of the policy as it is now."""
        return self.actor.publish(version)

    def publish(self, version: int) -> None:
        """Rollouts, if there are any, generate with the policy as it is now as soon as the schedule lets them."""
        if self.spec.generates:
            self.schedule.publish(self.weights(version))

    def minibatches(self, batch: PolicyBatch, step: int, epoch: int) -> list[PolicyBatch]:
        """Equal parts of the batch in an order drawn from the job's seed; without those that teach nothing."""
        seed = stream_seed(self.spec.seed, "minibatches", step, epoch)
        return [part for part in shuffled_parts(batch, self.spec.algorithm.minibatches, seed) if part["mask"].any()]

    def warm_up(self) -> None:
        """Supervised steps on right answers, so that reinforcement learning has something to reinforce."""
        warmup = self.spec.warmup
        if warmup is None:
            return
        taught = self.taught or self.source
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            for step in range(warmup.steps):
                batch = collate(taught.supervised(step, warmup.batch_size), self.pad_id)
                tokens, norm = float(batch["mask"].sum()), self.spec.optimizer.max_grad_norm
                self.actor.supervised_step(over_ranks(batch), tokens, warmup.learning_rate, norm)
            self.actor.finish_warmup()

    # ---- its life --------------------------------------------------------------------------------------------

    def setup(self) -> None:
        self.reference: TrainEngine | None = None
        self.critic: TrainEngine | None = None
        self.model_path = self.local_model()
        self.build_source()
        self._start_engines()
        supply = Supply(self.source, self.rollouts.publish, self.spec.steps)
        self.schedule = build_schedule(self.spec.schedule, supply)

    @property
    def whole_name(self) -> str:
        """Which no other part of the job has."""
        return self.spec.name

    def local_model(self) -> Path:
        """The folder of the model that is trained."""
        return prepare_model(self.spec.model, self.folder.path / "model", self.spec.seed)

    def build_source(self) -> None:
        """Where samples come from and what is learnt from them."""
        spec = self.spec
        tokenizer = load_tokenizer(self.model_path)
        self.pad_id = int(tokenizer.pad_token_id)
        ends = Ends(tokenizer, self.model_path, spec.rollout.stop, spec.rollout.stop_token_ids)
        around = Surroundings(
            job=self.whole_name,
            seed=spec.seed,
            groups=spec.rollout.prompts_per_step,
            group_size=spec.rollout.samples_per_prompt,
            sampling=Sampling(
                max_new_tokens=spec.rollout.max_new_tokens,
                temperature=spec.rollout.temperature,
                top_p=spec.rollout.top_p,
                top_k=spec.rollout.top_k,
                stop_token_ids=ends.token_ids,
            ),
            context=spec.rollout.longest(int(AutoConfig.from_pretrained(self.model_path).max_position_embeddings)),
            tokenizer=tokenizer,
            ends=ends,
            timeout_s=spec.rollout.timeout_s,
            stop=self.stop_requested,
            generator=lambda: self.rollouts,
            steps=spec.steps,
            resample_rounds=spec.algorithm.rounds,
        )
        self.source = build_source(spec.source, around)
        self.taught: Source | None = None
        if spec.warmup is not None and spec.warmup.conversations is not None:
            alone = replace(around, group_size=1)
            self.taught = build_source(
                SourceSpec(conversations=spec.warmup.conversations, chat=spec.source.chat), alone
            )
        self.algorithm = build_algorithm(spec.algorithm, self.source.longest)
        self.needs = self.algorithm.needs(self.algorithm.options)
        self.texts = SampleTexts(spec.logging, self.folder, tokenizer)
        self.evaluations: dict[str, Evaluation] = {}
        if spec.evaluation is not None:
            for name, one in spec.evaluation.named.items():
                self.evaluations[name] = Evaluation(one, spec.source, around, name)

    def initialize(self) -> None:
        self.warm_up()
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            if self.needs.starting_policy:
                self.actor.save(self.reference_path)
            self.publish(0)
        self._build_others()

    def save(self, path: Path) -> list[SaveHandle]:
        """Between phases the engines wait in host memory: to save them takes no device, and no place in a queue."""
        describe_model(self.model_path, path / "model", self.spec.model.dtype)
        return self._save_states({path / "state": self.actor, path / "critic": self.critic})

    def _save_states(self, engines: Mapping[Path, TrainEngine | None]) -> list[SaveHandle]:
        there = [(engine, path) for path, engine in engines.items() if engine is not None]
        if self.spec.checkpoint.asynchronous:
            return [engine.save_state(path, asynchronous=True) for engine, path in there]
        for engine, path in there:
            engine.save_state(path)
        return []

    def load(self, path: Path, step: int) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.actor.load_state(path / "state")
            self.actor.adjust_optimizer(self.spec.optimizer, self.spec.updates)
            self.publish(step)
        self._build_others()
        self._load_critic(path)

    def _load_critic(self, path: Path) -> None:
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
        for part in ("source", "taught", "bundles", "rollouts", "replicas", "actor", "reference", "critic"):
            if (found := getattr(self, part, None)) is not None:
                found.close()

    def expect_gpu_s(self, left: float) -> None:
        self.rollouts.expect_gpu_s(left)

    @property
    def reference_path(self) -> Path:
        """The policy as reinforcement learning found it; kept in the run folder so that a resumed run finds it too."""
        return self.folder.path / "reference"

    # ---- engines ---------------------------------------------------------------------------------------------

    def _start_engines(self) -> None:
        if not self.spec.generates:
            self.actor, self.rollouts = self._policy_engine(ClusterName.ACTOR_TRAIN, self.model_path), NoRollouts()
            return
        with ThreadPoolExecutor(1) as background:  # replica processes start while the train engine is built
            replicas = background.submit(self._start_replicas)
            try:
                self.actor = self._policy_engine(ClusterName.ACTOR_TRAIN, self.model_path)
            finally:
                self.replicas = replicas.result()
        cluster = self.registration.cluster(ClusterName.ACTOR_INFER)
        caches = self.spec.rollout.executor == "vllm"
        router = Router(len(cluster.bundles), self.spec.rollout.max_num_seqs, prefix_cache=caches)
        self.bundles = BundleFeed(self.client, cluster.name)
        self.rollouts = RolloutManager(
            cluster, replicas=self.replicas.replicas, router=router, client=self.bundles, folder=self.folder
        )
        self.bundles.feed(self.rollouts)

    def _build_others(self) -> None:
        """The teacher, or what starts from the policy as reinforcement learning finds it."""
        if self.needs.reference_engine(adapter=self.adapter is not None):
            path = (
                self.reference_path if self.needs.teacher is None else teacher_of(self.needs.teacher, self.model_path)
            )
            self.reference = self._policy_engine(ClusterName.REFERENCE, path)
        if self.needs.critic is not None:
            module, optimizer = critic_on_meta(self.reference_path), self._of_critic(self.spec.optimizer)
            self.critic = self.build_train_engine(ClusterName.CRITIC, module, self.reference_path, optimizer)

    def _of_critic(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        assert self.needs.critic is not None
        return optimizer.model_copy(update={"learning_rate": self.needs.critic.learning_rate})

    def _start_replicas(self) -> InferenceEngine:
        cluster = self.registration.cluster(ClusterName.ACTOR_INFER)
        engine = InferenceEngine(str(self.model_path), executor=self.spec.rollout.executor)
        engine.build(
            tensor_parallel_size=cluster.tensor_parallel_size,
            devices=self.devices_of(cluster.devices),
            namespace=self.registration.ray_namespace,
            dtype=self.spec.model.dtype,
            max_num_seqs=self.spec.rollout.max_num_seqs,
            adapters=self.adapter_room[0],
            adapter_rank=self.adapter_room[1],
            declared=self.spec.speed,
            **build_arguments(self.spec.rollout.executor, self.spec.rollout.executor_options),
            load=False,  # nothing may be on a device before there is a lease for it
        )
        return engine

    def _sizes(self, cluster: Cluster, devices: int) -> tuple[int, int]:
        """Devices that hold one copy of the weights: all, unless the job says otherwise, or who registered it by a
        number of its own; and those that compute on a sequence together."""
        said = self.spec.clusters_in_use.get(cluster.name)
        shards = devices if said is None else said.copy_of(devices)
        if cluster.tensor_parallel_size > 1:
            shards = cluster.tensor_parallel_size
        return shards, 1 if said is None else said.together

    def _policy_engine(self, name: ClusterName, path: Path) -> TrainEngine:
        module = policy_on_meta(path)
        check_patterns([name for name, _ in module.named_parameters()], self.spec.optimizer)
        return self.build_train_engine(name, module, path, self.spec.optimizer)

    def build_train_engine(
        self, name: ClusterName, module: OptimizedModule, path: Path, optimizer: OptimizerSpec
    ) -> TrainEngine:
        """Build on the cluster's devices, under a lease, and leave the bytes in host memory."""
        cluster, dtype = self.registration.cluster(name), self.spec.model.dtype
        frozen = name is ClusterName.REFERENCE or (self.adapter is not None and self.spec.warmup is None)
        with self.phase(name, Phase.INITIALIZATION) as lease:
            shards, sequence = self._sizes(cluster, len(lease.devices))
            engine = TrainEngine(module, executor="fsdp2")
            engine.build(
                shard=shards,
                sequence_parallel_size=sequence,
                devices=self.devices_of(lease.devices),
                namespace=self.registration.ray_namespace,
                seed=self.spec.seed,
                dtype=dtype if frozen and name is not ClusterName.CRITIC else "float32",
                compute_dtype=dtype,
                weights_path=path,
                lease=self.client.fence(lease),
                name_holders=lambda processes: self.client.name_holders(name, processes),
                build_timeout_s=self.spec.training.start_timeout_s,
                call_timeout_s=self.spec.training.timeout_s,
            )
            engine.configure_optimizer(optimizer, self.spec.training, self.spec.updates, dtype)
            engine.declare_speed(self.spec.speed)
            engine.release(lease.epoch)
        return engine
