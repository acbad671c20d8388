"""The scheduler service: the actor through which jobs ask for devices and give them back."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import ray

from rlix.control import checks
from rlix.control.called import called, ended, parts_seen
from rlix.control.core import Core
from rlix.control.gang_queue import Asked
from rlix.control.garbage import collect_between_turns
from rlix.control.home import log_to
from rlix.control.hosts import NO_GPUS
from rlix.control.journal import open_journal
from rlix.control.live_nodes import LiveNodes
from rlix.control.registration import (
    build_registration,
    check_cluster,
    check_gang_request,
    check_rollout_cluster,
    declared,
)
from rlix.control.resource_manager import numbered
from rlix.control.settings import Settings
from rlix.control.starts import Starts
from rlix.control.status import Packer, status_of
from rlix.control.watchdog import here
from rlix.node.memory import KEPT, set_oom_score
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.events import HoldersNamed, PipelineAdmitted, PipelineRegistered
from rlix.protocol.messages import (
    Demand,
    Device,
    Lease,
    LeaseRecord,
    LeaseStatus,
    Process,
    Progress,
    Registration,
    RolloutAnswer,
    StartNeed,
)
from rlix.protocol.types import LAUNCHER, Phase

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class Scheduler:
    """Ray actor. It checks what callers say; `Core` records and acts.

    Nothing calls jobs from here: they ask, in turns, and everything they ask for may be asked again. So one that was
    restarted reads its journal and goes on, and its callers notice a pause.
    """

    def __init__(self, settings: Settings, pool: str, log_level: int = logging.INFO) -> None:
        """`pool`: an id that no other pool ever has."""
        logging.getLogger("rlix").setLevel(log_level)
        set_oom_score(KEPT)
        self._settings = settings
        self._pool = pool
        self._starting = asyncio.Lock()
        self._started: Core | None = None
        self._nodes: LiveNodes | None = None
        self._starts: Starts | None = None
        self._packer = Packer()
        self._closed = False

    async def _core(self) -> Core:
        """Opens the journal at the first call, and goes on from there."""
        async with self._starting:
            if self._closed:
                raise RlixError("the control plane is shutting down")
            if self._started is None:
                self._started = await self._start()
            return self._started

    async def _start(self) -> Core:
        journal = open_journal(self._settings.home, self._pool)  # used by this thread only, so opened by it
        try:
            log_to(self._settings.home, journal.path.stem)
            loop = asyncio.get_running_loop()
            self._nodes = LiveNodes(ray.get_runtime_context().get_node_id(), self._pool)
            core = Core(self._settings, journal, clock=loop, nodes=self._nodes, pool=self._pool)
            count = core.recover(list(journal.replay()))
        except BaseException:  # raised again: the next attempt needs the file
            journal.close()
            raise
        if count:
            logger.warning("going on from %d events in %s", count, journal.path)
        core.start()
        collect_between_turns(loop)
        self._starts = Starts(core, self._nodes.memory)
        self._starts.watch()
        return core

    async def process(self) -> Process:
        """The process this is."""
        await self._core()
        return here()

    async def cordon(self, nodes: tuple[str, ...]) -> None:
        """A person's word: these nodes, all of them, are out of service."""
        (await self._core()).cordon(nodes)

    async def cordoned(self) -> tuple[str, ...]:
        """The nodes that a person has taken out of service."""
        return (await self._core()).state.cordoned

    async def found(self, devices: tuple[Device, ...], draining: Collection[str] = ()) -> int:
        """The nodes' devices as they are now, with any ids, and which nodes are drained; returns how many are taken in.

        New ones of a node that does not say what they remember are not: who was left behind there would share a device
        with a lease that is granted its epoch anew. They are to be told of again. Those of `draining` nodes stay in the
        pool as long as somebody has them under a lease.

        Raises:
            RlixError: there are none, and never were.
        """
        core = await self._core()
        if not devices and not core.state.discovered:
            raise RlixError(NO_GPUS)
        assert self._nodes is not None
        await self._nodes.count_dead()
        before = {device.key for device in core.state.discovered}
        said = await self._nodes.newest_epochs([device for device in devices if device.key not in before])
        core.used(max(said.values(), default=0))
        taken = [device for device in devices if device.key in before or device.node_id in said]
        core.found(numbered(core.state.discovered, taken, core.state.next_device_id), frozenset(draining))
        return len(taken)

    async def close(self, spare: Process | None = None) -> None:
        """Ends every pipeline, then stops planning and closes the journal. `spare`: the process that says so."""
        self._closed = True
        core, self._started = self._started, None
        if core is None:
            return
        why = "the control plane shuts down"
        endings = [asyncio.ensure_future(ended(core, job, why, spare)) for job in core.known.jobs]
        if endings:
            await asyncio.wait(endings, timeout=_CLOSE_TIMEOUT_S)
        core.close()

    # -- pipelines ---------------------------------------------------------------------------------------------------

    async def allocate_pipeline_id(self, kind: str) -> str:
        """A new id: the kind and a number.

        Raises:
            SpecError: `kind` cannot be part of an actor's name.
        """
        checks.kind(kind)
        return (await self._core()).allocate(kind)

    async def register_pipeline(
        self,
        pipeline_id: str,
        ray_namespace: str,
        cluster_tp_configs: object,
        cluster_device_mappings: object,
        cluster_device_alternatives: object = None,
        elastic_clusters: object = None,
        name: str = "",
        program: Process | None = None,
        launcher: Process | None = None,
    ) -> Registration:
        """See `Orchestrator.register_pipeline`. Registering the same again changes nothing."""
        core = await self._core()
        checks.text("register_pipeline", "name", name)
        checks.text("register_pipeline", "ray_namespace", ray_namespace)
        checks.process("register_pipeline", program, optional=True)
        checks.process("register_pipeline", launcher, optional=True)
        if pipeline_id not in core.state.allocated:
            raise SpecError(
                f"register_pipeline: unknown pipeline id {pipeline_id!r}; get one from allocate_pipeline_id first"
            )
        registration = build_registration(
            pipeline_id,
            ray_namespace,
            cluster_tp_configs,
            cluster_device_mappings,
            core.state.lent,
            cluster_device_alternatives,
            elastic_clusters,
            [other for other in core.state.registrations.values() if other.pipeline_id != pipeline_id],
            called=name,
        )
        before = core.state.registrations.get(pipeline_id)
        if before is None:
            who = (("", program), (LAUNCHER, launcher))
            named = (HoldersNamed(pipeline_id, of, ((0, process),)) for of, process in who if process is not None)
            core.record(PipelineRegistered(registration), *named)
            return registration
        # Asked for by size it might be placed elsewhere now; what was answered the first time stays.
        if declared(before) != declared(registration):
            raise SpecError(
                f"register_pipeline({pipeline_id!r}): already registered; allocate another id for another pipeline"
            )
        return before

    async def admit_pipeline(self, pipeline_id: str) -> None:
        """See `Orchestrator.admit_pipeline`. Admitting an admitted pipeline changes nothing."""
        core = await self._core()
        checks.registration(core, pipeline_id)
        if pipeline_id not in core.known.jobs:
            core.record(PipelineAdmitted(pipeline_id))

    async def may_start(self, pipeline_id: str, need: StartNeed) -> str:
        """Whether an admitted pipeline may start its processes: "" or why it waits. To be asked until it may."""
        core = await self._core()
        checks.job(core, pipeline_id).heard(None, core.clock.time())
        assert self._starts is not None
        return self._starts.may_start(pipeline_id, need)

    async def unregister_pipeline(self, pipeline_id: str, reason: str = "", spare: Process | None = None) -> None:
        """See `Orchestrator.unregister_pipeline`. `spare`: the process that asks; it is not ended with the others."""
        core = await self._core()
        checks.registration(core, pipeline_id)
        checks.text(pipeline_id, "reason", reason)
        checks.process(pipeline_id, spare, optional=True)
        await ended(core, pipeline_id, reason, spare)

    async def name_holders(self, pipeline_id: str, cluster: str, processes: Mapping[int, Process]) -> None:
        """Names the processes that keep bytes under a cluster's leases, by rank; cluster "" is the pipeline's program,
        whose end is the pipeline's, and `LAUNCHER` who starts that, whose end is the pipeline's until it has one."""
        core = await self._core()
        checks.job(core, pipeline_id)
        if cluster not in ("", LAUNCHER):
            check_cluster(core.state.registrations[pipeline_id], cluster)
        checks.holders(checks.name(core, pipeline_id), processes)
        core.name_holders(pipeline_id, cluster, tuple(processes.items()))

    async def beat(self, pipeline_id: str, process: Process, held: Sequence[int]) -> None:
        """A process that speaks for the pipeline lives, and knows that it holds these leases."""
        core = await self._core()
        checks.job(core, pipeline_id)
        checks.process(checks.name(core, pipeline_id), process)
        checks.epochs(checks.name(core, pipeline_id), held)
        core.watch.beat(pipeline_id, process, frozenset(held))

    # -- devices -----------------------------------------------------------------------------------------------------

    async def poll_gang(
        self, pipeline_id: str, cluster: str, phase: Phase, asked: Asked, wait_s: float = 5.0
    ) -> Lease | None:
        """Asks for devices of the cluster, or asks again by the same key; answers after `wait_s` seconds at the
        latest, with None while it waits. A request about which nobody asks any more is dropped.

        Raises:
            SpecError: the request makes no sense.
            PipelineGoneError: the pipeline is not admitted, or ended meanwhile.
            WaitTimeoutError: not granted within the `timeout_s` asked for; says who holds the devices.
            StaleEpochError: what it gives back it does not hold (any more).
            DeadlockError: it waits for what its own caller keeps.
        """
        core = await self._core()
        job, where = checks.job(core, pipeline_id), checks.name(core, pipeline_id)
        checks.asked(where, asked)
        checks.wait(where, wait_s)
        job.heard(asked.holder, core.clock.time())
        ticket = core.known.gangs.find(pipeline_id, asked.key) if asked.key else None
        given, gone = checks.held(core, pipeline_id, asked.giving)
        if ticket is None:
            if gone is not None:
                raise gone
            found = check_gang_request(core.state.registrations[pipeline_id], cluster, phase, asked.devices)
            ticket = core.request(pipeline_id, found, Phase(phase), asked)
        # When it has its place: by the queue's rules nobody comes in between. Asked again, what a scheduler that was
        # ended in between has not come to.
        core.given_back(*given)
        core.asked_again(ticket)
        if ticket.outcome is None:
            try:
                await called(ticket.watchers, wait_s)
            except asyncio.CancelledError:
                core.loop.withdraw(ticket)
                raise
        if isinstance(ticket.outcome, RlixError):
            raise ticket.outcome
        if ticket.outcome is None:
            core.not_asked(ticket)
        return ticket.outcome

    async def withdraw_gang(self, pipeline_id: str, key: str) -> None:
        """Nobody wants what was asked for under this key any more; fine when there is nothing."""
        core = await self._core()
        ticket = core.known.gangs.find(pipeline_id, key)
        if ticket is not None:
            core.loop.withdraw(ticket)

    async def release(self, pipeline_id: str, epochs: Sequence[int]) -> None:
        """Gives leases back. The caller has released the devices' memory; on this node that is looked at at once.

        Raises:
            SpecError: these are no epochs.
            StaleEpochError: the pipeline holds some of them not (any more); the others were given back.
        """
        checks.epochs(pipeline_id, epochs)
        core = await self._core()
        held, gone = checks.held(core, pipeline_id, epochs)
        core.given_back(*held)
        if gone is not None:
            raise gone

    async def give_back(self, pipeline_id: str, epoch: int, devices: Sequence[int]) -> Lease:
        """Gives some devices of a gang back, as `release` does; its lease keeps the others. Saying it twice is fine.

        Answers when they are free, a moment after their locks are, with what is left of the lease.

        Raises:
            SpecError: these are no devices, or all that are left of the lease, or it is a rollout's.
            StaleEpochError: the pipeline does not hold it (any more), or kept them locked, so that it is taken.
        """
        checks.epochs(pipeline_id, (epoch,))
        core = await self._core()
        lease, where = checks.active(core, pipeline_id, epoch), checks.name(core, pipeline_id)
        checks.part(where, lease, devices)
        core.part_given_back(lease, devices)
        await parts_seen(core, epoch)
        left = checks.active(core, pipeline_id, epoch)
        checks.part(where, left, devices)  # others of them may have been given back meanwhile
        return left

    async def poll_rollout(
        self,
        pipeline_id: str,
        cluster: str,
        process: Process | None,
        held: Sequence[int],
        draining: Sequence[int],
        wait_s: float = 5.0,
    ) -> RolloutAnswer:
        """What a rollout that knows of these leases does not know yet; empty when nothing happened for `wait_s`."""
        core = await self._core()
        job, where = checks.job(core, pipeline_id), checks.name(core, pipeline_id)
        check_rollout_cluster(core.state.registrations[pipeline_id], cluster)
        checks.process(where, process, optional=True)
        checks.epochs(where, held)
        checks.epochs(where, draining)
        checks.wait(where, wait_s)
        job.heard(process, core.clock.time())
        known, given = frozenset(held), frozenset(draining)
        deadline = core.clock.time() + wait_s
        while True:
            checks.not_drained(core, pipeline_id, cluster)
            answer = core.poll(pipeline_id, cluster, known, given)
            left_s = deadline - core.clock.time()
            if answer != RolloutAnswer() or left_s <= 0:
                return answer
            if not await called(core.known.watchers(pipeline_id, cluster), left_s):
                return RolloutAnswer()
            checks.job(core, pipeline_id)

    async def report_demand(self, pipeline_id: str, cluster: str, demand: Demand) -> None:
        """What the rollout still has to do.

        Raises:
            SpecError: not a rollout cluster, or not a demand.
        """
        core = await self._core()
        job = checks.job(core, pipeline_id)
        check_rollout_cluster(core.state.registrations[pipeline_id], cluster)
        checks.demand(checks.name(core, pipeline_id), demand)
        job.heard(None, core.clock.time())
        core.report(pipeline_id, cluster, demand)

    async def report_progress(self, pipeline_id: str, progress: Progress) -> None:
        """How far its program is, for people; nothing is decided by it.

        Raises:
            SpecError: it is none.
        """
        core = await self._core()
        job = checks.job(core, pipeline_id)
        checks.progress(checks.name(core, pipeline_id), progress)
        job.progress = progress

    async def give_up_device(self, device_id: int) -> tuple[Lease, ...]:
        """A person says that a quarantined device is free; returns the leases that kept it.

        Raises:
            SpecError: it is not quarantined.
        """
        if leases := (await self._core()).loop.give_up(device_id):
            return leases
        raise SpecError(f"device {device_id} is not quarantined, so there is nothing to give up")

    # -- questions ---------------------------------------------------------------------------------------------------

    async def leases(self, pipeline_id: str) -> tuple[LeaseStatus, ...]:
        """The leases the pipeline holds now, in order of grant."""
        return (await self._core()).state.leases_of(pipeline_id)

    async def lease_log(self, pipeline_id: str, since: int = 0) -> tuple[LeaseRecord, ...]:
        """What happened to the pipeline's leases after record number `since`."""
        return (await self._core()).known.log.since(pipeline_id, since)

    async def leases_since(self, number: int) -> tuple[LeaseRecord, ...]:
        """What happened to all leases after record number `number`, as far as it is kept."""
        return (await self._core()).known.log.all_since(number)

    async def why_ended(self, pipeline_id: str) -> str:
        """Why a pipeline ends or has ended; "" when nothing is known of that."""
        core = await self._core()
        return core.state.ending.get(pipeline_id) or core.known.log.why_ended(pipeline_id)

    async def devices(self) -> tuple[Device, ...]:
        """The pool's devices, by id."""
        return (await self._core()).state.devices

    async def pool_id(self) -> str:
        """What this pool is called in device locks."""
        return self._pool

    async def registration(self, pipeline_id: str) -> Registration:
        """What the pipeline registered."""
        return checks.registration(await self._core(), pipeline_id)

    async def status(self) -> tuple[bytes, bytes]:
        """See `Orchestrator.status`; packed."""
        return self._packer.pack(status_of(await self._core()))
