"""The coordinator of a launched job: it starts the run, knows how it ended, and outlives whoever launched it."""

import asyncio
import contextlib
import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError

from rlix.control.rpc import call, in_words, outlast, root_cause
from rlix.control.watch import died_by_itself
from rlix.node import output
from rlix.node.process import this_process
from rlix.node.run_folder import take_back
from rlix.pipeline.jobs.coordinator import PipelineCoordinator, early_output
from rlix.pipeline.jobs.handle import STOPPED_BY, with_next
from rlix.pipeline.jobs.job_log import is_the_pools
from rlix.pipeline.jobs.register import register
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.planning.made import PlannedJob
from rlix.protocol.errors import PipelineGoneError, RlixError, SpecError, WaitTimeoutError
from rlix.protocol.types import LAUNCHER, NAMESPACE, ORCHESTRATOR_ACTOR_NAME, SCHEDULER_ACTOR_NAME
from rlix.workers.futures import read_error

logger = logging.getLogger(__name__)

_WHY_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 60.0
_STATUS_TIMEOUT_S = 1.0  # less than who asks waits
_LOOK_EVERY_S = 0.5
NODE_LOSS_S = 30.0
"""How long it may take after a failure until Ray knows that a node has left."""
RESUMES = 3
"""So often a job is started again because a node has left."""
REMEMBERED_S = 60.0
"""For so long after its end a job can still be asked how it ended; its run folder says so for ever."""


class JobCoordinator(PipelineCoordinator):
    """Ray actor; create it with `lifetime="detached"`. It ends itself when the job has ended.

    A job that fails because a node of it has left, or that found a better plan, is registered anew and goes on from its
    checkpoint on other devices.
    """

    def __init__(self, pipeline_id: str, pipeline_config: JobConfig, *, look_every_s: float = 5.0) -> None:
        super().__init__(pipeline_id, replace(pipeline_config, switches=True))
        self._last = JobStatus.first(pipeline_config, pipeline_id)
        self._final: JobStatus | None = None
        self._ended = asyncio.Event()
        self._starting = asyncio.Lock()
        self._supervisor: asyncio.Task[None] | None = None
        self._started = threading.Event()
        threading.Thread(target=self._end_unstarted, args=(look_every_s,), name="unstarted", daemon=True).start()
        self._stop_wanted = False
        self._stopped_by = ""  # whose command
        self._resumes = 0  # because a node had left
        self._other: PlannedJob | None = None  # by another plan: what to go on with
        self._former: PlannedJob | None = None  # what to go back to when the other plan does no step
        self._switched_at = 0  # steps
        self._may_be_a_node = True  # that left, why it failed
        self._nodes: frozenset[str] = frozenset()  # without which the job cannot go on, as far as is known

    async def start(self) -> None:
        """Start the run. Calling it again changes nothing."""
        async with self._starting:
            if self._supervisor is None:
                await _stand_for(self._pipeline_id)
                self._started.set()
                output.early_file(self._config.run_dir).unlink(missing_ok=True)  # of a start that came to nothing
                early_output(self._config.run_dir)
                logging.getLogger("rlix").addHandler(logging.StreamHandler(output.terminal()))
                self._supervisor = asyncio.create_task(self._begin())

    def _end_unstarted(self, look_every_s: float) -> None:
        """Whoever launched it may die before it says `start`: the control plane forgets its pipeline, and it ends."""
        while not self._started.wait(look_every_s):
            with contextlib.suppress(RlixError, RayError, ValueError, TimeoutError):  # there is no orchestrator, say
                if not (_is_registered(self._pipeline_id) or self._started.is_set()):  # meanwhile
                    ray.kill(ray.get_runtime_context().current_actor)

    async def _begin(self) -> None:
        """Starts the run when there is room for it, and sees to its end."""
        try:
            pipeline = await self._create()
        except (RlixError, RayError, TimeoutError, ValueError) as error:
            failed = self._failed(f"it could not start: {in_words(error) if isinstance(error, RayError) else error}")
            await self._be_over(replace(failed, by_pool=is_the_pools(error)))
        except InterruptedError:
            await self._be_over(replace(self._last, state="stopped", phase="stopped"))
        else:
            await self._see_to_the_end(pipeline)

    async def _create(self) -> Any:
        """The pipeline's actor, when there is room for it; where that comes to nothing, its registration ends."""
        try:
            return await self.create_pipeline_actor()
        except BaseException:  # raised again
            with contextlib.suppress(RlixError, RayError, ValueError):  # ValueError: there is no orchestrator
                await self._leave_pool("it did not start")
            raise

    def waiting(self, why: str) -> None:
        """Raises InterruptedError when the job is not to start any more."""
        if self._stop_wanted:
            raise InterruptedError("stopped while it waited to start")
        self._last = replace(self._last, state="starting", phase=f"waits to start: {why}")

    async def about(self) -> tuple[JobStatus, Path]:
        """Its status and its run folder."""
        return await self.status(), self._config.run_dir

    async def status(self) -> JobStatus:
        """What the job is doing, or how it ended; what was last known while its pipeline is busy or still starting."""
        if self._final is None:
            await self._refresh(_STATUS_TIMEOUT_S)
        return self._final or self._last

    async def stop(self, why: str = "") -> None:
        """Ask the job to stop cleanly. Who follows it is told `why`."""
        self._stop_wanted = True
        self._stopped_by = why or self._stopped_by
        with contextlib.suppress(RayActorError):
            await super().stop()

    async def ended(self) -> JobStatus:
        """How the job ended, once it has."""
        await self._ended.wait()
        assert self._final is not None
        return self._final

    async def _see_to_the_end(self, pipeline: Any) -> None:
        final = await self._run(pipeline)
        while why := await self._why_again(final):
            if self._resumes > RESUMES:
                error = f"{final.error}; it was resumed {RESUMES} times, each time {why}"
                final = replace(final, error=error, by_pool=True)
                break
            try:
                await self._leave(pipeline, why)
                if self._stop_wanted:
                    final = replace(final, state="stopped", phase="stopped", error=None)
                    break
                pipeline = await self._resume(why)
            except InterruptedError:
                final = replace(final, state="stopped", phase="stopped", error=None)
                break
            except (RlixError, RayError, TimeoutError, ValueError) as error:  # ValueError: there is no orchestrator
                what = f"{final.error or 'it stopped'}; {why}, and it could not go on: {type(error).__name__}: {error}"
                final = replace(final, state="failed", phase="failed", error=what)
                break
            final = await self._run(pipeline)
        await self._be_over(await self._given_back(final))

    async def _given_back(self, final: JobStatus) -> JobStatus:
        """Where its process was killed before its first step, the run before it has its folder again."""
        if final.state != "failed" or final.step > 0 or final.moved_to is not None:
            return final
        moved = None
        with contextlib.suppress(SpecError, OSError):  # in use, by a process that does not end; the next start looks
            moved = await asyncio.to_thread(take_back, self._config.run_dir)
        if moved is None:
            return final
        said = f"{self._config.run_dir} holds the run before this one again; what this one wrote is in {moved}"
        return replace(final, moved_to=str(moved), error=f"{final.error}\n{said}")

    async def _be_over(self, final: JobStatus) -> None:
        if final.state == "stopped" and self._stopped_by:
            final = replace(final, error=with_next(self._stopped_by, self._config.run_dir))
        self._final = _with_output(final, output.early_file(self._config.run_dir))
        self._ended.set()
        if self._pipeline is not None:
            await self.closed()
            ray.kill(self._pipeline)
        await asyncio.sleep(REMEMBERED_S)
        logger.info("%s has been over for %.0f s: its coordinator ends", self._final.name, REMEMBERED_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _run(self, pipeline: Any) -> JobStatus:
        if self._stop_wanted:
            await self.stop()
        self._may_be_a_node = True
        what = f"the pipeline of {self._last.name} ({self._pipeline_id})"
        try:
            run = asyncio.create_task(outlast(pipeline, pipeline.run.remote, what=what))
            run.add_done_callback(read_error)
            self._nodes = await outlast(pipeline, pipeline.nodes.remote, what=what)
            summary = await run
            self._other = summary.goes_on
        except RayTaskError as error:
            cause = root_cause(error)
            self._may_be_a_node = isinstance(cause, RlixError) and not isinstance(cause, SpecError)
            said = await self._refresh()
            if said is not None:
                self._last = replace(self._last, step=max(self._last.step, said.step), moved_to=said.moved_to)
            what = (said and said.error) or f"{type(cause).__name__}: {cause}"
            failed = self._failed(what + await self._why_taken())
            return replace(failed, by_pool=said is not None and said.by_pool)
        except (RayActorError, ActorUnschedulableError) as error:  # or its node left before it began
            return await self._died(error)
        except WaitTimeoutError as error:
            return self._failed(str(error))
        await self._refresh()
        return replace(self._last, state=summary.state, phase=summary.state)

    async def _why_again(self, final: JobStatus) -> str:
        """Why the job is to be started again; "" when it is over."""
        if self._stop_wanted:
            return ""
        if self._other is not None:
            self._former, self._switched_at = self._config.job, final.step
            return f"goes on by another plan, {self._other.plan and self._other.plan.chosen}"
        left = await self._node_that_left(final) if final.state == "failed" else ""
        self._resumes += bool(left)
        if not left and final.state == "failed" and self._former is not None and final.step <= self._switched_at:
            return self._go_back(final.error or "it failed")
        return left

    def _go_back(self, error: str) -> str:
        """To the plan before, for good. Says why."""
        assert self._former is not None
        plan = self._former.plan
        self._other, self._former = replace(self._former, plan=plan and plan.stays), None
        return f"goes back to its plan, for by the other one it could not go on: {error}"

    # -- when a node leaves ------------------------------------------------------------------------------------------

    async def _node_that_left(self, final: JobStatus) -> str:
        """Says which node of the job is gone; "" when all are there. Where that may be why it failed, Ray has time."""
        here = ray.get_runtime_context().get_node_id()
        deadline = asyncio.get_running_loop().time() + (
            NODE_LOSS_S if self._may_be_a_node and self._nodes - {here} else 0.0
        )
        while True:
            if gone := sorted(self._nodes - await _staying()):
                return f"node {gone[0]} left"
            if self._stop_wanted or asyncio.get_running_loop().time() >= deadline:
                return ""
            self._last = replace(final, state="running", phase="failed: did a node leave?", error=None)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _leave(self, before: Any, why: str) -> None:
        """Ends a pipeline actor, whose job is to be started again."""
        logger.warning("%s goes on from its checkpoint: %s", self._last.name, why)
        self._last = replace(
            self._last, state="starting", phase=f"starting again: {why}", resumes=self._resumes, error=None
        )
        ray.kill(before)
        await asyncio.wait_for(self.closed(), _CALL_TIMEOUT_S)  # its run folder is free

    async def _resume(self, why: str) -> Any:
        """Starts the job anew, on the nodes that are there, by the plan it is to go on by, from its latest checkpoint.
        Returns its pipeline actor."""
        orchestrator = await self._leave_pool(why)
        await _until_the_pool_knows(orchestrator)
        job, self._other = self._other or self._config.job, None
        try:
            self._pipeline_id = await asyncio.to_thread(register, job.spec, orchestrator)
        except SpecError as error:
            if self._former is None:
                raise
            why = self._go_back(str(error))
            job, self._other = self._other or job, None
            self._pipeline_id = await asyncio.to_thread(register, job.spec, orchestrator)
        self._last = replace(self._last, pipeline_id=self._pipeline_id)
        self._config = replace(self._config, spec=job.spec, plan=job.plan, resume=True, why=why)
        self._pipeline, self._closed, self._nodes = None, asyncio.Event(), frozenset()
        return await self._create()

    async def _leave_pool(self, why: str) -> Any:
        """Ends what is registered, if it still is; returns the orchestrator."""
        orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
        with contextlib.suppress(PipelineGoneError):
            ended = orchestrator.unregister_pipeline.remote(self._pipeline_id, why)
            await call(ended, what=f"the end of {self._pipeline_id}", timeout_s=_CALL_TIMEOUT_S)
        return orchestrator

    async def _why_taken(self) -> str:
        """What the control plane ended of the job, and why: what failed may have followed from that."""
        with contextlib.suppress(RayError, ValueError, TimeoutError):
            orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
            status = await asyncio.wait_for(orchestrator.status.remote(), _WHY_TIMEOUT_S)
            ended = [ending for ending in status.endings if ending.pipeline_id == self._pipeline_id]
            if ended:
                return f" (the control plane ended what held {ended[-1].cluster or 'it'}: {ended[-1].why})"
        return ""

    async def _died(self, error: RayError) -> JobStatus:
        """How it ended whose process is gone. The control plane may have ended it, for a reason or by a command."""
        if isinstance(error, RayActorError) and error.actor_init_failed:
            return self._failed(in_words(error))
        why = ""
        with contextlib.suppress(RayError, ValueError, TimeoutError):
            orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
            why = await asyncio.wait_for(orchestrator.why_ended.remote(self._pipeline_id), _WHY_TIMEOUT_S)
        if why.startswith(STOPPED_BY):
            self._stop_wanted, self._stopped_by = True, why
            return replace(self._last, state="stopped", phase="stopped")
        if not why or died_by_itself(why):
            return self._failed(f"its program died: {in_words(error)}; see job.log in its run folder")
        return replace(self._failed(f"the control plane ended it: {why}"), by_pool=True)

    async def _refresh(self, timeout_s: float = _CALL_TIMEOUT_S) -> JobStatus | None:
        """What the pipeline says of itself, if it does. That it failed is kept for the end: it may be started again."""
        status = None
        with contextlib.suppress(RayActorError, TimeoutError):  # whoever watches over the run says so
            status = await asyncio.wait_for(super().status(), timeout_s)
            if status is not None and status.state != "failed":
                self._last = replace(status, resumes=self._resumes)
        return status

    def _failed(self, error: str) -> JobStatus:
        return replace(self._last, state="failed", phase="failed", error=error)


async def _stand_for(pipeline_id: str) -> None:
    """From now on, and until it has a program, the pipeline ends with this process and with no other."""
    scheduler = await asyncio.to_thread(ray.get_actor, SCHEDULER_ACTOR_NAME, NAMESPACE)
    me = {0: this_process(ray.get_runtime_context().get_node_id())}
    with contextlib.suppress(PipelineGoneError):  # what comes of the start says so
        await outlast(
            scheduler, partial(scheduler.name_holders.remote, pipeline_id, LAUNCHER, me), what="the scheduler"
        )


def _is_registered(pipeline_id: str) -> bool:
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
    try:
        orchestrator.registration.remote(pipeline_id).future().result(_CALL_TIMEOUT_S)  # `ray.get` warns in such actors
    except PipelineGoneError:
        return False
    return True


def _with_output(final: JobStatus, early: Path) -> JobStatus:
    """Of a job that never had its run folder: where what its code printed is, if it did."""
    if final.state == "failed" and output.has_more(early):
        return replace(final, error=f"{final.error}\nwhat its code printed is in {early}")
    early.unlink(missing_ok=True)
    return final


async def _staying() -> set[str]:
    """The nodes that are there and are not being drained, as far as the control plane says."""
    draining: frozenset[str] = frozenset()
    with contextlib.suppress(RayError, ValueError, TimeoutError):
        orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
        draining = (await asyncio.wait_for(orchestrator.status.remote(), _WHY_TIMEOUT_S)).draining
    nodes = await asyncio.to_thread(ray.nodes)
    return {node["NodeID"] for node in nodes if node["Alive"] and node["NodeID"] not in draining}


async def _until_the_pool_knows(orchestrator: Any) -> None:
    """Which nodes are gone: until then it would place a job on one of them."""
    deadline = asyncio.get_running_loop().time() + NODE_LOSS_S
    while asyncio.get_running_loop().time() < deadline:
        devices = await call(orchestrator.devices.remote(), what="the pool's devices", timeout_s=_CALL_TIMEOUT_S)
        there = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
        if all(device.node_id in there for device in devices):
            return
        await asyncio.sleep(_LOOK_EVERY_S)
