"""What the calls that a rank runs, or ran last, have changed so far: for when they do not come back, or not well."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlix.engine.residency import local_tensor
from rlix.engine.train.random_state import Json, random_state


@dataclass(frozen=True, slots=True)
class _Begun:
    """How it was when a call began: parameters had been written to so often, and optimizers begun so many steps."""

    number: int
    writes: int
    steps: int
    random: Json


class LastCall:
    """One call at a time; any other thread may ask about it meanwhile.

    Callers in several threads have several calls under way, which a rank runs one after the other: so it is asked what
    has changed since the first of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._steps = 0  # of optimizers, begun so far
        self._shards: int | None = None  # when the call that runs now began; -1: it may move them
        self._begun: tuple[_Begun, ...] = ()

    @contextmanager
    def runs(self, number: int, first: int, *, leaves_bytes: bool) -> Iterator[None]:
        """From its beginning to its end. `first`: of the calls that are under way; who made those before knows how they
        ended. `leaves_bytes`: where they are, or it says otherwise.
        """
        kept = tuple(call for call in self._begun if call.number >= first)
        self._begun = (*kept, _Begun(number, self._written(), self._steps, random_state()))
        self._shards = self._count_shards() if leaves_bytes else -1
        hook = register_optimizer_step_pre_hook(self._step_begins)
        try:
            yield
        finally:
            hook.remove()
            self._shards = None

    def changes(self, since: int) -> int:
        """How often parameters were written to, and optimizers began a step, in the call `since` and those after it.

        A step changes more than parameters, and before them; and kernels of fused ones do not count what they write.
        """
        begun = self._from(since)
        return 0 if begun is None else self._written() - begun.writes + self._steps - begun.steps

    def random_state(self, since: int) -> Json:
        """As that call found it, while nothing has changed that goes on from there; else as it is now."""
        begun = self._from(since)
        return random_state() if begun is None or self.changes(since) else begun.random

    def _from(self, since: int) -> _Begun | None:
        """None: this rank has not come so far."""
        return next((call for call in self._begun if call.number >= since), None)

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
