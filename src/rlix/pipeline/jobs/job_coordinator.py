"""The coordinator of a launched job: it starts the run, knows how it ended, and outlives whoever launched it."""

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlix.control.rpc import root_cause
from rlix.pipeline.base import JobConfig, JobStatus
from rlix.pipeline.jobs.coordinator import PipelineCoordinator
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME

logger = logging.getLogger(__name__)

_WHY_TIMEOUT_S = 10.0
REMEMBERED_S = 60.0
"""For so long after its end a job can still be asked how it ended; its run folder says so for ever."""


class JobCoordinator(PipelineCoordinator):
    """Ray actor; create it with `lifetime="detached"`. It ends itself when the job has ended."""

    def __init__(self, pipeline_id: str, pipeline_config: JobConfig) -> None:
        super().__init__(pipeline_id, pipeline_config)
        spec = pipeline_config.spec
        self._last = JobStatus(spec.name, pipeline_id, "starting", 0, spec.steps, "starting")
        self._final: JobStatus | None = None
        self._ended = asyncio.Event()
        self._starting = asyncio.Lock()
        self._supervisor: asyncio.Task[None] | None = None
        self._stop_wanted = False

    async def start(self) -> None:
        """Start the run. Calling it again changes nothing."""
        async with self._starting:
            if self._supervisor is None:
                pipeline = await self.create_pipeline_actor()
                self._supervisor = asyncio.create_task(self._see_to_the_end(pipeline))

    async def config(self) -> JobConfig:
        """What was launched."""
        return self._config

    async def status(self) -> JobStatus:
        """What the job is doing, or how it ended."""
        if self._final is None:
            await self._refresh()
        return self._final or self._last

    async def stop(self) -> None:
        """Ask the job to stop cleanly."""
        self._stop_wanted = True
        with contextlib.suppress(RayActorError):
            await super().stop()

    async def ended(self) -> JobStatus:
        """How the job ended, once it has."""
        await self._ended.wait()
        assert self._final is not None
        return self._final

    async def _see_to_the_end(self, pipeline: Any) -> None:
        if self._stop_wanted:
            await self.stop()
        self._final = await self._run(pipeline)
        self._ended.set()
        await self.closed()
        ray.kill(pipeline)
        await asyncio.sleep(REMEMBERED_S)
        logger.info("%s has been over for %.0f s: its coordinator ends", self._final.name, REMEMBERED_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _run(self, pipeline: Any) -> JobStatus:
        try:
            summary = await pipeline.run.remote()
        except RayTaskError as error:
            cause = root_cause(error)
            await self._refresh()
            return self._failed(self._last.error or f"{type(cause).__name__}: {cause}")
        except RayActorError as error:
            return self._failed(await self._why_it_died(error))
        await self._refresh()
        return replace(self._last, state=summary.state, phase=summary.state)

    async def _why_it_died(self, error: RayActorError) -> str:
        """The control plane may have ended it, and then knows why."""
        with contextlib.suppress(RayError, ValueError, TimeoutError):
            orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
            why = await asyncio.wait_for(orchestrator.why_ended.remote(self._pipeline_id), _WHY_TIMEOUT_S)
            if why:
                return f"the control plane ended it: {why}"
        return f"the pipeline actor died: {error}"

    async def _refresh(self) -> None:
        with contextlib.suppress(RayActorError):  # whoever watches over the run says so
            self._last = await super().status() or self._last

    def _failed(self, error: str) -> JobStatus:
        return replace(self._last, state="failed", phase="failed", error=error)
