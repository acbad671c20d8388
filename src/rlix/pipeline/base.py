"""The frame every pipeline runs in: leases around phases, the step loop, the run folder, stopping and resuming."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlix.control.client import JobClient
from rlix.node import output
from rlix.node.run_folder import RunFolder, Span, replace_file
from rlix.pipeline.holdings import Holdings, Resident
from rlix.pipeline.jobs.checkpoints import Checkpoints, Saving
from rlix.pipeline.jobs.hosts import check_hosts
from rlix.pipeline.jobs.job_log import JobLog, is_full_disk, is_the_pools, what_ended
from rlix.pipeline.jobs.resume import resumption, shown
from rlix.pipeline.jobs.status import JobConfig, JobStatus, JobSummary, as_metrics, as_numbers
from rlix.pipeline.loggers import Loggers, Run, build_loggers
from rlix.pipeline.places import Places
from rlix.pipeline.planning.made import FILE as PLAN_FILE
from rlix.pipeline.planning.made import PlannedJob
from rlix.pipeline.planning.watch import PlanWatch
from rlix.pipeline.samples import mean_or_none
from rlix.pipeline.spec.named import options_of
from rlix.pipeline.usage import Usage
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import Device, DeviceKind, Lease
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

SETTLE_AFTER_ERROR_S = 60.0
_TRAINING = (Phase.ACTOR_TRAINING, Phase.CRITIC_TRAINING)


class Pipeline(ABC):
    """Executes one job's training logic. Subclasses say what happens in `setup` and in one `step`.

    Runs as a Ray actor with several threads: `run` occupies one, the coordinator's calls use the others.
    """

    log_thread: str | None = None  # whose messages alone are the job's, where others share its process
    keeps_output = False
    """Whether what its code prints, here and in its workers, goes to a file in its run folder: of one that has a
    process of its own."""
    Options: Any = None
    """A pydantic model or a dataclass that checks `pipeline.options` of the job; `self.options` is one of those."""

    def __init__(self, pipeline_id: str, config: JobConfig, client: JobClient | None = None) -> None:
        self.pipeline_id = pipeline_id
        self.config = config
        self.spec = config.spec
        given = self.spec.pipeline.options if self.spec.pipeline is not None else {}
        self.options = options_of(type(self), given)
        self.client = JobClient(pipeline_id) if client is None else client
        self.registration = self.client.registration()
        self.devices = self.client.devices()
        self.folder = RunFolder(config.run_dir)
        self.checkpoints = Checkpoints(self.folder, 1, None, self._note_checkpoint)
        self.loggers: Loggers | None = None
        self._log: logging.Handler = logging.NullHandler()
        self.stop_requested = threading.Event()
        self._ended = threading.Event()
        self._status = JobStatus.first(config, pipeline_id, "its workers start")
        self._done = self._saved = 0  # steps
        self._changed = False  # whether a step has begun to change what checkpoints hold
        self._rewards: list[float] = []
        self._exacts: list[float] = []
        self._lease_records = 0
        self._usage = Usage(time.time())
        self.places = Places(self.spec.name, self.registration, self.spec.speed)
        self.holdings = Holdings(self.spec.training.timeout_s)
        self._plan = PlanWatch(config.job, time.time(), may_switch=config.switches)
        self.goes_on: PlannedJob | None = None  # by another plan: then `run` returns, and somebody starts it again
        self._started = time.time()

    # ---- what a subclass writes ------------------------------------------------------------------------------

    @abstractmethod
    def setup(self) -> None:
        """Build engines and data. Called once, before `initialize` or `load`."""

    @abstractmethod
    def step(self, step: int) -> Mapping[str, float]:
        """Do step number `step` (from 0) and return its metrics."""

    def initialize(self) -> None:
        """What a fresh run does before its first step (a resumed one calls `load` instead)."""

    def save(self, path: Path) -> Sequence[Saving] | None:
        """Write everything that the next step depends on into the empty folder `path`.

        What is returned goes on writing there while the next steps are done; the checkpoint counts when all have ended.
        """

    def load(self, path: Path, step: int) -> None:
        """Restore what `save` wrote after `step` steps."""

    def evaluate(self, done: int) -> Mapping[str, float]:
        """After `done` steps, when the spec's `evaluation` is due: metrics on held-out prompts, named `eval/...`."""
        raise NotImplementedError

    def settle(self) -> None:
        """Before an evaluation: end what is under way for the next steps. What this raises fails the job."""

    def teardown(self) -> None:
        """Stop what `setup` started."""

    def expect_gpu_s(self, left: float) -> None:
        """After each step: the GPU-seconds the job will use until its last one, if the next are like those so far."""

    # ---- called through Ray ----------------------------------------------------------------------------------

    def run(self) -> JobSummary:
        """Train from the first step (or the latest checkpoint) to the last; returns how it ended."""
        state = "failed"
        try:
            state = self._prepare_and_train()
        except BaseException as error:  # noted, and raised again
            self._failed(error)
            raise
        finally:
            self._end(state)
        return self._summary(state)

    def wait_ended(self) -> None:
        """Block until `run` has returned or raised: the coordinator's way to notice the end."""
        self._ended.wait()

    def hang(self) -> WaitTimeoutError | None:
        """What there is to say when the job's own code hangs while it holds devices."""
        return self.holdings.hang(self.spec.name)

    def give_up(self, error: WaitTimeoutError) -> None:
        """Fail without the code that hangs, which ends with this process; only a checkpoint under way is completed."""
        self._failed(error, hangs=True)
        self._close("failed")

    def request_stop(self) -> None:
        """Ask for a clean stop: the step in progress is abandoned or finished, then a checkpoint is written."""
        self.stop_requested.set()

    def status(self) -> JobStatus:
        return self._status

    # ---- for subclasses --------------------------------------------------------------------------------------

    @contextmanager
    def phase(
        self, cluster: str, phase: Phase, engine: Resident | None = None, *, stoppable: bool = True
    ) -> Iterator[Lease]:
        """Hold the cluster's devices, with `engine` resident on them, for the duration of the block.

        Waits in the queue as long as it takes; unless `stoppable`, also when the job is asked to stop: for a step that
        has begun to change what checkpoints hold.

        Raises:
            InterruptedError: the job was asked to stop while it waited.
        """
        name, step, stop = phase.name.lower(), self._status.step, self.stop_requested if stoppable else None
        self.checkpoints.look()
        self._update(phase=f"waiting for {name}")
        brought = False
        while not brought:  # or once more, where the engine is, if it could not move to where its lease is
            asking = self.places.asking(cluster, engine)
            with (
                self.client.phase(cluster, phase, stop=stop, **asking) as lease,
                self.holdings.hold(f"{cluster} for {name}", engine),
            ):
                self.note_entered(phase)
                marks = [time.time()]
                try:
                    brought = engine is None or self._brought(cluster, engine, lease)
                    marks.append(time.time())
                    if brought:
                        yield lease
                except BaseException:  # raised again
                    marks.append(time.time())
                    if engine is not None:
                        self._release_after_error(engine, lease)
                    raise
                else:
                    marks.append(time.time())
                    if engine is not None and brought:
                        self.places.leave(engine, lease.epoch)
                finally:
                    marks.append(time.time())
                    self._plan.phase(cluster, marks[-1] - marks[0])
                    kinds = zip(("load", "busy", "offload"), marks, marks[1:], strict=False)
                    spans = [Span(lease.devices, cluster, name, kind, start, end, step) for kind, start, end in kinds]
                    self.folder.spans([span for span in spans if span.end > span.start])

    def _brought(self, cluster: str, engine: Resident, lease: Lease) -> bool:
        return self.places.bring(cluster, engine, self.client.fence(lease), self.devices_of(lease.devices))

    def _release_after_error(self, engine: Resident, lease: Lease) -> None:
        """What went wrong first says more than that its engine cannot let go; who keeps a device locked is ended."""
        try:
            engine.release(lease.epoch)
        except RlixError as error:
            logger.warning("%s: the devices of %s were not freed: %s", self.spec.name, lease.cluster, error)

    def devices_of(self, ids: Iterable[int]) -> tuple[Device, ...]:
        """The devices with these ids, in their order."""
        wanted = tuple(ids)
        if not self.devices.keys() >= set(wanted):  # of a node that came since
            self.devices = self.client.devices()
        return tuple(self.devices[id] for id in wanted)

    def note_entered(self, phase: Phase) -> None:
        """Show `phase` as what the job is doing. Once it trains, checkpoints would not hold the last whole step."""
        self._changed |= phase in _TRAINING
        self._update(phase=phase.name.lower())

    def note_phase(self, text: str) -> None:
        """Show `text` as what the job is doing."""
        self._update(phase=text)

    # ---- the step loop ---------------------------------------------------------------------------------------

    def _prepare_and_train(self) -> str:
        try:
            first = self._prepare()
        except InterruptedError:
            if not self.stop_requested.is_set():
                raise
            return "stopped"
        return self._train(first)

    def _prepare(self) -> int:
        """Open the run folder, build, and restore: the number of the first step to do."""
        if self.spec.evaluation is not None and type(self).evaluate is Pipeline.evaluate:
            raise SpecError(f"evaluation: {type(self).__name__} has no method 'evaluate': write it, or drop this")
        check_hosts(self.spec, self.config.run_dir, self.registration, self.devices)
        changes = resumption(self.spec, self.config.run_dir).changes if self.config.resume else ()
        if self.spec.declared_speed is not None and any(d.kind is DeviceKind.CUDA for d in self.devices.values()):
            raise SpecError("declared_speed: these are GPUs, which are as fast as they are; leave the section out")
        self.folder, checkpoint = RunFolder.open(self.config.run_dir, resume=self.config.resume)
        first = 0 if checkpoint is None else checkpoint[0]
        self._update(step=first)
        self.checkpoints = Checkpoints(
            self.folder, self.spec.checkpoint.keep, self.spec.evaluation, self._note_checkpoint
        )
        if self.keeps_output:
            early = output.early_file(self.config.run_dir)
            output.to_file(self.folder.path / output.FILE, bounded=True, after=early)
        self._log = JobLog(self.folder.path, self.log_thread)
        changed = [f"{change.field}: {shown(change.old)} → {shown(change.new)}" for change in changes]
        moved = [] if (there := self.folder.earlier) is None else [f"the run that was here before is in {there}"]
        said = [*filter(None, [self.config.why]), *moved, *self.folder.set_aside, *changed]
        logger.info("%s begins. %s", self.spec.name, "; ".join(said))
        self._event("job", event="started", detail="; ".join(said) or None)
        self.folder.write_spec(self.spec.to_yaml())
        if self.config.plan is not None:
            replace_file(self.folder.path / PLAN_FILE, self.config.plan.to_json().encode())
        pool = [{"id": d.id, "node_ip": d.node_ip, "kind": str(d.kind)} for d in self.devices.values()]
        self._event("pool", devices=pool)
        self.setup()
        run = Run(self.spec.name, self.folder.path, first, self.spec.model_dump(mode="json"))
        self.loggers = Loggers(build_loggers(self.spec.logging), run)
        if checkpoint is None:
            self.initialize()
            return 0
        step, path = checkpoint
        logger.info("%s: resuming at step %d from %s", self.spec.name, step, path)
        self.load(path, step)
        return step

    def _train(self, first: int) -> str:
        every = self.spec.checkpoint.every
        self._saved = self._done = first
        self._changed = False
        self._write_lease_events()
        spent_gpu_s = self._usage.gpu_s(time.time())  # on what is not done again at every step
        for step in range(first, self.spec.steps):
            if self.stop_requested.is_set() or self.goes_on is not None:
                break
            self._update(state="running", step=step)
            if step == first:
                self._event("job", event="first_step", detail=None)
            try:
                metrics = self._one_step(step)
            except InterruptedError:
                if not self.stop_requested.is_set():  # nobody asked for an end: something broke
                    raise
                break
            done = self._done = step + 1
            self._changed = False
            per_step = (self._usage.gpu_s(time.time()) - spent_gpu_s) / (done - first)
            self.expect_gpu_s(per_step * (self.spec.steps - done))
            best = self.checkpoints.better(done, metrics)
            if best is not None or done % every == 0:
                self._update(phase="checkpoint")
                self.checkpoints.begin(done, self.save, best)
                self._saved = done
        self._update(phase="checkpoint")
        if self._done > self._saved and not self._changed:
            self.checkpoints.begin(self._done, self.save)
        self.checkpoints.settle()
        return "stopped" if self._done < self.spec.steps else "finished"

    def _one_step(self, step: int) -> dict[str, float]:
        before = self._baseline(step)
        start = time.time()
        metrics = before | as_metrics(self.step(step), f"{type(self).__name__}.step")
        end = time.time()
        metrics |= {"step_s": end - start, **self._evaluated(step + 1)}
        self.folder.metrics({"step": step, "time": end, **metrics})
        if self.loggers is not None:
            self.loggers.log(step, metrics)
        self._rewards.append(metrics["reward"])
        self._exacts.append(metrics.get("exact", float("nan")))
        shown = {name: metrics.get(name) for name in ("reward", "exact", "tokens_per_s", "staleness")}
        self._update(step=step + 1, **shown)
        self._write_lease_events()
        if said := self._plan.step(metrics, end):
            logger.info("%s: %s", self.spec.name, said)
            self.goes_on = self._plan.anew(self.folder.path, self.client.devices(), self.spec.steps - step - 1)
        return metrics

    def _baseline(self, step: int) -> dict[str, float]:
        """Before the first step, where that is asked for: metrics of an evaluation, by another name."""
        wanted = self.spec.evaluation
        if step or wanted is None or not wanted.baseline:
            return {}
        return {name.replace("eval/", "baseline/", 1): value for name, value in self._evaluated(0).items()}

    def _evaluated(self, done: int) -> dict[str, float]:
        """Metrics of the evaluation that is due after `done` steps. Whoever stops the job does not wait for it."""
        wanted = self.spec.evaluation
        if wanted is None or (done % wanted.every and done < self.spec.steps):
            return {}
        try:
            self.settle()
        except InterruptedError:  # the step before has been taken, and counts
            if not self.stop_requested.is_set():
                raise
            return {}
        self._update(phase="evaluation")
        start = time.time()
        try:
            metrics = as_numbers(self.evaluate(done), f"{type(self).__name__}.evaluate")
        except (InterruptedError, RlixError) as error:  # it teaches nothing, so training goes on without it
            if isinstance(error, InterruptedError) and self.stop_requested.is_set():
                return {}
            logger.warning("%s: the evaluation after %d steps failed: %s", self.spec.name, done, error)
            return {}
        self._update(evaluation=metrics.get(wanted.best or "eval/reward"))
        return {**metrics, "evaluation_s": time.time() - start}

    def _end(self, state: str) -> None:
        """Whatever `teardown` raises, the folder is let go of and whoever waits for the end is told."""
        try:
            self.teardown()
            if state != "stopped" or self.stop_requested.is_set():
                self.goes_on = None
            if state != "failed" and not self._ended.is_set():
                self._event("job", event=state, detail=None if self.goes_on is None else "goes on by another plan")
                if self.goes_on is None:
                    self._update(state=state, phase=state)
        except BaseException as error:  # noted, and raised again
            if state != "failed":  # else what went wrong first is what counts
                self._failed(error)
            state = "failed"
            raise
        finally:
            if not self._ended.is_set():
                self._close(state)

    def _close(self, state: str) -> None:
        with ExitStack() as last:
            for close in (self._ended.set, self.folder.close, self._give_back, self._log.close):
                last.callback(close)
            if self.loggers is not None:
                self.loggers.close(state)

    def _give_back(self) -> None:
        """A start that came to no step does not stand in the way of the run that was there before."""
        if (moved := self.folder.give_back()) is None:
            return
        error = self._status.error
        said = f"{self.config.run_dir} holds the run before this one again; what this one wrote is in {moved}"
        self._update(moved_to=str(moved), error=None if error is None else f"{error}\n{said}")

    def _failed(self, error: BaseException, *, hangs: bool = False) -> None:
        if self._ended.is_set():
            return  # it was given up: why is what counts
        detail = what_ended(error, self.folder.path, self._status.phase)
        by_pool = self._status.state == "starting" and not hangs and is_the_pools(error)
        self._update(state="failed", phase="failed", error=detail, by_pool=by_pool)
        if self.folder.is_open:
            self._save_after_error(error, hangs)
            self._note_failure(detail)
        logger.info("%s failed", self.spec.name, exc_info=error)

    def _save_after_error(self, error: BaseException, hangs: bool) -> None:
        """Complete the checkpoint under way; where more was done write another, unless code `hangs` meanwhile."""
        try:
            self.checkpoints.settle(SETTLE_AFTER_ERROR_S)
            if self._done > self._saved and not (self._changed or hangs or is_full_disk(error)):
                self.checkpoints.begin(self._done, self.save)
                self.checkpoints.settle(SETTLE_AFTER_ERROR_S)
        except Exception:  # whatever it is: what went wrong first is what the user is told
            logger.exception("%s: its last checkpoint was not completed", self.spec.name)

    def _note_checkpoint(self, done: int, path: Path) -> None:
        self._event("checkpoint", step=done, path=str(path))

    def _write_lease_events(self) -> None:
        for record in self.client.lease_log(self._lease_records):
            self._lease_records = record.number
            lease = record.lease
            if record.event == "granted":
                self._usage.granted(lease.epoch, len(lease.devices), record.time)
            elif record.event == "released":
                self._usage.released(lease.epoch, len(lease.devices), record.time)
            self._plan.lease(record)
            self.folder.lease(record)

    def _note_failure(self, detail: str) -> None:
        try:
            self._event("job", event="failed", detail=detail)
        except OSError as error:  # a full disk, say: what went wrong first is what counts
            logger.warning("%s: the failure is not in its events: %s", self.spec.name, error)

    def _event(self, kind: str, **fields: object) -> None:
        self.folder.event({"type": kind, "time": time.time(), **fields})

    def _update(self, **changes: object) -> None:
        if not self._ended.is_set():  # else it was given up, and the code that hung has come back
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]

    def _summary(self, state: str) -> JobSummary:
        return JobSummary(
            name=self.spec.name,
            state=state,
            steps=self._status.step,
            seconds=time.time() - self._started,
            first_reward=mean_or_none(self._rewards[:1]),
            last_reward=mean_or_none(self._rewards[-5:]),
            first_exact=mean_or_none(self._exacts[:1]),
            last_exact=mean_or_none(self._exacts[-5:]),
            run_dir=self._status.moved_to or str(self.config.run_dir),
            goes_on=self.goes_on,
        )
