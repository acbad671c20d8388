"""What a model learns before reinforcement learning: right answers, so that there is something to reinforce."""

from dataclasses import replace

from rlix.engine.train.engine import TrainEngine
from rlix.pipeline.base import Pipeline
from rlix.pipeline.batch import collate, over_ranks
from rlix.pipeline.sources.base import Source, Surroundings
from rlix.pipeline.sources.choice import build_source
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.source import SourceSpec
from rlix.protocol.types import ClusterName, Phase


def conversations_of(spec: JobSpec, around: Surroundings) -> Source | None:
    """What a warm-up learns from, where that is no part of the job's source."""
    if spec.warmup is None or spec.warmup.conversations is None:
        return None
    given = SourceSpec(conversations=spec.warmup.conversations, chat=spec.source.chat)
    return build_source(given, replace(around, group_size=1))


def warm_up(job: Pipeline, policy: TrainEngine, source: Source) -> None:
    """Supervised steps, if the job has a warm-up, with an optimizer of their own."""
    warmup = job.spec.warmup
    if warmup is None:
        return
    pad_id = int(source.around.tokenizer.pad_token_id)
    with job.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, policy):
        for step in range(warmup.steps):
            batch = collate(source.supervised(step, warmup.batch_size), pad_id)
            tokens, norm = float(batch["mask"].sum()), job.spec.optimizer.max_grad_norm
            policy.supervised_step(over_ranks(batch), tokens, warmup.learning_rate, norm)
        policy.finish_warmup()
