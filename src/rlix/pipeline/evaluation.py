"""What the policy does on held-out prompts, on the same elastic rollout and without a trace in what is learnt."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import comb

from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import Sample, Samples, mean
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import Generator, Surroundings
from rlix.pipeline.sources.choice import build_source
from rlix.pipeline.sources.place import EVALUATION
from rlix.pipeline.spec.evaluation import EvaluationSetSpec
from rlix.pipeline.spec.source import SourceSpec
from rlix.protocol.messages import Demand

logger = logging.getLogger(__name__)


class Evaluation:
    """The same prompts every time, from random streams that nothing else draws from: whether, when and how often a job
    is evaluated changes nothing of what it samples and learns.

    Args:
        source: the job's own, for an evaluation that names none.
        around: what the job's own source knows.
        name: of the set, where there are several.

    Raises:
        SpecError: as `build_source`.
    """

    def __init__(self, spec: EvaluationSetSpec, source: SourceSpec, around: Surroundings, name: str = "") -> None:
        self._generator = _Aside(around.generator, name)
        sampling = replace(
            around.sampling,
            max_new_tokens=spec.max_new_tokens or around.sampling.max_new_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
        )
        held_out = replace(
            around,
            seed=stream_seed(around.seed, "evaluation", *filter(None, [name])),
            groups=spec.prompts,
            spare=0,
            group_size=spec.samples_per_prompt,
            sampling=sampling,
            generator=lambda: self._generator,
            split=EVALUATION,
            resample_rounds=0,
        )
        self._source = build_source(spec.held_out(source), held_out)
        different = self._source.different
        self._groups = spec.prompts if different is None else min(spec.prompts, different)
        if self._groups < spec.prompts:
            logger.info("evaluation: there are %d prompts, not %d; each is asked once", self._groups, spec.prompts)

    def run(self, step: int) -> Samples:
        """With the weights that rollouts have after `step` steps.

        Raises:
            WaitTimeoutError, InterruptedError: as `Source.finish`.
        """
        self._generator.step = step
        return self._source.finish(self._source.begin(0, self._groups))

    def close(self) -> None:
        self._source.close()


def evaluation_metrics(samples: Samples, name: str = "") -> dict[str, float]:
    """The curves of the samples, and, of several per prompt, means over the prompts: of the best one, of pass@k, the
    chance that one of `k` is right, and of maj@k, whether what most of all `k` say is right. `name`: of the set."""
    found = dict(samples.metrics())
    size = samples.group_size
    if size > 1:
        kept = [[s for s in samples.samples[i : i + size] if s.counts] for i in range(0, len(samples), size)]
        found["reward_best"] = mean([max(s.reward for s in group) for group in kept if group])
        if "exact" in found:
            for k in sorted({size, *(2**i for i in range(size.bit_length()) if 2**i <= size)}):
                right = [(len(group), sum(bool(s.exact) for s in group)) for group in kept if len(group) >= k]
                found[f"pass@{k}"] = mean([pass_at(k, *counts) for counts in right])
        if any(sample.answer is not None for sample in samples.samples):
            found[f"maj@{size}"] = mean([majority(group) for group in kept if group])
    prefix = f"eval/{name}/" if name else "eval/"
    return {f"{prefix}{key}": value for key, value in found.items()}


def pass_at(k: int, samples: int, right: int) -> float:
    """The chance that one of `k` drawn from these samples is right.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority(group: Sequence[Sample]) -> float:
    """Whether the answer that most samples of a prompt give is right; where several are given as often, the share of
    these that is. Who gives none has no vote.

    Source: Wang et al. 2022, arXiv:2203.11171, section 2 (the unweighted sum).
    """
    votes = Counter(sample.answer for sample in group if sample.answer is not None)
    right = {sample.answer for sample in group if sample.exact}
    most = [answer for answer, count in votes.items() if count == max(votes.values())]
    return mean([float(answer in right) for answer in most])


class _Aside:
    """The job's generator, for a purpose of its own: the next step's trajectories may be in flight beside these, and
    nothing that becomes of these is to be felt there."""

    def __init__(self, generator: Callable[[], Generator], name: str) -> None:
        self._generator, self._name = generator, name
        self.step = 0

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        return self._generator().submit(self.step, [self._own(t) for t in trajectories])

    @property
    def devices_s(self) -> float:
        return self._generator().devices_s

    def expect(self, demand: Demand, purpose: str = "") -> None:
        self._generator().expect(demand, EVALUATION)

    def abandon(self, reason: Exception, purpose: str | None = "") -> None:
        self._generator().abandon(reason, EVALUATION)

    def _own(self, trajectory: Trajectory) -> Trajectory:
        """With the step in its id: of one that was given up a replica may still work on some."""
        ids = "/".join(filter(None, [EVALUATION, str(self.step), self._name, trajectory.id]))
        return replace(trajectory, id=ids, purpose=EVALUATION)
