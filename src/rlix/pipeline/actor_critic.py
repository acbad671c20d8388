"""Proximal policy optimisation with a critic: a value for every token instead of a comparison within groups."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from rlix.engine.parallel import NeedParallel
from rlix.engine.train.engine import TrainEngine
from rlix.pipeline.algorithms import gae, rewards_at_end, whiten
from rlix.pipeline.batch import TokenBatch
from rlix.pipeline.critic import CriticBatch, critic_on_meta
from rlix.pipeline.full_finetune import FullFinetunePipeline
from rlix.pipeline.policy import PolicyBatch
from rlix.pipeline.spec.training import CriticSpec
from rlix.pipeline.training.metrics import mean_metrics
from rlix.protocol.types import ClusterName, Phase


class ActorCriticPipeline(FullFinetunePipeline):
    """Sample, reward, estimate values, train the critic towards the returns and the policy by the advantages.

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, with generalised advantage estimation and, when the job has a
    reference model, a per-token KL penalty in the reward (Ouyang et al. 2022, arXiv:2203.02155).
    """

    critic: TrainEngine

    def step(self, step: int) -> Mapping[str, float]:
        samples = self.sample(step)
        batch = self.collate(samples.trajectories)
        batch["old_log_probs"] = self.old_log_probs(batch)
        if self.reference is not None:
            batch["reference_log_probs"] = self.reference_log_probs(batch)
        values = self.values(batch)
        advantages, returns = self.estimate(self.shaped(samples), values, batch)
        batch["advantages"] = whiten(advantages, batch["mask"])
        critic_batch = CriticBatch(input_ids=batch["input_ids"], mask=batch["mask"], old_values=values, returns=returns)
        metrics = self.train_critic(step, critic_batch) | self.train(step, batch)
        return metrics | samples.metrics() | self.rollout_metrics

    def values(self, batch: PolicyBatch) -> torch.Tensor:
        """The critic's estimate before each token: [.., length - 1]."""
        with self.phase(ClusterName.CRITIC, Phase.VALUE_COMPUTE, self.critic):
            return cast(
                torch.Tensor,
                self.critic.values(NeedParallel(TokenBatch(input_ids=batch["input_ids"], mask=batch["mask"]))),
            )

    def estimate(
        self, rewards: torch.Tensor, values: torch.Tensor, batch: PolicyBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns, each [.., length - 1], of `rewards` [..]."""
        algorithm, mask = self.spec.algorithm, batch["mask"]
        per_token = rewards_at_end(rewards, mask, self.kl(batch), algorithm.kl_coefficient)
        return gae(per_token, values, mask, discount=algorithm.discount, smoothing=algorithm.smoothing)

    def train_critic(self, step: int, batch: CriticBatch) -> dict[str, float]:
        """As many optimizer steps as the policy takes, over the same minibatches."""
        algorithm, critic = self.spec.algorithm, self.critic_spec
        metrics: list[dict[str, float]] = []
        with self.phase(ClusterName.CRITIC, Phase.CRITIC_TRAINING, self.critic):
            start = time.time()
            for epoch in range(algorithm.epochs):
                for part in self.minibatches(cast(PolicyBatch, batch), step, epoch):
                    tokens, norm = float(part["mask"].sum()), self.spec.optimizer.max_grad_norm
                    if not tokens:
                        continue
                    metrics.append(
                        self.critic.critic_step(NeedParallel(part), tokens, critic.clip, algorithm.aggregation, norm)
                    )
            seconds = time.time() - start
        return {"critic_train_s": seconds} | mean_metrics(metrics)

    # ---- parts -----------------------------------------------------------------------------------------------

    @property
    def critic_spec(self) -> CriticSpec:
        return self.spec.critic or CriticSpec()

    @property
    def needs_starting_point(self) -> bool:
        return True  # the critic starts from it

    def build_others(self) -> None:
        super().build_others()
        optimizer = self.spec.optimizer.model_copy(update={"learning_rate": self.critic_spec.learning_rate})
        module = critic_on_meta(self.reference_path)
        self.critic = self.build_train_engine(ClusterName.CRITIC, module, self.reference_path, optimizer)

    def save(self, path: Path) -> None:
        super().save(path)
        self.critic.save_state(path / "critic")

    def load(self, path: Path, step: int) -> None:
        super().load(path, step)
        with self.phase(ClusterName.CRITIC, Phase.CRITIC_TRAINING, self.critic):
            self.critic.load_state(path / "critic")

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "critic"):
            self.critic.close()
