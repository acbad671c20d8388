"""The coordinator: the actor of a job that people and their programs talk to."""

import asyncio
import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlix.control.rpc import call, in_words, outlast
from rlix.node import output
from rlix.node.memory import KEPT, set_oom_score
from rlix.pipeline.jobs.hosts import home
from rlix.pipeline.jobs.need import start_need
from rlix.pipeline.jobs.status import JobConfig, JobStatus, JobSummary
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.lora import MULTI_LORA, RunSpec
from rlix.pipeline.spec.named import import_class
from rlix.protocol.errors import SpecError, WaitTimeoutError
from rlix.protocol.types import HEAD_RESOURCE, NAMESPACE, ORCHESTRATOR_ACTOR_NAME, pipeline_namespace
from rlix.workers.prefork import runtime_env
from rlix.workers.worker import WORKER_ENVIRONMENT

if TYPE_CHECKING:
    from rlix.pipeline.base import Pipeline

logger = logging.getLogger(__name__)

_TRAINER = "rlix.pipeline.trainer:Trainer"
_SHIPPED = {MULTI_LORA: "rlix.pipeline.multi_lora:MultiLora"}
_PIPELINE_FORMS = "write file.py:Class or package.module:Class"
_CHANGES = ("add", "pause", "resume", "remove")
_LOOK_S = 1.0
_ASK_AGAIN_S = (0.1, 1.0)  # whether it may start: at first, and at most
_CALL_TIMEOUT_S = 60.0
_PIPELINE_THREADS = 16
"""`run` and `wait_ended` keep one each; the rest serve status calls, which may overlap."""


class PipelineCoordinator:
    """Creates a job's pipeline actor, asks it how it does, and notices its end.

    The control plane never calls it: a pipeline asks for what it needs, and its process is watched.
    """

    def __init__(self, pipeline_id: str, pipeline_config: JobConfig | JobSpec) -> None:
        set_oom_score(KEPT)
        self._pipeline_id = pipeline_id
        self._config = JobConfig.of(pipeline_config)
        self._pipeline: Any = None
        self._closed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def create_pipeline_actor(self, pipeline_config: JobConfig | JobSpec | None = None) -> Any:
        """Start the `PipelineActor` that executes the job; call its `run()` to train.

        Raises:
            SpecError: the spec names a pipeline whose module does not exist.
            RuntimeError: the job already has its actor.
        """
        if self._pipeline is not None:
            raise RuntimeError(f"pipeline {self._pipeline_id!r} already has its pipeline actor")
        config = self._config if pipeline_config is None else JobConfig.of(pipeline_config)
        check_importable(config.spec)
        await self._await_memory(config.spec)
        where = await self._where()
        actor_class = ray.remote(PipelineActor)
        self._pipeline = actor_class.options(
            name=f"pipeline:{self._pipeline_id}",
            namespace=pipeline_namespace(self._pipeline_id),
            num_cpus=0,
            max_concurrency=_PIPELINE_THREADS,
            runtime_env=runtime_env(WORKER_ENVIRONMENT),
            **where,
        ).remote(self._pipeline_id, config)
        self._watch = asyncio.create_task(self._watch_pipeline())
        return self._pipeline

    async def _where(self) -> dict[str, Any]:
        """Ray's options for a process on the job's own host."""
        orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
        asked = orchestrator.registration.remote(self._pipeline_id), orchestrator.devices.remote()
        bounds: dict[str, Any] = {"what": f"where {self._pipeline_id} was placed", "timeout_s": _CALL_TIMEOUT_S}
        registration, devices = [await call(each, **bounds) for each in asked]
        node = home(registration, {device.id: device for device in devices})
        if node is None:
            return {"resources": {HEAD_RESOURCE: 0.001}}
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}

    async def _await_memory(self, spec: JobSpec) -> None:
        """Until the hosts have room for the job's processes. Who launched it need not wait: see `waiting`."""
        need, pause_s = start_need(spec), _ASK_AGAIN_S[0]
        while True:
            orchestrator = await asyncio.to_thread(ray.get_actor, ORCHESTRATOR_ACTOR_NAME, NAMESPACE)
            asked = orchestrator.may_start.remote(self._pipeline_id, need)
            try:
                why = await call(asked, what="whether it may start", timeout_s=_CALL_TIMEOUT_S)
            except RayActorError as error:  # it is being started again
                why = in_words(error)
            if not why:
                return
            self.waiting(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _ASK_AGAIN_S[1])

    def waiting(self, why: str) -> None:
        """The job cannot start yet."""
        logger.info("%s waits to start: %s", self._pipeline_id, why)

    async def status(self) -> JobStatus | None:
        """None until the pipeline actor exists."""
        return None if self._pipeline is None else await self._pipeline.status.remote()

    async def stop(self) -> None:
        """Ask the job to stop cleanly; `run()` then returns early."""
        if self._pipeline is not None:
            pipeline = self._pipeline
            await outlast(pipeline, pipeline.request_stop.remote, what=f"the pipeline of {self._pipeline_id}")

    async def change_run(self, verb: str, name: str, run: RunSpec | None = None) -> None:
        """Of a multi_lora job: "add" a run, or "pause", "resume" or "remove" one. Raises SpecError when it cannot."""
        if self._pipeline is None:
            raise SpecError("the job has not started yet; try again in a moment")
        await self._pipeline.change_run.remote(verb, name, run)

    async def closed(self) -> None:
        """Return when the job has ended, however it ended."""
        await self._closed.wait()

    async def _watch_pipeline(self) -> None:
        pipeline = self._pipeline
        try:
            await outlast(pipeline, pipeline.wait_ended.remote, what=f"the pipeline of {self._pipeline_id}")
        except (RayActorError, WaitTimeoutError) as error:
            why = in_words(error) if isinstance(error, RayActorError) else error
            logger.warning("%s: its own process is lost: %s", self._config.spec.name, why)
        self._closed.set()


class PipelineActor:
    """The actor around a job's `Pipeline`: only its process imports what the pipeline needs."""

    def __init__(self, pipeline_id: str, config: JobConfig) -> None:
        early_output(config.run_dir)  # what is imported next may print
        self._pipeline: Pipeline = resolve_pipeline(config.spec)(pipeline_id, config)
        self._pipeline.keeps_output = True
        self._pipeline.client.join(config.spec.name)
        self._starting, self._begun = threading.Lock(), False
        self._outcome: Future[JobSummary] = Future()

    def run(self) -> JobSummary:
        """Trains to the end, however it comes; then nothing of the job is left but its run folder.

        Whoever lost the connection calls it again, and gets what becomes of the one run.

        Raises:
            WaitTimeoutError: code of the job's own hung while it held devices.
        """
        with self._starting:
            first, self._begun = not self._begun, True
        if first:
            try:
                self._outcome.set_result(self._run())
            except BaseException as error:  # noqa: BLE001 - raised below, to whoever asks
                self._outcome.set_exception(error)
        return self._outcome.result()

    def _run(self) -> JobSummary:
        ended: Future[JobSummary] = Future()
        threading.Thread(target=_run_into, args=(ended, self._pipeline.run), name="run", daemon=True).start()
        try:
            while not wait([ended], _LOOK_S).done:
                if (error := self._pipeline.hang()) is not None:
                    self._pipeline.give_up(error)
                    raise error
            return ended.result()
        finally:
            self._pipeline.client.unregister("its run ended")

    def wait_ended(self) -> None:
        self._pipeline.wait_ended()

    def nodes(self) -> frozenset[str]:
        """The ids of the nodes without which the job cannot go on: this process's and those of its gangs' devices."""
        gangs = [cluster for cluster in self._pipeline.registration.clusters if not cluster.elastic]
        devices = {self._pipeline.devices[device].node_id for cluster in gangs for device in cluster.devices}
        return frozenset(devices | {ray.get_runtime_context().get_node_id()})

    def request_stop(self) -> None:
        self._pipeline.request_stop()

    def status(self) -> JobStatus:
        return self._pipeline.status()

    def change_run(self, verb: str, name: str, run: RunSpec | None) -> None:
        spec = self._pipeline.spec
        if verb not in _CHANGES or not spec.multi_lora:
            raise SpecError(f"{spec.name} has no run to {verb}: it is no multi_lora job")
        if not hasattr(self._pipeline, "turns"):
            raise SpecError(f"{spec.name} has not begun its runs yet; try again in a moment")
        change = getattr(self._pipeline, verb)
        change(name) if run is None else change(name, run)


def early_output(run_dir: Path) -> None:
    """What this process prints goes to a file beside the run folder, until that is the job's."""
    with contextlib.suppress(OSError):  # on a host that does not have the place; the job says so
        output.to_file(output.early_file(run_dir), bounded=True)


def _run_into(ended: "Future[JobSummary]", run: Callable[[], JobSummary]) -> None:
    try:
        ended.set_result(run())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        ended.set_exception(error)


def check_importable(spec: JobSpec) -> None:
    """Raise SpecError when the file or module of a pipeline of the user's does not exist; nothing is loaded."""
    if spec.pipeline is None or spec.pipeline.name in _SHIPPED:
        return
    name = spec.pipeline.name
    module = name.rpartition(":")[0]
    try:
        exists = Path(module).is_file() if module.endswith(".py") else importlib.util.find_spec(module) is not None
    except (ImportError, ValueError) as error:
        raise SpecError(f"pipeline: {name!r} cannot be imported ({error}); {_PIPELINE_FORMS}") from error
    if not exists:
        raise SpecError(f"pipeline: {name!r} cannot be imported (no module {module!r}); {_PIPELINE_FORMS}")


def resolve_pipeline(spec: JobSpec) -> "type[Pipeline]":
    """The pipeline class of a job.

    Raises:
        SpecError: it cannot be imported, or is no `Pipeline`.
    """
    name = _TRAINER if spec.pipeline is None else spec.pipeline.name
    found: type[Pipeline] = import_class("pipeline", _SHIPPED.get(name, name))
    return found
