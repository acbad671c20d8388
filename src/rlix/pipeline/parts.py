"""Parts of a flow that have engines: a policy's answers, its log-probs before it learnt, and its training.

    policy = Policy(model={"path": "Qwen/Qwen2.5-0.5B-Instruct"}, rollout={"max_new_tokens": 256})

    class Judge(FlowWorker):
        def run(self, answered):
            return [one.rewarded(score(text) for text in one.texts) for one in answered]

    flow = Flow("grpo", [Generate(policy), Judge, Train(policy)])

An item is a prompt, and then what was answered it: a group of samples, with rewards once somebody has judged them.
"""

import shutil
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from torch import Tensor

from rlix.control.client import JobClient
from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights.publication import PublishedWeights
from rlix.flow.parts.local import LocalWorker
from rlix.flow.programs.wiring import Part
from rlix.node.run_folder import RunFolder
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.ends import Ends
from rlix.pipeline.models import prepare_model
from rlix.pipeline.policy import score, update
from rlix.pipeline.requests.whole import STATE, published
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.rollout.shared import SharedRollout
from rlix.pipeline.samples import Sample, Samples, Turn, measured
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.sources.base import ended
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.sources.surroundings import sampling_of
from rlix.pipeline.sources.tasks.base import Prompt
from rlix.pipeline.spec.executor import build_arguments
from rlix.pipeline.spec.named import shipped_or_own
from rlix.pipeline.spec.sections import Sections
from rlix.pipeline.tokenizer import load_tokenizer, read
from rlix.pipeline.training.metrics import mean_metrics
from rlix.pipeline.training.policy import policy_on_meta
from rlix.pipeline.training.updates import updates
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Cluster, Process
from rlix.protocol.types import Phase
from rlix.workers.scratch import Scratch


class Policy:
    """A model that parts share. Who trains it publishes, and who generates with it loads what was published last.

    `sections` are those of a job spec that say what is trained and how: `model`, `rollout`, `algorithm`, `optimizer`,
    `training`, `seed`, and `steps`, over which a learning rate falls. Or a whole `spec`, of which the rest is not read.

    Raises:
        SpecError: they do not fit, or the algorithm needs a critic or a teacher.
    """

    def __init__(self, spec: Sections | None = None, **sections: Any) -> None:
        try:
            self.spec = spec or Sections.model_validate({"name": "policy", "steps": 1, **sections})
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise SpecError(f"Policy: {found}") from None
        needs = build_algorithm(self.spec.algorithm, self.spec.rollout.max_new_tokens)
        self.needs = needs.needs(needs.options)
        if self.needs.critic is not None or self.needs.teacher is not None:
            raise SpecError(f"Policy: no part of a flow is the critic or teacher that {self.spec.algorithm.name} needs")
        self.version = 0
        self.published: PublishedWeights | None = None
        self._scratch = Scratch("policy")
        weakref.finalize(self, self._scratch.cleanup)

    def begin(self) -> None:
        """It is as its folder has it: nobody has trained it."""
        self.version, self.published = 0, None

    @property
    def weights(self) -> PublishedWeights:
        """What was published last; by nobody so far: its folder's."""
        if self.published is None:
            self.published = published(self.folder, self.folder, self.version, self.spec.model.dtype)
        return self.published

    @cached_property
    def folder(self) -> Path:
        """Of the model, on this machine."""
        return prepare_model(self.spec.model, Path(self._scratch.name) / "model", self.spec.seed)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)

    @cached_property
    def ends(self) -> Ends:
        rollout = self.spec.rollout
        return Ends(self.tokenizer, self.folder, rollout.stop, rollout.stop_token_ids)

    def kept(self) -> Path:
        """A folder for a state, in which nothing is yet."""
        return Path(self._scratch.name) / f"state-{time.monotonic_ns()}"


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and what the policy answered it: sample `i` says `texts[i]`.

    `reference`: log-probs of their tokens under the policy as it was at first, [samples, length - 1].
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    texts: tuple[str, ...]
    reference: Tensor | None = None

    def rewarded(self, rewards: Iterable[float | Reward]) -> Self:
        """The same with a reward for each sample; a plain number of at least 1.0 counts as exactly right."""
        given = [one if isinstance(one, Reward) else Reward(float(one), float(one) >= 1.0) for one in rewards]
        samples = tuple(
            replace(sample, reward=one.reward, exact=one.exact, parts=one.parts)
            for sample, one in zip(self.samples, given, strict=True)
        )
        return replace(self, samples=samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(sample.reward for sample in self.samples)


def Generate(policy: Policy, name: str = "generate", **how: Any) -> Part:  # noqa: N802 (a part, as `Part` is)
    """The policy's answers to prompts (text, or a task's `Prompt`): `rollout.samples_per_prompt` of each.

    `how`: of `Part`. `unit` is the replicas' tensor parallelism.
    """
    return Part(name, _Generate, kwargs={"policy": policy, "unit": how.get("unit", 1)}, **how)


def Score(policy: Policy, name: str = "score", **how: Any) -> Part:  # noqa: N802
    """Log-probs of what was answered under the policy as it was at first, which a `kl_coefficient` compares with."""
    return Part(name, _Score, kwargs={"policy": policy}, chunk=None, **how)


def Train(policy: Policy, name: str = "train", **how: Any) -> Part:  # noqa: N802
    """The optimizer steps that the policy takes on a step's samples, as a job's do; then it is published.

    What it makes is what it got. It logs its metrics, and those of the samples.
    """
    return Part(name, _Train, kwargs={"policy": policy}, chunk=None, **how)


class _Engine(LocalWorker):
    """A part whose engine is `engine`, once it is there."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.engine: Any = None
        self._processes: Mapping[int, Process] = {}

    @property
    def processes(self) -> Mapping[int, Process]:
        return self._processes

    def _name(self, processes: Mapping[int, Process]) -> None:
        self._processes = processes
        self.named()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class _Generate(_Engine):
    # Where it does not share: of what a gang may ask for the last.
    phase = Phase.VALUE_COMPUTE
    elastic = True

    def __init__(self, policy: Policy, unit: int) -> None:
        super().__init__(policy)
        self._unit = unit
        self._rollout: SharedRollout | None = None
        self._given: PublishedWeights | None = None  # what the engine came with; None: its folder's
        self._step = self._count = 0  # prompts of this step that were texts

    def begin(self) -> None:
        spec = self.policy.spec
        self.engine = InferenceEngine(str(self.policy.folder), shipped_or_own(spec.rollout.executor))
        self.engine.build(
            tensor_parallel_size=self._unit,
            devices=self.devices,
            dtype=spec.model.dtype,
            max_num_seqs=spec.rollout.max_num_seqs,
            declared=spec.speed,
            **build_arguments(spec.rollout.executor, spec.rollout.executor_options),
            load=False,  # nothing may be on a device before there is a lease for it
        )
        self._name(self.engine.processes)

    def share(self, client: JobClient, cluster: Cluster, folder: RunFolder) -> SharedRollout:
        slots = self.policy.spec.rollout.max_num_seqs
        self._rollout = SharedRollout(self.engine, cluster, client, slots, folder)
        return self._rollout

    @property
    def processes(self) -> Mapping[int, Process]:
        return self.engine.processes  # of replicas, others may have taken the place of some

    def clock(self) -> float:
        return super().clock() if self._rollout is None else self._rollout.devices_s

    def step_begins(self, number: int) -> None:
        self._step, self._count = number, 0

    def onload(self) -> None:
        if self._rollout is None:
            self._given = self.policy.published
            self.engine.acquire(self.lease, self._given)
        else:
            self._rollout.publish(self.policy.weights)

    def offload(self) -> None:
        if self._rollout is None:
            self.engine.release(self.lease)

    def close(self) -> None:
        if self._rollout is None:
            super().close()
        else:
            self._rollout.close()

    def memory(self) -> tuple[float, float]:
        held = max(report.device_bytes for report in self.engine.replicas.run("report", timeout_s=60.0))
        return held, held

    def run(self, items: Sequence[Any]) -> list[Answered]:
        policy, rollout = self.policy, self.policy.spec.rollout
        sampling = sampling_of(rollout, policy.ends)
        prompts, made = [self._prompt(item) for item in items], list[Answered]()
        ids = [f"{prompt.id}/{number}" for prompt in prompts for number in range(rollout.samples_per_prompt)]
        every = [prompt for prompt in prompts for _ in range(rollout.samples_per_prompt)]
        asked = [
            Trajectory(id, prompt.prompt_ids, stream_seed(policy.spec.seed, id), sampling)
            for id, prompt in zip(ids, every, strict=True)
        ]
        answers = self._answers(asked)
        for number, prompt in enumerate(prompts):
            begin = number * rollout.samples_per_prompt
            samples = tuple(answers[begin : begin + rollout.samples_per_prompt])
            said = [list(sample.turns[0].answer.token_ids) for sample in samples]
            texts = tuple(policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in said)
            made.append(Answered(prompt, samples, texts))
        return made

    def _answers(self, asked: Sequence[Trajectory]) -> list[Sample]:
        if self._rollout is None:
            self._generate(asked)
        else:
            self._rollout.generate(self._step, asked)
        samples = []
        for one in asked:
            answer, end = ended(one, self.policy.ends)
            samples.append(Sample(one.id, (Turn(one.prompt_ids, answer),), 0.0, None, end))
        return samples

    def _generate(self, asked: Sequence[Trajectory]) -> None:
        if self.policy.published is not self._given:  # it has stayed on its devices meanwhile
            self._given = self.policy.weights
            self.engine.update_weights(self._given)
        params = [{**asdict(one.sampling), "seed": one.seed} for one in asked]
        prompts = [list(one.prompt_ids) for one in asked]
        found = self.engine.generate(prompts, params, request_ids=[one.id for one in asked])
        for one, output in zip(asked, found, strict=True):
            (said,) = output.outputs
            one.token_ids, one.logprobs = list(said.token_ids), list(said.logprobs)
            one.versions, one.finish_reason = [self.policy.version] * len(said.token_ids), said.finish_reason

    def _prompt(self, item: Any) -> Prompt:
        """A text gets its name from the flow's step, and its place there."""
        if isinstance(item, Prompt):
            return item
        if not isinstance(item, str):
            raise SpecError(f"Generate: an item is a prompt's text, or a task's Prompt, not {type(item).__name__}")
        self._count += 1
        ids = read(self.policy.tokenizer, item, special=True)
        return Prompt(f"{self._step}/{self._count - 1}", item, ids, "", ())


class _TrainEngine(_Engine):
    frozen = False

    def onload(self) -> None:
        if self.engine is not None:
            self.engine.cuda() if self.lease is None else self.engine.acquire(self.lease)
            return
        spec = self.policy.spec
        engine = TrainEngine(policy_on_meta(self.policy.folder), shipped_or_own(spec.training.executor))
        engine.build(
            shard=len(self.devices),
            devices=self.devices,
            seed=spec.seed,
            dtype=spec.model.dtype if self.frozen else "float32",
            compute_dtype=spec.model.dtype,
            weights_path=self.policy.folder,
            lease=self.lease,
            name_holders=self._name,
            build_timeout_s=spec.training.start_timeout_s,
            call_timeout_s=spec.training.timeout_s,
        )
        self.engine = engine
        engine.configure_optimizer(spec.optimizer, spec.training, spec.updates, spec.model.dtype)
        engine.declare_speed(spec.speed)

    def offload(self) -> None:
        self.engine.cpu() if self.lease is None else self.engine.release(self.lease.epoch)

    def memory(self) -> tuple[float, float]:
        held = max(status.device_bytes for status in self.engine.status())
        return held, held

    @cached_property
    def algorithm(self) -> Any:
        return build_algorithm(self.policy.spec.algorithm, self.policy.spec.rollout.max_new_tokens)

    def _samples(self, answered: Sequence[Answered]) -> Samples:
        samples = [sample for one in answered for sample in one.samples]
        curves = measured(samples, {"tokens": float(sum(sample.generated for sample in samples))})
        return Samples(samples, self.policy.spec.rollout.samples_per_prompt, curves, learner=self.policy.version)


class _Score(_TrainEngine):
    phase = Phase.REFERENCE_LOG_PROBS
    frozen = True

    def run(self, answered: Sequence[Answered]) -> list[Answered]:
        batch, _ = self.algorithm.begin(self._samples(answered), int(self.policy.tokenizer.pad_token_id))
        rows = score(self.engine, batch, self.policy.spec.rollout.temperature)
        each = rows.split(self.policy.spec.rollout.samples_per_prompt)
        return [replace(one, reference=mine) for one, mine in zip(answered, each, strict=True)]


class _Train(_TrainEngine):
    phase = Phase.ACTOR_TRAINING

    def begin(self) -> None:
        self.policy.begin()
        self._saved: _Saved | None = None

    def onload(self) -> None:
        super().onload()
        if self._saved is not None:
            self.engine.load_state(self._saved.folder / STATE)
            self.policy.published = self.engine.publish(self.policy.version)
            self._saved = None

    def run(self, answered: Sequence[Answered]) -> list[Answered]:
        policy, spec = self.policy, self.policy.spec
        if self.measured:
            policy.begin()
        samples = self._samples(answered)
        batch, needs = self.algorithm.begin(samples, int(policy.tokenizer.pad_token_id))
        if spec.rollout.not_as_the_policy_says:
            del batch["sampled_log_probs"]
        if needs.old_log_probs:
            batch["old_log_probs"] = score(self.engine, batch, spec.rollout.temperature)
        if needs.reference:
            given = [one.reference for one in answered if one.reference is not None]
            if len(given) < len(answered):
                raise SpecError(f"Train: {spec.algorithm.name} compares with a reference here: put Score before it")
            batch["reference_log_probs"] = torch.cat(given)
        metrics = self.algorithm.prepare(samples, batch)
        found = updates(batch, self.algorithm, spec.algorithm, spec.seed, policy.version, self._update)
        self.log(**{**metrics, **mean_metrics(found), **samples.metrics()})
        policy.version += 1
        policy.published = self.engine.publish(policy.version)
        return list(answered)

    def _update(self, part: PolicyBatch, denominator: float) -> dict[str, float]:
        return update(self.engine, self.policy.spec, part, denominator, self.algorithm)

    def save(self) -> "_Saved | None":
        if self.engine is None:
            return self._saved
        saved = _Saved(self.policy.kept(), self.policy.version)
        weakref.finalize(saved, shutil.rmtree, saved.folder, ignore_errors=True)
        self.engine.save(saved.folder)
        self.engine.save_state(saved.folder / STATE)
        return saved

    def restore(self, state: "_Saved | None") -> None:
        self._saved = state
        if state is not None:
            policy = self.policy
            policy.version = state.version
            # Whoever answers before this is on its devices again does so with these weights, too.
            policy.published = published(state.folder, policy.folder, state.version, policy.spec.model.dtype)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Saved:
    """The model as transformers loads it, and in `STATE` what training goes on from; gone with its last user."""

    folder: Path
    version: int
