"""A pool that exists only on a virtual clock, under the core that runs the live one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlix.control.core import Core
from rlix.control.planning import Decide
from rlix.control.ports import Clock
from rlix.control.settings import Settings
from rlix.control.writer import EventStore
from rlix.protocol.events import DevicesDiscovered, PipelineAdmitted, PipelineAllocated, PipelineRegistered
from rlix.protocol.messages import Device, Occupant, Process, Registration
from rlix.scheduler.commit import decide
from rlix.scheduler.policies.base import Policy
from rlix.sim.books import Forgetful
from rlix.sim.jobs import devices_of
from rlix.sim.workload import Workload

_PATIENCE_S = 1e6


class FreeNodes:
    """Nothing is ever left on a device, and there is nothing to end."""

    def occupied(self, devices: Sequence[Device], done: Callable[[tuple[Occupant, ...]], None]) -> None:
        done(())

    def kill(
        self,
        processes: Sequence[Process],
        why: str,
        done: Callable[[tuple[Process, ...]], None],
        devices: Sequence[Device] = (),
    ) -> None:
        done(())

    def states(self, processes: Sequence[Process], done: Callable[[Mapping[Process, str]], None]) -> None:
        done({})


def new_core(
    workload: Workload,
    policy: Policy,
    clock: Clock,
    *,
    journal: EventStore | None = None,
    decide: Decide = decide,
) -> Core:
    """A core with the workload's devices and no jobs. What planning takes in real time does not reach its clock."""
    core = Core(
        # Simulated rollouts give back what they shall, however long the workload says that it takes.
        Settings(home=Path("unused"), shrink_deadline_s=_PATIENCE_S),
        Forgetful() if journal is None else journal,
        clock=clock,
        nodes=FreeNodes(),
        pool="sim",
        wall=clock.time,
        policy=policy,
        decide=decide,
        stopwatch=lambda: 0.0,
        strict=True,
    )
    core.record(DevicesDiscovered(devices_of(workload)))
    return core


def admit(core: Core, registration: Registration) -> None:
    pipeline_id = registration.pipeline_id
    core.record(PipelineAllocated(pipeline_id, "sim"), PipelineRegistered(registration), PipelineAdmitted(pipeline_id))
