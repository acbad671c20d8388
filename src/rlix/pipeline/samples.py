"""What one step sampled, and the rewards it got."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, tensor

from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.sources.rewards import Reward


@dataclass(frozen=True, slots=True)
class Samples:
    """Trajectories with their rewards, in the same order; the samples of one prompt (a group) next to each other."""

    trajectories: Sequence[Trajectory]
    rewards: Sequence[Reward]

    @property
    def reward_tensor(self) -> Tensor:
        """[trajectories], float32."""
        return tensor([r.reward for r in self.rewards])

    def metrics(self) -> dict[str, float]:
        """Means over the trajectories, and `trajectories_digest`: equal exactly when two runs sampled the same."""
        count = len(self.rewards)
        return {
            "reward": sum(r.reward for r in self.rewards) / count,
            "exact": sum(r.exact for r in self.rewards) / count,
            "trajectories": count,
            "trajectories_digest": digest((t.id, t.prompt_ids, t.token_ids) for t in self.trajectories),
        }

    def groups(self, chosen: Iterable[int], size: int) -> "Samples":
        """The groups with these numbers."""
        rows = [group * size + k for group in chosen for k in range(size)]
        return Samples([self.trajectories[i] for i in rows], [self.rewards[i] for i in rows])


def digest(trajectories: Iterable[tuple[object, ...]]) -> int:
    """48 bits of a hash of what makes each trajectory up, in order: a number that JSON keeps exactly."""
    state = hashlib.blake2b(digest_size=6)
    for parts in trajectories:
        state.update("\x1f".join(map(str, parts)).encode() + b"\x1e")
    return int.from_bytes(state.digest(), "little")
