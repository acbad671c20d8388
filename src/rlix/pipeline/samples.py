"""What one step learns from: samples of one turn or many, and the rewards they got."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import sqrt

from torch import Tensor, tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy generated in one turn; the three have the same length. `cut_off`: for its length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy read and what it answered."""

    observation_ids: tuple[int, ...]
    answer: Answer


class End(StrEnum):
    DONE = "done"  # the policy said so, or its environment
    TURNS = "turns"  # no turn was left
    LENGTH = "length"  # no room was left
    FAILED = "failed"  # the environment failed


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory. `counts`: whether it is learnt from and compared with; `error`: why it may not be."""

    id: str
    turns: tuple[Turn, ...]
    reward: float
    exact: bool
    end: End
    counts: bool = True
    error: str | None = None

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
    them.
    """

    samples: Sequence[Sample]
    group_size: int
    curves: Mapping[str, float] = field(default_factory=dict)
    stale: Mapping[str, Sequence[bool]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def rewards(self) -> Tensor:
        """[samples], float32."""
        return tensor([sample.reward for sample in self.samples])

    @property
    def counts(self) -> Tensor:
        """[samples], bool."""
        return tensor([sample.counts for sample in self.samples])

    def groups(self, chosen: Iterable[int]) -> list[Sample]:
        """The samples of the groups with these numbers."""
        return [self.samples[group * self.group_size + k] for group in chosen for k in range(self.group_size)]

    def metrics(self) -> dict[str, float]:
        """The curves, how far rewards differ within groups, and `trajectories_digest`: equal exactly when two runs
        learnt from the same samples."""
        identity = {
            **self._spread(),
            "trajectories": float(len(self.samples)),
            "trajectories_digest": float(digest((s.id, s.token_ids, s.end) for s in self.samples)),
        }
        return {**self.curves, **identity}

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
    generated, and in all), and `more`."""
    kept = [sample for sample in samples if sample.counts]
    return {
        "reward": mean([sample.reward for sample in kept]),
        "exact": mean([float(sample.exact) for sample in kept]),
        "length": mean([float(sample.generated) for sample in samples]),
        "length_max": float(max((sample.generated for sample in samples), default=0)),
        "context": mean([float(len(sample.token_ids)) for sample in samples]),
        "truncated": mean([float(sample.end is End.LENGTH) for sample in samples]),
        **more,
    }


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
