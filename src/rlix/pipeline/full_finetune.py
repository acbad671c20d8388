"""Full fine-tuning with group-relative policy optimisation: every weight of one policy is trained."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch

from rlix.engine.inference_engine import InferenceEngine
from rlix.engine.parallel import NeedParallel
from rlix.engine.train_engine import TrainEngine
from rlix.pipeline.algorithms import group_relative_advantages
from rlix.pipeline.base import Pipeline
from rlix.pipeline.batch import collate
from rlix.pipeline.policy import PolicyBatch, policy_on_meta
from rlix.pipeline.rollout import RolloutManager
from rlix.pipeline.router import Router, Sampling, Trajectory
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.tasks import Prompt
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.protocol.messages import Lease
from rlix.protocol.types import ClusterName, Phase

_SLOTS_PER_REPLICA = 64
_CHUNK = 64


class FullFinetunePipeline(Pipeline):
    """Sample groups, reward them, compare within each group, take a clipped policy step, publish the new weights."""

    rollouts: RolloutManager
    rollout_metrics: dict[str, float]

    # ---- the algorithm ---------------------------------------------------------------------------------------

    def step(self, step: int) -> Mapping[str, float]:
        prompts = self.task.prompts(self.spec.seed, step, self.spec.rollout.prompts_per_step)
        trajectories = self.generate(step, prompts)
        rewards = [self.task.reward(p, t.token_ids) for p, t in zip(self.repeat(prompts), trajectories, strict=True)]
        batch = self.collate(trajectories, self.advantages(torch.tensor([r.reward for r in rewards])))
        if self.takes_several_steps:
            batch["old_log_probs"] = self.old_log_probs(batch)
        if self.reference is not None:
            batch["reference_log_probs"] = self.reference_log_probs(batch)
        metrics = self.train(step, batch)
        metrics["reward"] = sum(r.reward for r in rewards) / len(rewards)
        metrics["exact"] = sum(r.exact for r in rewards) / len(rewards)
        return metrics | self.rollout_metrics

    def generate(self, step: int, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """A group of samples for each prompt, next to each other, on whatever devices the scheduler grants."""
        start = time.time()
        self.note_phase("rollout")
        samples = range(self.spec.rollout.samples_per_prompt)
        trajectories = [self.trajectory(f"{prompt.id}/{k}", prompt) for prompt in prompts for k in samples]
        done = self.rollouts.generate(step, trajectories, self.lease_timeout_s, self.stop_requested)
        seconds, tokens = time.time() - start, sum(len(t.token_ids) for t in done)
        self.rollout_metrics = {"rollout_s": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
        return done

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """How much better each sample [prompts * samples] is than the others of its group."""
        group_size, algorithm = self.spec.rollout.samples_per_prompt, self.spec.algorithm
        return group_relative_advantages(rewards, group_size, normalize_by_std=algorithm.normalize_by_std)

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
                    metrics.append(
                        self.actor.policy_step(
                            NeedParallel(part), tokens, algorithm, rollout.temperature, optimizer.max_grad_norm
                        )
                    )
            seconds = time.time() - start
            self.rollouts.publish(self.actor.publish(step + 1))
        return {"train_s": seconds} | {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}

    def warm_up(self) -> None:
        """Supervised steps on right answers, so that reinforcement learning has something to reinforce."""
        warmup = self.spec.warmup
        if warmup is None:
            return
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            for step in range(warmup.steps):
                examples = self.task.supervised(self.spec.seed, step, warmup.batch_size)
                batch = collate([e.prompt_ids for e in examples], [e.answer_ids for e in examples], self.pad_id)
                self.actor.supervised_step(
                    NeedParallel(batch),
                    float(batch["mask"].sum()),
                    warmup.learning_rate,
                    self.spec.optimizer.max_grad_norm,
                )
            self.actor.finish_warmup()

    # ---- data ------------------------------------------------------------------------------------------------

    @property
    def takes_several_steps(self) -> bool:
        """After the first optimizer step the policy is no longer the one that sampled: its log-probs are kept."""
        return self.spec.algorithm.epochs * self.spec.algorithm.minibatches > 1

    def repeat(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts for _ in range(self.spec.rollout.samples_per_prompt)]

    def trajectory(self, id: str, prompt: Prompt) -> Trajectory:
        return Trajectory(id, prompt.prompt_ids, stream_seed(self.spec.seed, id), self.sampling)

    def collate(self, trajectories: Sequence[Trajectory], advantages: torch.Tensor) -> PolicyBatch:
        tokens = collate([t.prompt_ids for t in trajectories], [t.token_ids for t in trajectories], self.pad_id)
        return PolicyBatch(input_ids=tokens["input_ids"], mask=tokens["mask"], advantages=advantages)

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
        self.task = spec.build_task(tokenizer)
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
        router = Router(len(cluster.bundles), _SLOTS_PER_REPLICA, _CHUNK)
        self.rollouts = RolloutManager(
            cluster, replicas=self.replicas.replicas, router=router, client=self.client, folder=self.folder
        )
        self.reference: TrainEngine | None = None

    def initialize(self) -> None:
        self.warm_up()
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            if self.uses_reference:
                self.actor.save(self.reference_path)
            self.rollouts.publish(self.actor.publish(0))
        self._build_reference()

    def save(self, path: Path) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.actor.save_state(path / "state")
            self.actor.save(path / "model")

    def load(self, path: Path, step: int) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.actor.load_state(path / "state")
            self.rollouts.publish(self.actor.publish(step))
        self._build_reference()

    def teardown(self) -> None:
        for part in ("rollouts", "replicas", "actor", "reference"):
            if (found := getattr(self, part, None)) is not None:
                found.close()

    def grow_rollout(self, leases: tuple[Lease, ...]) -> None:
        self.rollouts.grow(leases)

    def shrink_rollout(self, leases: tuple[Lease, ...], deadline_s: float) -> None:
        self.rollouts.shrink(leases, deadline_s)

    def bundles_lost(self, leases: tuple[Lease, ...]) -> None:
        self.rollouts.lost(leases)

    @property
    def uses_reference(self) -> bool:
        return self.spec.algorithm.kl_coefficient > 0

    @property
    def reference_path(self) -> Path:
        """The policy as reinforcement learning found it; kept in the run folder so that a resumed run finds it too."""
        return self.folder.path / "reference"

    def _build_reference(self) -> None:
        if self.uses_reference:
            self.reference = self._train_engine(ClusterName.REFERENCE, self.reference_path)

    def _start_replicas(self) -> InferenceEngine:
        cluster = self.registration.cluster(ClusterName.ACTOR_INFER)
        engine = InferenceEngine(str(self.model_path), executor=self.spec.rollout.executor)
        engine.build(
            tensor_parallel_size=cluster.tensor_parallel_size,
            devices=tuple(self.devices[i] for i in cluster.devices),
            namespace=self.registration.ray_namespace,
        )
        return engine

    def _train_engine(self, name: ClusterName, path: Path) -> TrainEngine:
        """Build on the cluster's devices, under a lease, and leave the bytes in host memory."""
        cluster = self.registration.cluster(name)
        with self.phase(name, Phase.INITIALIZATION) as lease:
            engine = TrainEngine(policy_on_meta(path), executor="fsdp2")
            engine.build(
                tensor_parallel_size=cluster.tensor_parallel_size,
                devices=tuple(self.devices[i] for i in cluster.devices),
                namespace=self.registration.ray_namespace,
                seed=self.spec.seed,
                dtype=self.spec.model.dtype,
                weights_path=path,
            )
            engine.acquire(lease.epoch)
            engine.configure_optimizer(self.spec.optimizer)
            engine.release(lease.epoch)
        return engine


def _rows(batch: PolicyBatch, rows: torch.Tensor) -> PolicyBatch:
    return cast(PolicyBatch, {key: cast(torch.Tensor, value)[rows] for key, value in batch.items()})
