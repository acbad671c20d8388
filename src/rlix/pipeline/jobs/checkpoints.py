"""A run's checkpoints: written under a temporary name beside training, kept while among the newest or the best."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Protocol

from rlix.node.durable import sync, sync_folder
from rlix.node.manifest import write_manifest
from rlix.node.run_folder import PARTIAL, RunFolder, list_checkpoints, replace_file
from rlix.pipeline.spec.evaluation import EvaluationSpec

logger = logging.getLogger(__name__)

BEST = "best"
SETTLE_TIMEOUT_S = 600.0


class Saving(Protocol):
    """A save that goes on beside training, of one engine into `folder`; a train engine's `SaveHandle` is one."""

    @property
    def folder(self) -> Path: ...

    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> object: ...


@dataclass(frozen=True, slots=True)
class Best:
    """What the best checkpoint so far is best at."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class _Begun:
    step: int
    partial: Path
    savings: Sequence[Saving]
    best: Best | None


class Checkpoints:
    """What a pipeline's frame asks to save, and what is left of it on disk. At most one is being written at a time.

    Args:
        folder: the open run folder.
        keep: how many of the newest stay.
        evaluation: which metric makes a checkpoint the best one.
        saved: called with the number of steps and the path of each complete checkpoint.
    """

    def __init__(
        self,
        folder: RunFolder,
        keep: int,
        evaluation: EvaluationSpec | None,
        saved: Callable[[int, Path], None],
    ) -> None:
        self._folder = folder.checkpoints
        self._keep = keep
        self._evaluation = evaluation
        self._saved = saved
        self._best = self._known_best()
        self._begun: _Begun | None = None
        self._unknown_metric = False

    def better(self, step: int, metrics: Mapping[str, float]) -> Best | None:
        """What the checkpoint of `step` would be best at, if these metrics say so; a tie stays with the older one."""
        wanted = self._evaluation
        if wanted is None or wanted.best is None or not any(name.startswith("eval/") for name in metrics):
            return None
        if wanted.best not in metrics:
            if not self._unknown_metric:
                known = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
                logger.warning("no checkpoint is kept as the best: there is no metric %s, only %s", wanted.best, known)
            self._unknown_metric = True
            return None
        value = metrics[wanted.best]
        sign = 1.0 if wanted.best_is == "highest" else -1.0
        best = self._best if self._begun is None else self._begun.best or self._best
        is_better = isfinite(value) and (best is None or sign * value > sign * best.value)
        return Best(step, wanted.best, value) if is_better else None

    def begin(self, step: int, write: Callable[[Path], Sequence[Saving] | None], best: Best | None = None) -> None:
        """Have `write` fill a folder; what it returns goes on writing there. One that is under way is waited for first.

        Raises:
            RlixError, WaitTimeoutError: that one failed, or did not end in time.
        """
        self.settle()
        partial = self._folder / f"step_{step}{PARTIAL}"
        partial.mkdir(parents=True, exist_ok=True)
        self._begun = _Begun(step, partial, write(partial) or (), best)
        self.look()

    def look(self) -> None:
        """Give the checkpoint that is under way its name if it is complete. Raises what its writing raised."""
        if self._begun is not None and all(saving.done() for saving in self._begun.savings):
            self._complete(self._begun)

    def settle(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until none is under way.

        Raises:
            RlixError, WaitTimeoutError: it failed, or did not end in time; then it does not count.
        """
        if (begun := self._begun) is None:
            return
        deadline = time.monotonic() + timeout_s
        try:
            for saving in begun.savings:
                saving.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:  # raised again
            self._begun = None
            raise
        self._complete(begun)

    def _complete(self, begun: _Begun) -> None:
        self._begun = None
        target = begun.partial.with_suffix("")
        write_manifest(begun.partial, (saving.folder for saving in begun.savings))
        sync_folder(begun.partial)
        begun.partial.rename(target)  # a checkpoint that has its name is complete
        sync(self._folder)  # before an older one goes
        if begun.best is not None:
            self._mark(begun.best, target)
        self._prune()
        self._saved(begun.step, target)

    def _mark(self, best: Best, target: Path) -> None:
        found = {"step": best.step, "metric": best.metric, "value": best.value}
        replace_file(self._folder / f"{BEST}.json", json.dumps(found).encode())
        self._best = best
        link = self._folder / f"{BEST}{PARTIAL}"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        link.replace(self._folder / BEST)

    def _known_best(self) -> Best | None:
        """The one that an earlier session of the run has marked, if it is still there and of the metric asked for."""
        try:
            found = Best(**json.loads((self._folder / f"{BEST}.json").read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        wanted = self._evaluation
        there = (self._folder / f"step_{found.step}").is_dir()
        return found if there and wanted is not None and found.metric == wanted.best else None

    def _prune(self) -> None:
        best = None if self._best is None else self._best.step
        linked = (self._folder / BEST).resolve()  # another one after a death between the two
        for step, path in list_checkpoints(self._folder)[: -self._keep]:
            if step != best and path.resolve() != linked:
                partial = path.with_suffix(PARTIAL)  # a checkpoint that has its name is complete, also while it goes
                path.rename(partial)
                shutil.rmtree(partial)
