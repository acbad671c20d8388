"""The front door of the control plane: the actor that users' programs talk to."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from rlix.control.hosts import names
from rlix.control.rpc import Patient
from rlix.control.status import unpacked
from rlix.control.watchdog import here, watch_over, watch_over_coordinators
from rlix.node.host import Host
from rlix.node.memory import KEPT, set_oom_score
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import (
    ControlStatus,
    Device,
    Lease,
    LeaseRecord,
    NodeStatus,
    Process,
    Registration,
    StartNeed,
)
from rlix.protocol.types import NAMESPACE, RESOURCE_MANAGER_ACTOR_NAME, SCHEDULER_ACTOR_NAME

CALL_TIMEOUT_S = 30.0


class Orchestrator:
    """Ray actor that admits pipelines. It keeps no state: the scheduler service is the only writer.

    Its calls wait for a scheduler that is being started again.
    """

    def __init__(self, log_level: int = logging.INFO, stopped_s: float = 10.0) -> None:
        """`stopped_s`: see `Settings`."""
        logging.getLogger("rlix").setLevel(log_level)
        set_oom_score(KEPT)
        self._scheduler = Patient(lambda: ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE), "the scheduler")
        self._manager = Patient(lambda: ray.get_actor(RESOURCE_MANAGER_ACTOR_NAME, NAMESPACE), "the resource manager")
        watch_over((RESOURCE_MANAGER_ACTOR_NAME,))
        watch_over_coordinators(stopped_s, self.unregister_pipeline)

    def process(self) -> Process:
        """The process this is."""
        return here()

    def ready(self) -> int:
        """Brings the control plane up; returns the number of devices it found."""
        count: int = self._manager.ask("discover", timeout_s=CALL_TIMEOUT_S)
        return count

    def allocate_pipeline_id(self, kind: str) -> str:
        """A new pipeline id, such as "ft_1" for kind "ft"."""
        return str(self._ask("allocate_pipeline_id", kind))

    def register_pipeline(
        self,
        pipeline_id: str,
        ray_namespace: str,
        cluster_tp_configs: Mapping[str, int],
        cluster_device_mappings: Mapping[str, Sequence[int] | int | Mapping[str, int] | None],
        cluster_device_alternatives: Mapping[str, Sequence[Sequence[int]]] | None = None,
        elastic_clusters: Sequence[str] | None = None,
        name: str = "",
        program: Process | None = None,
        launcher: Process | None = None,
    ) -> Registration:
        """Declares the devices of each cluster of the pipeline, and its tensor-parallel size. Cluster names are free.

        `name` is what people call it. `program`: the process whose end is the pipeline's, where it is known already;
        `launcher`: who starts it otherwise, whose end is the pipeline's as long as it has no program.

        A mapping is a list of device ids, a number of devices, a range `{"min": 4, "max": 8}` (gangs only) or None for
        the whole pool (elastic clusters only); what is asked for by size is placed, and the answer says where.
        `elastic_clusters` run rollouts and report demand (default: `actor_infer`); the others ask for gangs.
        `cluster_device_alternatives`: for a cluster that asks for gangs and lists its devices, further lists on which
        it can run as well; one that asks for a size gets some unless it gives an empty list here. It is granted one of
        them when somebody works on its own and nobody there, or when that costs less; the lease says which
        (`lease.devices`), and the pipeline must be able to run there.

        Raises:
            SpecError: the declaration is wrong; the message names the cluster, the field and the fix.
        """
        try:
            registration: Registration = self._ask(
                "register_pipeline",
                pipeline_id,
                ray_namespace,
                cluster_tp_configs,
                cluster_device_mappings,
                cluster_device_alternatives,
                elastic_clusters,
                name,
                program,
                launcher,
            )
        except SpecError as error:
            if not (drained := self.status().drained):
                raise
            raise SpecError(f"{error}\nthe pool lacks devices: {drained}") from None
        return registration

    def admit_pipeline(self, pipeline_id: str) -> None:
        """Lets a registered pipeline ask for devices."""
        self._ask("admit_pipeline", pipeline_id)

    def may_start(self, pipeline_id: str, need: StartNeed) -> str:
        """Whether the hosts have the memory for an admitted pipeline's processes: "" or why it waits, in its order.

        Who waits asks again every few seconds, or loses its place.
        """
        return str(self._ask("may_start", pipeline_id, need))

    def unregister_pipeline(self, pipeline_id: str, reason: str = "") -> None:
        """Ends a pipeline: its program and workers are killed, its devices freed, its waiting requests refused. May be
        repeated."""
        self._ask("unregister_pipeline", pipeline_id, reason)

    def why_ended(self, pipeline_id: str) -> str:
        """Why a pipeline ends or has ended; "" when nothing is known of that."""
        return str(self._ask("why_ended", pipeline_id))

    def give_up_device(self, device_id: int) -> tuple[Lease, ...]:
        """A person says that a quarantined device is free; returns the leases that kept it."""
        leases: tuple[Lease, ...] = self._ask("give_up_device", device_id)
        return leases

    def status(self) -> ControlStatus:
        """Everything a terminal view shows; cheap enough to poll."""
        status = unpacked(*self._ask("status"))
        return replace(status, draining={**status.draining, **self._names(status)}) if status.draining else status

    def _names(self, status: ControlStatus) -> dict[str, str]:
        """Of the hosts that are drained: only Ray knows them."""
        return {node_id: name for node_id, name in names(ray.nodes()).items() if node_id in status.draining}

    def leases_since(self, number: int) -> tuple[LeaseRecord, ...]:
        """What happened to all leases after record `number` (a unix time in microseconds), as far as kept."""
        records: tuple[LeaseRecord, ...] = self._ask("leases_since", number)
        return records

    def devices(self) -> tuple[Device, ...]:
        """The pool's devices, by id; nodes come and go, so ids have gaps."""
        devices: tuple[Device, ...] = self._ask("devices")
        return devices

    def nodes(self) -> tuple[NodeStatus, ...]:
        """The state of each host."""
        nodes: tuple[NodeStatus, ...] = self._manager.ask("nodes", timeout_s=CALL_TIMEOUT_S)
        return nodes

    def cordon(self, node: str, wanted: bool) -> tuple[NodeStatus, ...]:
        """Takes a host (its name, address or the beginning of its node id) out of service, or back into it; returns
        what it is from now on. Nothing that runs there is ended: its devices leave the pool as they become free.

        Raises:
            SpecError: there is no such host, or several; names those there are.
        """
        status: tuple[NodeStatus, ...] = self._manager.ask("cordon", node, wanted, timeout_s=2 * CALL_TIMEOUT_S)
        return status

    def hosts(self, paths: Sequence[str] = (), token: str = "", only: Sequence[str] = ()) -> tuple[Host, ...]:
        """What the hosts (`only` these, by node id) have, and see of `paths`: see `rlix.node.host.host`.

        Raises:
            RlixError: one does not answer; names it.
        """
        hosts: tuple[Host, ...] = self._manager.ask("hosts", paths, token, only, timeout_s=2 * CALL_TIMEOUT_S)
        return hosts

    def registration(self, pipeline_id: str) -> Registration:
        """What a pipeline registered.

        Raises:
            PipelineGoneError: it is not registered.
        """
        registration: Registration = self._ask("registration", pipeline_id)
        return registration

    def _ask(self, method: str, *args: object) -> Any:
        return self._scheduler.ask(method, *args, timeout_s=CALL_TIMEOUT_S)
