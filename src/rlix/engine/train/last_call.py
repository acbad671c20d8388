"""What the call that a rank runs, or ran last, has changed so far: for when it does not come back, or not well."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlix.engine.residency import local_tensor


class LastCall:
    """One call at a time; any other thread may ask about it meanwhile."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._versions = 0  # of the parameters, when it began
        self._steps = 0  # of optimizers, begun since then
        self._shards: int | None = None  # when the call that runs now began; -1: it may move them

    @contextmanager
    def runs(self, *, leaves_bytes: bool) -> Iterator[None]:
        """From its beginning to its end. `leaves_bytes`: where they are, or it says otherwise."""
        self._versions, self._steps = self._written(), 0
        self._shards = self._count_shards() if leaves_bytes else -1
        hook = register_optimizer_step_pre_hook(self._step_begins)
        try:
            yield
        finally:
            hook.remove()
            self._shards = None

    @property
    def changes(self) -> int:
        """How often the parameters were written to since it began, and optimizers began a step.

        A step changes more than parameters, and before them; and kernels of fused ones do not count what they write.
        """
        return self._written() - self._versions + self._steps

    @property
    def leaves_shards(self) -> bool:
        """Whether all parameters are whole shards now: not beside a move, or a forward pass that has gathered some."""
        return self._shards in (None, self._count_shards())

    def _step_begins(self, *_: object) -> None:
        self._steps += 1

    def _count_shards(self) -> int:
        """Parameters that this rank has a part of, which those that are gathered are not among."""
        return sum(isinstance(parameter, DTensor) for parameter in self._module.parameters())

    def _written(self) -> int:
        """How often this rank's parameters have been written to, as sharded ones or as their shards."""
        return sum(part._version for whole in self._module.parameters() for part in {whole, local_tensor(whole)})
