"""What a source is: samples of a step, made on whatever devices the job has at the moment."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlix.pipeline.batch import Row
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import Answer, End, Sample, Samples
from rlix.pipeline.sources.place import TRAIN, Place
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Demand

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlix.pipeline.ends import Ends

logger = logging.getLogger(__name__)

_HOPELESS_STEPS = 3


class SourceFailedError(RlixError):
    """Every sample failed: there is nothing to learn from."""


class Generator(Protocol):
    """What generates trajectories: a `RolloutManager`. `purpose` is that of the trajectories that are meant."""

    def submit(self, step: int, trajectory: Trajectory) -> "Future[Trajectory]": ...

    def submit_all(self, step: int, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]": ...

    def wait(
        self, done: "Future[list[Trajectory]]", timeout_s: float, stop: threading.Event, purpose: str = ""
    ) -> list[Trajectory]: ...

    @property
    def devices_s(self) -> float: ...

    def expect(self, demand: Demand, purpose: str = "") -> None: ...

    def abandon(self, reason: Exception, purpose: str | None = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a source knows of its job.

    Args:
        groups: how many a step has, and `group_size` how many samples each.
        context: tokens that the model can see at once.
        ends: where answers end.
        timeout_s: longest that a step's samples may take, in seconds in which there are devices (`devices_s`).
        stop: set when the job should end.
        generator: where trajectories go to be generated.
        split: what its samples are for: to be learnt from, or held out.
        shared: what sources of one job have in common.
    """

    job: str
    seed: int
    groups: int
    group_size: int
    sampling: Sampling
    context: int
    tokenizer: "PreTrainedTokenizerBase"
    ends: "Ends"
    timeout_s: float
    stop: threading.Event
    generator: Callable[[], Generator]
    split: str = TRAIN
    shared: dict[str, Any] = field(default_factory=dict)

    def place(self, number: int) -> Place:
        """Of a group, counted from the first of the split."""
        return Place(self.split, number, self.seed)


class Source(ABC):
    """Where samples come from. Everything is drawn from the job's seed and the step, so that neither resuming nor
    sharing changes it."""

    def __init__(self, options: Any, around: Surroundings) -> None:
        self.options = options
        self.around = around

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens that the policy can generate in one sample."""

    @property
    def different(self) -> int | None:
        """How many groups a step can have before the same comes again; None: there is always another."""
        return None

    @abstractmethod
    def begin(self, step: int, groups: int | None = None) -> Any:
        """Start to make the samples of step `step`, or of the first `groups` of its groups, beside whatever else runs.

        Steps beyond the job's last are spare ones.
        """

    @abstractmethod
    def finish(self, begun: Any) -> Samples:
        """Wait for what `begin` started.

        Raises:
            WaitTimeoutError: it took too long. InterruptedError: the job was asked to stop.
        """

    @abstractmethod
    def supervised(self, step: int, size: int) -> list[Row]:
        """The right answers of one warm-up step."""

    def close(self) -> None:
        """Stop what was started."""


def done_at(made: "Future[Any]") -> Callable[[], float]:
    """Asks when it was done, in Unix seconds, however late it is looked at; now, where it is not."""
    times: list[float] = []
    made.add_done_callback(lambda _: times.append(time.time()))
    return lambda: times[0] if times else time.time()


def ended(trajectory: Trajectory, ends: "Ends") -> tuple[Answer, End]:
    """What was generated, up to the first string that ends it, and whether it ended by itself."""
    kept = ends.kept(trajectory.token_ids)
    ids, logprobs = tuple(trajectory.token_ids[:kept]), tuple(trajectory.logprobs[:kept])
    cut_off = kept is None and trajectory.finish_reason == "length"
    answer = Answer(ids, logprobs, tuple(trajectory.versions[:kept]), cut_off)
    return answer, End.LENGTH if cut_off else End.DONE


@dataclass(slots=True)
class Patience:
    """Notices when everything fails: at once, or where a failure is a reward that is learnt from (`paid`), when that
    goes on for steps."""

    job: str
    what: str
    paid: bool = False
    failed: int = field(default=0)

    def look_at(self, samples: Sequence[Sample]) -> None:
        """Raises SourceFailedError when every sample of a step has failed, or `paid`, of `_HOPELESS_STEPS` in a row."""
        if not all(sample.failed for sample in samples):
            self.failed = 0
            return
        self.failed += 1
        reason = f"the first, {samples[0].id}: {samples[0].error}"
        if not self.paid:
            raise SourceFailedError(f"every {self.what} of a step failed, {reason}")
        logger.warning("%s: every %s of a step failed, %s", self.job, self.what, reason)
        if self.failed >= _HOPELESS_STEPS:
            raise SourceFailedError(f"every {self.what} of {self.failed} steps in a row failed, {reason}")
