"""Full fine-tuning with group-relative policy optimisation: every weight of one policy is trained."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.parallel import NeedParallel
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights.publication import PublishedWeights
from rlix.pipeline.algorithms import (
    group_relative_advantages,
    groups_with_spread,
    kl_estimate,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    rloo_advantages,
)
from rlix.pipeline.base import Pipeline
from rlix.pipeline.batch import TokenBatch, collate
from rlix.pipeline.policy import PolicyBatch, policy_on_meta
from rlix.pipeline.rollout.bundle_feed import BundleFeed
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.router import Router, Sampling, Trajectory
from rlix.pipeline.samples import Samples
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.tasks import Prompt
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.pipeline.training.metrics import mean_metrics
from rlix.pipeline.training.module import OptimizedModule
from rlix.protocol.types import ClusterName, Phase


class FullFinetunePipeline(Pipeline):
    """Sample groups, reward them, compare within each group, take a clipped policy step, publish the new weights."""

    rollouts: RolloutManager
    rollout_metrics: dict[str, float]

    # ---- the algorithm ---------------------------------------------------------------------------------------

    def step(self, step: int) -> Mapping[str, float]:
        samples = self.sample(step)
        batch = self.collate(samples.trajectories)
        self.add_log_probs(batch)
        batch["advantages"] = self.advantages(self.shaped(samples), batch)
        return self.train(step, batch) | samples.metrics() | self.rollout_metrics

    def sample(self, step: int) -> Samples:
        """The step's groups. Those without spread are replaced by groups of new prompts, `resample_rounds` times."""
        samples = self.sample_round(step)
        size, rounds = self.spec.rollout.samples_per_prompt, self.spec.algorithm.resample_rounds
        resampled = 0
        for extra in range(1, rounds + 1):
            flat = (~groups_with_spread(samples.reward_tensor, size)).nonzero().flatten().tolist()
            if not flat:
                break
            first = self.rollout_metrics
            more = self.sample_round(step + extra * self.spec.steps, count=len(flat))
            self.rollout_metrics = _both_rounds(first, self.rollout_metrics)
            useful = groups_with_spread(more.reward_tensor, size).nonzero().flatten().tolist()
            samples = _replaced(samples, flat, more, useful, size)
            resampled += len(useful)
        if rounds:
            self.rollout_metrics["resampled"] = resampled
        return samples

    def sample_round(self, step: int, count: int | None = None) -> Samples:
        """Groups for the first `count` prompts of step `step`; steps beyond the job's last are spare prompts."""
        prompts = self.task.prompts(self.spec.seed, step, self.spec.rollout.prompts_per_step)[:count]
        return self.judge(prompts, self.generate(step, prompts))

    def generate(self, step: int, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """A group of samples for each prompt, next to each other, on whatever devices the scheduler grants."""
        start = time.time()
        self.note_phase("rollout")
        done = self.rollouts.generate(step, self.trajectories(prompts), self.rollout_timeout_s, self.stop_requested)
        self.note_rollout(done, time.time() - start)
        return done

    def judge(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Samples:
        pairs = zip(self.repeat(prompts), trajectories, strict=True)
        return Samples(trajectories, [self.task.reward(p, t.token_ids) for p, t in pairs])

    def shaped(self, samples: Samples) -> torch.Tensor:
        """The rewards as the policy learns from them: [prompts * samples]."""
        lengths = torch.tensor([len(t.token_ids) for t in samples.trajectories])
        limit, buffer = self.spec.rollout.max_new_tokens, self.spec.algorithm.overlong_buffer
        return samples.reward_tensor + overlong_penalty(lengths, limit, buffer)

    def advantages(self, rewards: torch.Tensor, batch: PolicyBatch) -> torch.Tensor:
        """How much better each sample [prompts * samples], or each token [.., length - 1], is than expected."""
        group_size, algorithm = self.spec.rollout.samples_per_prompt, self.spec.algorithm
        if algorithm.name == "rloo":
            return rloo_advantages(rewards, group_size)
        if algorithm.name == "reinforce_pp":
            return reinforce_plus_plus_advantages(
                rewards,
                batch["mask"],
                self.kl(batch),
                kl_coefficient=algorithm.kl_coefficient,
                discount=algorithm.discount,
            )
        return group_relative_advantages(rewards, group_size, normalize_by_std=algorithm.normalize_by_std)

    def kl(self, batch: PolicyBatch) -> torch.Tensor | None:
        """Per-token KL estimate to the reference [.., length - 1], for algorithms that have it in the reward."""
        if "reference_log_probs" not in batch:
            return None
        log_probs = batch["old_log_probs"] if "old_log_probs" in batch else self.old_log_probs(batch)
        return kl_estimate(log_probs, batch["reference_log_probs"], self.spec.algorithm.kl_estimator)

    def add_log_probs(self, batch: PolicyBatch) -> None:
        """Put in the batch what the loss compares the policy with, as far as the algorithm asks for it."""
        if self.keeps_old_log_probs:
            batch["old_log_probs"] = self.old_log_probs(batch)
        if self.reference is not None:
            batch["reference_log_probs"] = self.reference_log_probs(batch)

    def old_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the policy before this step's first update."""
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.OLD_LOG_PROBS, self.actor):
            return cast(torch.Tensor, self.actor.log_probs(NeedParallel(batch), self.spec.rollout.temperature))

    def reference_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the policy as it was before reinforcement learning."""
        assert self.reference is not None
        with self.phase(ClusterName.REFERENCE, Phase.REFERENCE_LOG_PROBS, self.reference):
            return cast(torch.Tensor, self.reference.log_probs(NeedParallel(batch), self.spec.rollout.temperature))

    def train(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        """Optimizer steps over the batch's minibatches, then the new weights for the replicas."""
        algorithm, rollout, optimizer = self.spec.algorithm, self.spec.rollout, self.spec.optimizer
        metrics: list[dict[str, float]] = []
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            start = time.time()
            for epoch in range(algorithm.epochs):
                for part in self.minibatches(batch, step, epoch):
                    tokens = float(part["mask"].sum())
                    if not tokens:
                        continue  # nothing to learn from, and nothing to divide by
                    metrics.append(
                        self.actor.policy_step(
                            NeedParallel(part), tokens, algorithm, rollout.temperature, optimizer.max_grad_norm
                        )
                    )
            seconds = time.time() - start
            self.publish(self.actor.publish(step + 1))
        return {"train_s": seconds} | mean_metrics(metrics)

    def publish(self, weights: PublishedWeights) -> None:
        """Rollouts generate with `weights` from now on."""
        self.rollouts.publish(weights)

    def warm_up(self) -> None:
        """Supervised steps on right answers, so that reinforcement learning has something to reinforce."""
        warmup = self.spec.warmup
        if warmup is None:
            return
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            for step in range(warmup.steps):
                batch = self.supervised_batch(step, warmup.batch_size)
                self.actor.supervised_step(
                    NeedParallel(batch),
                    float(batch["mask"].sum()),
                    warmup.learning_rate,
                    self.spec.optimizer.max_grad_norm,
                )
            self.actor.finish_warmup()

    # ---- data ------------------------------------------------------------------------------------------------

    @property
    def keeps_old_log_probs(self) -> bool:
        """After the first optimizer step the policy is no longer the one that sampled: its log-probs are kept."""
        return self.spec.algorithm.epochs * self.spec.algorithm.minibatches > 1

    def repeat(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts for _ in range(self.spec.rollout.samples_per_prompt)]

    def trajectory(self, id: str, prompt: Prompt) -> Trajectory:
        return Trajectory(id, prompt.prompt_ids, stream_seed(self.spec.seed, id), self.sampling)

    def trajectories(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """A group of unstarted samples for each prompt."""
        samples = range(self.spec.rollout.samples_per_prompt)
        return [self.trajectory(f"{prompt.id}/{k}", prompt) for prompt in prompts for k in samples]

    def note_rollout(self, done: Sequence[Trajectory], seconds: float) -> None:
        tokens = sum(len(t.token_ids) for t in done)
        self.rollout_metrics = {"rollout_s": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}

    def set_up_task(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Where prompts and rewards come from."""
        self.task = self.spec.build_task(tokenizer)

    def supervised_batch(self, step: int, size: int) -> TokenBatch:
        """The right answers of one warm-up step."""
        examples = self.task.supervised(self.spec.seed, step, size)
        return collate([e.prompt_ids for e in examples], [e.answer_ids for e in examples], self.pad_id)

    def collate(self, trajectories: Sequence[Trajectory]) -> PolicyBatch:
        tokens = collate([t.prompt_ids for t in trajectories], [t.token_ids for t in trajectories], self.pad_id)
        return PolicyBatch(input_ids=tokens["input_ids"], mask=tokens["mask"])

    def minibatches(self, batch: PolicyBatch, step: int, epoch: int) -> list[PolicyBatch]:
        """Equal parts of the batch in an order drawn from the job's seed."""
        count = self.spec.algorithm.minibatches
        if count == 1:
            return [batch]
        source = torch.Generator().manual_seed(stream_seed(self.spec.seed, "minibatches", step, epoch))
        order = torch.randperm(len(batch["input_ids"]), generator=source)
        return [_rows(batch, part) for part in order.tensor_split(count)]

    # ---- parts -----------------------------------------------------------------------------------------------

    def setup(self) -> None:
        spec = self.spec
        self.model_path = spec.model.prepare(self.folder.path / "model", spec.seed)
        tokenizer = load_tokenizer(self.model_path)
        self.pad_id = int(tokenizer.pad_token_id)
        self.set_up_task(tokenizer)
        self.sampling = Sampling(
            max_new_tokens=spec.rollout.max_new_tokens,
            temperature=spec.rollout.temperature,
            top_p=spec.rollout.top_p,
            top_k=spec.rollout.top_k,
            stop_token_ids=(int(tokenizer.eos_token_id),),
        )
        with ThreadPoolExecutor(1) as background:  # replica processes start while the train engine is built
            replicas = background.submit(self._start_replicas)
            self.actor = self._train_engine(ClusterName.ACTOR_TRAIN, self.model_path)
            self.replicas = replicas.result()
        cluster = self.registration.cluster(ClusterName.ACTOR_INFER)
        caches = spec.rollout.executor == "vllm"
        router = Router(len(cluster.bundles), spec.rollout.max_num_seqs, prefix_cache=caches)
        self.bundles = BundleFeed(self.client, cluster.name)
        self.rollouts = RolloutManager(
            cluster, replicas=self.replicas.replicas, router=router, client=self.bundles, folder=self.folder
        )
        self.bundles.feed(self.rollouts)
        self.reference: TrainEngine | None = None

    def initialize(self) -> None:
        self.warm_up()
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            if self.needs_starting_point:
                self.actor.save(self.reference_path)
            self.publish(self.actor.publish(0))
        self.build_others()

    def save(self, path: Path) -> None:
        """Between phases the engines wait in host memory: to save them takes no device, and no place in a queue."""
        self.actor.save_state(path / "state")
        self.actor.save(path / "model")

    def load(self, path: Path, step: int) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.actor.load_state(path / "state")
            self.publish(self.actor.publish(step))
        self.build_others()

    def teardown(self) -> None:
        for part in ("bundles", "rollouts", "replicas", "actor", "reference"):
            if (found := getattr(self, part, None)) is not None:
                found.close()

    def expect_gpu_s(self, left: float) -> None:
        self.rollouts.expect_gpu_s(left)

    @property
    def uses_reference(self) -> bool:
        return self.spec.algorithm.kl_coefficient > 0

    @property
    def reference_path(self) -> Path:
        """The policy as reinforcement learning found it; kept in the run folder so that a resumed run finds it too."""
        return self.folder.path / "reference"

    @property
    def needs_starting_point(self) -> bool:
        """Whether something is built from the policy as it was before reinforcement learning."""
        return self.uses_reference

    def build_others(self) -> None:
        """Build what starts from the policy as reinforcement learning finds it."""
        if self.uses_reference:
            self.reference = self._train_engine(ClusterName.REFERENCE, self.reference_path)

    def _start_replicas(self) -> InferenceEngine:
        cluster = self.registration.cluster(ClusterName.ACTOR_INFER)
        engine = InferenceEngine(str(self.model_path), executor=self.spec.rollout.executor)
        engine.build(
            tensor_parallel_size=cluster.tensor_parallel_size,
            devices=self.devices_of(cluster.devices),
            namespace=self.registration.ray_namespace,
            dtype=self.spec.model.dtype,
            max_num_seqs=self.spec.rollout.max_num_seqs,
            load=False,  # nothing may be on a device before there is a lease for it
        )
        return engine

    def _train_engine(self, name: ClusterName, path: Path) -> TrainEngine:
        return self.build_train_engine(name, policy_on_meta(path), path, self.spec.optimizer)

    def build_train_engine(
        self, name: ClusterName, module: OptimizedModule, path: Path, optimizer: OptimizerSpec
    ) -> TrainEngine:
        """Build on the cluster's devices, under a lease, and leave the bytes in host memory."""
        cluster, dtype = self.registration.cluster(name), self.spec.model.dtype
        with self.phase(name, Phase.INITIALIZATION) as lease:
            engine = TrainEngine(module, executor="fsdp2")
            engine.build(
                tensor_parallel_size=cluster.tensor_parallel_size,
                devices=self.devices_of(lease.devices),
                namespace=self.registration.ray_namespace,
                seed=self.spec.seed,
                dtype=dtype if name is ClusterName.REFERENCE else "float32",
                compute_dtype=dtype,
                weights_path=path,
                lease=self.client.fence(lease),
            )
            self.client.name_holders(name, engine.processes)
            engine.configure_optimizer(optimizer, self.spec.training, self.spec.updates, dtype)
            engine.release(lease.epoch)
        return engine


def _replaced(samples: Samples, flat: Sequence[int], more: Samples, useful: Sequence[int], size: int) -> Samples:
    """`samples` with as many of its groups `flat` replaced as `more` has `useful` ones, each in its place."""
    trajectories, rewards = list(samples.trajectories), list(samples.rewards)
    for old, new in zip(flat, useful, strict=False):
        group = more.groups([new], size)
        trajectories[old * size : (old + 1) * size] = group.trajectories
        rewards[old * size : (old + 1) * size] = group.rewards
    return Samples(trajectories, rewards)


def _both_rounds(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    seconds, tokens = (first[key] + second[key] for key in ("rollout_s", "tokens"))
    return {"rollout_s": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}


def _rows(batch: PolicyBatch, rows: torch.Tensor) -> PolicyBatch:
    return cast(PolicyBatch, {key: cast(torch.Tensor, value)[rows] for key, value in batch.items()})
