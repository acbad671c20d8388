"""What one step learns from: samples of one turn or many, and the rewards they got."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import sqrt

from torch import Tensor, tensor, zeros


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy generated in one turn; the three have the same length. `cut_off`: for its length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy read and what it answered. `reward`: what it got there and then, a part of its sample's."""

    observation_ids: tuple[int, ...]
    answer: Answer
    reward: float = 0.0


class End(StrEnum):
    DONE = "done"  # the policy said so, or its environment
    TURNS = "turns"  # no turn was left
    LENGTH = "length"  # no room was left
    FAILED = "failed"  # the environment failed


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory. `counts`: whether it is learnt from and compared with; `error`: why it may not be; `abandoned`:
    how many answers the policy gave for it that are no part of it; `exact`: whether it is right, None: nobody said;
    `parts`: the rewards that its own is the weighted sum of, by name, where there are several; `answer`: what was
    judged, in one spelling; `table`: that its prompt is from, by name, where there are several."""

    id: str
    turns: tuple[Turn, ...]
    reward: float
    exact: bool | None
    end: End
    counts: bool = True
    error: str | None = None
    abandoned: int = 0
    parts: tuple[tuple[str, float], ...] = ()
    answer: str | None = None
    table: str = ""

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was read and what was answered, in the order in which it came."""
        return tuple(id for turn in self.turns for id in turn.observation_ids + turn.answer.token_ids)

    @property
    def from_policy(self) -> tuple[bool, ...]:
        """For each of `token_ids`: whether the policy generated it."""
        return tuple(
            by_policy
            for turn in self.turns
            for by_policy, ids in ((False, turn.observation_ids), (True, turn.answer.token_ids))
            for _ in ids
        )

    @property
    def generated(self) -> int:
        return sum(len(turn.answer.token_ids) for turn in self.turns)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of each token that the policy generated, under the policy that did."""
        return tuple(logprob for turn in self.turns for logprob in turn.answer.logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the weights that generated each token."""
        return tuple(version for turn in self.turns for version in turn.answer.versions)


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step, those of one prompt or task (a group) next to each other.

    `curves` are metrics of all that was sampled, also of what was replaced since: a reward curve must not show what a
    filter prefers. `stale` names, by a sample's id, which of its tokens count as if the policy that trains had made
    them. `learner`: the version of the weights that learn from them.
    """

    samples: Sequence[Sample]
    group_size: int
    curves: Mapping[str, float] = field(default_factory=dict)
    stale: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    learner: int | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def rewards(self) -> Tensor:
        """[samples], float32."""
        return tensor([sample.reward for sample in self.samples])

    @property
    def parts(self) -> dict[str, Tensor]:
        """Each reward of several by name, before weights: [samples], float32; 0 of who has none."""
        given = [dict(sample.parts) for sample in self.samples]
        return {name: tensor([of_one.get(name, 0.0) for of_one in given]) for name in dict.fromkeys(chain(*given))}

    @property
    def turn_rewards(self) -> Tensor:
        """What each turn was paid, and at the last one what is left of the sample's reward: [samples, most turns]."""
        most = max((len(sample.turns) for sample in self.samples), default=0)
        paid = zeros(len(self.samples), most)
        for row, sample in zip(paid, self.samples, strict=True):
            for number, turn in enumerate(sample.turns):
                row[number] = turn.reward
            if sample.turns:
                row[len(sample.turns) - 1] += sample.reward - sum(turn.reward for turn in sample.turns)
        return paid

    @property
    def counts(self) -> Tensor:
        """[samples], bool."""
        return tensor([sample.counts for sample in self.samples])

    @property
    def off_policy(self) -> bool:
        """Whether a token that counts was generated by other weights than those that learn from it."""
        return any(age for of_one in self._ages() for age in of_one)

    def _ages(self) -> list[list[int]]:
        """Of the tokens of each sample that counts, in steps: how much older than the learner their weights are."""
        if self.learner is None:
            return []
        return [[self.learner - version for version in s.versions] for s in self.samples if s.counts]

    def groups(self, chosen: Iterable[int]) -> list[Sample]:
        """The samples of the groups with these numbers."""
        return [self.samples[group * self.group_size + k] for group in chosen for k in range(self.group_size)]

    def metrics(self) -> dict[str, float]:
        """The curves, how far rewards differ within groups, how old what is learnt from is, and `trajectories_digest`:
        equal exactly when two runs learnt from the same samples."""
        identity = {
            **self._spread(),
            **self._staleness(),
            "trajectories": float(len(self.samples)),
            "trajectories_digest": float(digest((s.id, s.token_ids, s.end) for s in self.samples)),
        }
        return {**self.curves, **identity}

    def _staleness(self) -> dict[str, float]:
        """Of tokens in steps, mean and oldest; `mixed` counts the samples with tokens of several versions."""
        if self.learner is None:
            return {}
        ages = self._ages()
        every = [float(age) for of_one in ages for age in of_one]
        mixed = float(sum(len(set(of_one)) > 1 for of_one in ages))
        return {"staleness": mean(every), "staleness_max": max(every, default=0.0), "mixed": mixed}

    def _spread(self) -> dict[str, float]:
        """`reward_std` is a mean over the groups; `groups_flat` the share of those that have nothing to compare."""
        if self.group_size < 2:
            return {}
        size, every = self.group_size, range(0, len(self.samples), self.group_size)
        deviations = [_deviation([s.reward for s in self.samples[i : i + size] if s.counts]) for i in every]
        return {"reward_std": mean(deviations), "groups_flat": mean([float(d == 0) for d in deviations])}


def _deviation(values: Sequence[float]) -> float:
    """As of the whole population; exactly 0 where all are equal."""
    middle = mean(values)
    return 0.0 if len(set(values)) < 2 else sqrt(mean([(value - middle) ** 2 for value in values]))


def measured(samples: Sequence[Sample], more: Mapping[str, float]) -> dict[str, float]:
    """Means over the samples that count, of all their lengths (in tokens that the policy
    generated, and in all), and `more`. `exact` is the share of those of which somebody said whether they are right."""
    return {
        **_outcome(samples),
        "length": mean([float(sample.generated) for sample in samples]),
        "length_max": float(max((sample.generated for sample in samples), default=0)),
        "context": mean([float(len(sample.token_ids)) for sample in samples]),
        "truncated": mean([float(sample.end is End.LENGTH) for sample in samples]),
        **more,
    }


def by_table(samples: Sequence[Sample]) -> dict[str, float]:
    """`data/<name>/reward` and `exact` of the samples of each table, where there are several."""
    names = dict.fromkeys(sample.table for sample in samples if sample.table)
    found = {name: _outcome([sample for sample in samples if sample.table == name]) for name in names}
    return {f"data/{name}/{key}": value for name, of_one in found.items() for key, value in of_one.items()}


def _outcome(samples: Sequence[Sample]) -> dict[str, float]:
    kept = [sample for sample in samples if sample.counts]
    said = [float(sample.exact) for sample in kept if sample.exact is not None]
    return {"reward": mean([sample.reward for sample in kept]), **({"exact": mean(said)} if said or not kept else {})}


def per_s(count: int, seconds: float) -> float:
    """0 of nothing in no time."""
    return count / seconds if seconds > 0 else 0.0


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def mean_or_none(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return mean(values) if values else None


def digest(trajectories: Iterable[tuple[object, ...]]) -> int:
    """48 bits of a hash of what makes each trajectory up, in order: a number that JSON keeps exactly."""
    state = hashlib.blake2b(digest_size=6)
    for parts in trajectories:
        state.update("\x1f".join(map(str, parts)).encode() + b"\x1e")
    return int.from_bytes(state.digest(), "little")
