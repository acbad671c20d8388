"""What sources know of a job, from what it says."""

import threading
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig

from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Sampling
from rlix.pipeline.sources.base import Generator, Surroundings
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.sections import RolloutSpec
from rlix.pipeline.tokenizer import load_tokenizer


def sampling_of(rollout: RolloutSpec, ends: Ends) -> Sampling:
    """How answers are drawn that are learnt from."""
    return Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, ends.token_ids)


def surroundings(
    spec: JobSpec, name: str, model: Path, stop: threading.Event, generator: Callable[[], Generator]
) -> Surroundings:
    """Of the job's own source. `name`: which no other job, or part of one, has. `model`: its folder."""
    tokenizer, rollout = load_tokenizer(model), spec.rollout
    ends = Ends(tokenizer, model, rollout.stop, rollout.stop_token_ids)
    return Surroundings(
        job=name,
        seed=spec.seed,
        groups=rollout.prompts_per_step + rollout.spare_prompts,
        spare=rollout.spare_prompts,
        group_size=rollout.samples_per_prompt,
        sampling=sampling_of(rollout, ends),
        context=rollout.longest(int(AutoConfig.from_pretrained(model).max_position_embeddings)),
        tokenizer=tokenizer,
        ends=ends,
        timeout_s=rollout.timeout_s,
        stop=stop,
        generator=generator,
        steps=spec.steps,
        resample_rounds=spec.algorithm.rounds,
    )
