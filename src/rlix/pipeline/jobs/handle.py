"""Jobs of a control plane, as programs and people deal with them. Imports no spec: `rlix status` must be quick."""

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray._private import state as ray_state
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from rlix.control.rpc import get, in_words, root_cause
from rlix.control.watchdog import COORDINATOR
from rlix.node.run_folder import how_to_go_on
from rlix.pipeline.jobs.status import JobStatus
from rlix.protocol.errors import SpecError, WaitTimeoutError
from rlix.protocol.types import COORDINATOR_ACTOR_NAME_PREFIX, pipeline_namespace

if TYPE_CHECKING:
    from rlix.pipeline.spec.lora import RunSpec

logger = logging.getLogger(__name__)

STOPPED_BY = "stopped by "
"""So begins why a job ended that a person's command ended."""
BY_QUEUE = f"{STOPPED_BY}the queue: "
FINAL_STATES = frozenset({"finished", "failed", "stopped"})
STATUS_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 300.0  # of its coordinator, whose process a busy machine starts slowly


class JobHandle:
    """A job of this control plane, launched by this process or by another one. Losing the handle ends nothing."""

    def __init__(self, first: JobStatus, run_dir: Path | None, orchestrator: Any, coordinator: Any) -> None:
        """`first` is what is known of the job so far. A coordinator that a user wrote may know no run folder."""
        self.name = first.name
        self.run_dir = run_dir
        self._last = first
        self._orchestrator = orchestrator
        self._coordinator = coordinator
        self._end = self._ask_for_the_end()

    @property
    def pipeline_id(self) -> str:
        """What it is registered as; another id once it was started again on other nodes."""
        return self._last.pipeline_id

    @property
    def known(self) -> JobStatus:
        """The last status, without asking."""
        return self._last

    def start(self) -> None:
        """Start the run. Calling it again changes nothing.

        Raises:
            WaitTimeoutError: its coordinator does not answer.
        """
        what = f"the start of {self.name}'s coordinator"
        get(self._coordinator.start.remote(), what=what, timeout_s=_START_TIMEOUT_S)
        logger.info("%s started as %s", self.name, self.pipeline_id)

    def asked(self) -> Any:
        """The status to come, by a reference: of one that was just launched, when its coordinator has started."""
        return self._coordinator.status.remote()

    def status(self) -> JobStatus:
        """What the job is doing; the last known status when it does not answer within two seconds."""
        if self._last.state in FINAL_STATES:
            return self._last
        ready, _ = ray.wait([self._end], timeout=0)
        if ready:
            self._last = self._final_status()
        else:
            with contextlib.suppress(RayError):
                self._last = ray.get(self._coordinator.status.remote(), timeout=STATUS_TIMEOUT_S) or self._last
        return self._last

    def stop(self, why: str = "") -> None:
        """Ask for a clean stop: the job writes a checkpoint and ends. Who follows it is told `why`, as in "stopped by
        `rlix stop`"."""
        said = (why,) if why and hasattr(self._coordinator, "about") else ()  # one that a user wrote is just stopped
        with contextlib.suppress(RayActorError):
            self._coordinator.stop.remote(*said)

    def change_run(
        self, verb: Literal["add", "pause", "resume", "remove"], name: str, run: "RunSpec | None" = None
    ) -> None:
        """Of a multi_lora job: add a run, or pause, resume or remove one.

        Raises:
            SpecError: there is no such run, or already one, or the job has none.
        """
        try:
            ray.get(self._coordinator.change_run.remote(verb, name, run), timeout=_CALL_TIMEOUT_S)
        except RayTaskError as error:
            raise root_cause(error) from error

    def wait(self, timeout_s: float) -> JobStatus:
        """Wait for the end.

        Raises:
            WaitTimeoutError: the job had not ended after `timeout_s`.
        """
        ready, _ = ray.wait([self._end], timeout=timeout_s)
        if not ready:
            raise WaitTimeoutError(f"job {self.name!r} was still in {self._last.phase!r} after {timeout_s:g} s")
        return self.status()

    def close(self, why: str = f"{STOPPED_BY}whoever started it") -> None:
        """Free everything the job holds, ended or not. Who follows it is told `why` (STOPPED_BY...)."""
        self.status()
        with contextlib.suppress(RayError):
            ray.get(
                self._orchestrator.unregister_pipeline.remote(pipeline_id=self.pipeline_id, reason=why),
                timeout=_CALL_TIMEOUT_S,
            )
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(ray.get_actor(f"pipeline:{self.pipeline_id}", pipeline_namespace(self.pipeline_id)))
        ray.kill(self._coordinator)

    def _ask_for_the_end(self) -> Any:
        coordinator = self._coordinator
        return (coordinator.ended if hasattr(coordinator, "ended") else coordinator.closed).remote()

    def _final_status(self) -> JobStatus:
        try:
            final: JobStatus | None = ray.get(self._end)
            final = final or ray.get(self._coordinator.status.remote(), timeout=STATUS_TIMEOUT_S) or self._last
        except ActorUnavailableError:
            self._end = self._ask_for_the_end()
            return self._last
        except (RayTaskError, RayActorError) as error:
            return self._without_coordinator(error)
        except GetTimeoutError:
            final = self._last
        return final if final.state in FINAL_STATES else replace(final, state="stopped", phase="stopped")

    def _without_coordinator(self, error: RayError) -> JobStatus:
        """How the job ended whose coordinator cannot say so any more: by its run folder, or by what the control plane
        knows."""
        from rlix.monitor.records import ENDINGS, load_run

        with contextlib.suppress(SpecError, OSError):
            record = load_run(self.run_dir) if self.run_dir is not None else None
            if record is not None and record.state in ENDINGS:
                step = max((int(row["step"]) + 1 for row in record.metrics), default=self._last.step)
                return replace(self._last, state=record.state, phase=record.state, step=step)
        why = ""
        with contextlib.suppress(RayError):
            asked = self._orchestrator.why_ended.remote(self.pipeline_id)
            why = str(ray.get(asked, timeout=_CALL_TIMEOUT_S))
        state = "stopped" if why.startswith(STOPPED_BY) else "failed"
        if not why.startswith((STOPPED_BY, COORDINATOR)):  # what else is said of it followed from that
            why = in_words(error, COORDINATOR)
        return replace(self._last, state=state, phase=state, error=with_next(why, self.run_dir))


def with_next(why: str, run_dir: Path | None) -> str:
    """Why a job was ended, and what its user does next; one that the queue stopped the queue goes on with."""
    return why if run_dir is None or why.startswith(BY_QUEUE) else f"{why}; {how_to_go_on(run_dir)}"


def find_jobs(orchestrator: Any) -> list[JobHandle]:
    """Every job of this control plane that has a coordinator, in order of launch. One that ended is found for a minute.

    All are asked at once. A job whose coordinator does not answer within a few seconds is there, with what is known
    without it.
    """
    found: list[tuple[str, Any, Any]] = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        pipeline_id = actor["name"].removeprefix(COORDINATOR_ACTOR_NAME_PREFIX)
        if pipeline_id == actor["name"]:
            continue
        with contextlib.suppress(ValueError):  # it has ended since
            coordinator = ray.get_actor(actor["name"], actor["namespace"])
            ask = coordinator.about if hasattr(coordinator, "about") else coordinator.status
            found.append((pipeline_id, coordinator, ask.remote()))
    ray.wait([ref for _, _, ref in found], num_returns=len(found), timeout=STATUS_TIMEOUT_S) if found else None
    jobs = [_handle(pipeline_id, orchestrator, coordinator, ref) for pipeline_id, coordinator, ref in found]
    return sorted((job for job in jobs if job), key=lambda job: (len(job.pipeline_id), job.pipeline_id))


def _handle(pipeline_id: str, orchestrator: Any, coordinator: Any, asked: Any) -> JobHandle | None:
    """None when the coordinator has ended."""
    try:
        answer = ray.get(asked, timeout=0)
    except (GetTimeoutError, ActorUnavailableError):
        return JobHandle(_silent(pipeline_id, orchestrator, coordinator), None, orchestrator, coordinator)
    except RayActorError:
        return None
    except RayTaskError as error:  # a coordinator that a user wrote
        logger.warning("%s: %s", pipeline_id, root_cause(error))
        answer = None
    first, run_dir = answer if isinstance(answer, tuple) else (answer, None)
    return JobHandle(first or _silent(pipeline_id, orchestrator, coordinator), run_dir, orchestrator, coordinator)


def _silent(pipeline_id: str, orchestrator: Any, coordinator: Any) -> JobStatus:
    """What is known of a job whose coordinator says nothing: it starts, or something keeps it from answering."""
    name = pipeline_id
    with contextlib.suppress(RayError):
        name = ray.get(orchestrator.registration.remote(pipeline_id), timeout=STATUS_TIMEOUT_S).name or name
    actor = ray_state.actors(coordinator._actor_id.hex())
    if actor and actor["State"] in ("ALIVE", "DEAD"):
        return JobStatus(name, pipeline_id, "unknown", 0, 0, "does not answer")
    return JobStatus(name, pipeline_id, "starting", 0, 0, "starting")
